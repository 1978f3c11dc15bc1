"""EAGLE-1 and EAGLE-2: the final state alone, below `samples`, of which the trainer reads every file that there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsx.export.base import Base, row_folder
from hsx.export.files import CheckedFile, write_torch

if TYPE_CHECKING:
    from hsx.export.protocol import Exported


class Eagle(Base):
    """Implements `hsx.export.protocol.Format`.

    The trainer loads every file below the folder that it is given, whatever its name.
    """

    name = "eagle"
    layers = 0
    trainer_folder = "samples"
    keys: ClassVar = {"input_ids": "int64 [S]", "hidden_state": "bfloat16 [S, H]", "loss_mask": "int64 [S]"}
    slots = ("", "hidden_state")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"{self.trainer_folder}/{row_folder(row)}/data_{row}.ckpt"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        content = {"input_ids": sample.input_ids, "hidden_state": sample.final, "loss_mask": sample.loss_mask}
        write_torch(file, content)


FORMAT = Eagle()
