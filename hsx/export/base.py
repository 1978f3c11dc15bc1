"""What most formats have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from hsx.core.spec import FinalState
    from hsx.export.protocol import IndexRow, Surroundings

ROWS: Final = 2000
"""Files of one folder, as SpecForge and AngelSlim have them."""


class Base:
    """A format of three layers and post_norm, counted by layers' outputs; it takes every row and has only its samples."""

    final: FinalState | None = "post_norm"
    layers: int | None = 3
    layer_shift = 1
    maps_vocabulary = False
    depends_on: Literal["prompt", "mask", "id"] = "mask"
    has_index = False
    any_order = False
    trainer_folder = ""

    def unfit(self, row: IndexRow) -> str:
        """See the protocol."""
        return ""

    def prepare(self) -> None:
        """See the protocol."""

    def finish(self, around: Surroundings) -> list[str]:
        """See the protocol."""
        return []


def row_folder(row: int) -> str:
    """`rows_0-2000`, `rows_2000-4000`..."""
    first = row // ROWS * ROWS
    return f"rows_{first}-{first + ROWS}"
