"""SpecForge, DFlash, Domino and DSpark offline: one export for all three."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsx.export.base import Base, row_folder
from hsx.export.files import CheckedFile, write_torch

if TYPE_CHECKING:
    from hsx.export.protocol import Exported, IndexRow


class DFlash(Base):
    """Implements `hsx.export.protocol.Format`.

    `target_last_hidden_states` is for DSpark; the others do not look at it.
    """

    name = "specforge-dflash"
    layers = None
    keys: ClassVar = {
        "input_ids": "int64 [S]",
        "loss_mask": "int64 [S]",
        "hidden_states": "bfloat16 [1, S, K*H]",
        "target_last_hidden_states": "bfloat16 [1, S, H]",
    }
    slots = ("hidden_states[..., {slot}H:{next}H]", "target_last_hidden_states")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"{row_folder(row)}/data_{row}.ckpt"

    def unfit(self, row: IndexRow) -> str:
        """SpecForge raises on a sample in which no two neighbouring tokens count for the loss."""
        mask = row.loss_mask != 0
        return "" if bool((mask[:-1] & mask[1:]).any()) else "no_two_masked_neighbours"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_torch(
            file,
            {
                "input_ids": sample.input_ids,
                "loss_mask": sample.loss_mask,
                "hidden_states": sample.layers.unsqueeze(0),
                "target_last_hidden_states": sample.final.unsqueeze(0),
            },
        )


FORMAT = DFlash()
