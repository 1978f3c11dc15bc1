"""What a move says of itself when it ends."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

LISTED: Final = 1000
"""So many damaged samples are listed; all are counted."""


@dataclass(slots=True)
class MoveReport:
    """What a move did.

    Attributes:
        root: the root that is drained.
        moved: samples that lie elsewhere now.
        nbytes: bytes of their shards.
        left: committed samples that lie on `root` still.
        damaged: how many of these are missing or damaged.
        damage: (index, what is wrong) of the first `LISTED` of them.
        under_way: shards that the running job is writing there; they were begun before the root took no more.
        kept: originals of moved samples that could not be removed, as on a disk that turned read-only; they do no harm.
        stopped: it was asked to stop, or the draining was cancelled.
    """

    root: str
    moved: int = 0
    nbytes: int = 0
    left: int = 0
    damaged: int = 0
    damage: list[tuple[int, str]] = field(default_factory=list)
    under_way: int = 0
    kept: int = 0
    stopped: bool = False

    @property
    def drained(self) -> bool:
        """No committed sample lies there."""
        return self.left == 0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"drained": self.drained, **asdict(self)}
