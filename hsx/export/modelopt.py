"""NVIDIA ModelOpt, offline: one flat folder of `.pt` files, which its loader reads with `weights_only=True`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from hsx.export.base import Base
from hsx.export.files import CheckedFile, write_torch

if TYPE_CHECKING:
    from hsx.core.spec import FinalState
    from hsx.export.protocol import Exported


class ModelOpt(Base):
    """Implements `hsx.export.protocol.Format`.

    The flag `hidden_states_prenorm` is in every file: ModelOpt takes its absence for post_norm, and norms what is not.
    """

    name = "modelopt"
    final: FinalState | None = None
    layers = None
    depends_on: Literal["prompt", "mask", "id"] = "id"
    keys: ClassVar = {
        "input_ids": "int64 [S]",
        "hidden_states": "bfloat16 [S, H]",
        "aux_hidden_states": "bfloat16 [S, K*H]",
        "loss_mask": "int64 [S]",
        "conversation_id": "str",
        "hidden_states_prenorm": "bool",
    }
    slots = ("aux_hidden_states[:, {slot}H:{next}H]", "hidden_states")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"sample_{row:08d}.pt"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_torch(
            file,
            {
                "input_ids": sample.input_ids,
                "hidden_states": sample.final,
                "aux_hidden_states": sample.layers,
                "loss_mask": sample.loss_mask,
                "conversation_id": sample.id,
                "hidden_states_prenorm": sample.state_names[-1] == "pre_norm",
            },
        )


FORMAT = ModelOpt()
