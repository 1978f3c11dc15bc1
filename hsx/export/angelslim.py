"""AngelSlim, EAGLE-3 offline: `rank_0/rows_0-2000/data_0.ckpt`..., the rank being the part of `--shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsx.export.base import Base, row_folder
from hsx.export.files import CheckedFile, write_torch

if TYPE_CHECKING:
    from hsx.export.protocol import Exported


class AngelSlim(Base):
    """Implements `hsx.export.protocol.Format`."""

    name = "angelslim"
    keys: ClassVar = {
        "input_ids": "int64 [1, S]",
        "loss_mask": "int64 [1, S]",
        "hidden_states": "bfloat16 [1, S, 3H]",
        "target_hiddens": "bfloat16 [1, S, H]",
    }
    slots = ("hidden_states[..., {slot}H:{next}H]", "target_hiddens")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"rank_{part}/{row_folder(row)}/data_{row}.ckpt"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_torch(
            file,
            {
                "input_ids": sample.input_ids.unsqueeze(0),
                "loss_mask": sample.loss_mask.unsqueeze(0),
                "hidden_states": sample.layers.unsqueeze(0),
                "target_hiddens": sample.final.unsqueeze(0),
            },
        )


FORMAT = AngelSlim()
