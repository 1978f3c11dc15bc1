"""Which root takes the next shard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RootSpace:
    """What placement knows of one root; all sizes in bytes.

    Attributes:
        name: the root's name.
        free: free bytes of its file system.
        reserve: bytes that must stay free.
        pending: bytes promised to it that are not yet on the disk.
        usable: False once the root is out of service.
    """

    name: str
    free: int
    reserve: int
    pending: int
    usable: bool = True

    @property
    def room(self) -> int:
        """Bytes that may still be promised to this root."""
        return self.free - self.reserve - self.pending if self.usable else 0


def choose(roots: Iterable[RootSpace], size: int) -> str | None:
    """The root with the most room among those that can take `size` bytes; None when there is none.

    Ties go to the first in order, so the choice is reproducible.
    """
    fitting = [root for root in roots if root.room >= size]
    return max(fitting, key=lambda root: root.room).name if fitting else None
