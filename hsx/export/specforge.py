"""SpecForge, EAGLE-3 offline: `rows_0-2000/data_0.ckpt`..., and `vocab_mapping/vocab_mapping.pt`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hsx.export.base import Base, row_folder
from hsx.export.files import CheckedFile, whole_file, write_torch
from hsx.export.vocabulary import count_tokens, mapping

if TYPE_CHECKING:
    from hsx.export.protocol import Exported, Surroundings


class SpecForge(Base):
    """Implements `hsx.export.protocol.Format`."""

    name = "specforge"
    maps_vocabulary = True
    keys: ClassVar = {
        "input_ids": "int64 [S]",
        "loss_mask": "int64 [S]",
        "aux_hidden_state": "bfloat16 [1, S, 3H]",
        "hidden_state": "bfloat16 [1, S, H]",
    }
    slots = ("aux_hidden_state[..., {slot}H:{next}H]", "hidden_state")

    def path(self, row: int, part: int) -> str:
        """See the protocol."""
        return f"{row_folder(row)}/data_{row}.ckpt"

    def write(self, file: CheckedFile, sample: Exported) -> None:
        """See the protocol."""
        write_torch(
            file,
            {
                "input_ids": sample.input_ids,
                "loss_mask": sample.loss_mask,
                "aux_hidden_state": sample.layers.unsqueeze(0),
                "hidden_state": sample.final.unsqueeze(0),
            },
        )

    def finish(self, around: Surroundings) -> list[str]:
        """The vocabulary mapping, where a draft vocabulary is asked for."""
        if around.vocabulary.draft is None:
            return []
        folder = around.folder / "vocab_mapping"
        folder.mkdir(exist_ok=True)
        content = mapping(count_tokens(around.rows()), around.vocabulary)
        with whole_file(folder / "vocab_mapping.pt", shared=True) as file:
            write_torch(file, content)
        return ["vocab_mapping/vocab_mapping.pt"]


FORMAT = SpecForge()
