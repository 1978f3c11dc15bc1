"""Plain safetensors, for everybody else: the states as they are stored, which the file's metadata names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar, Literal

from hsx.export.base import Base, row_folder
from hsx.export.files import CheckedFile, write_safetensors

if TYPE_CHECKING:
    from hsx.core.spec import FinalState
    from hsx.export.protocol import Exported


class Plain(Base):
    """Implements `hsx.export.protocol.Format`."""

    name = "safetensors"
    final: FinalState | None = None
    layers = None
    depends_on: Literal["prompt", "mask", "id"] = "id"
    layer_shift = 0
    any_order = True
    keys: ClassVar = {"input_ids": "int64 [S]", "loss_mask": "int64 [S]", "hidden_states": "bfloat16 [S, K+1, H]"}
    slots = ("hidden_states[:, {slot}]", "hidden_states[:, -1]")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"{row_folder(row)}/sample_{row}.safetensors"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_safetensors(
            file,
            {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask, "hidden_states": sample.states},
            {"id": sample.id, "states": json.dumps(list(sample.state_names))},
        )


FORMAT = Plain()
