"""Which root takes the next shard: shares in proportion to room, weighted by each disk's measured speed.

Shares in proportion to room let unequal disks run full together, and not one after the other, so that all of them write for as
long as possible; the weight keeps a slow disk from holding up the others. Everything here is arithmetic, and deterministic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

SLOWEST: Final = 1 / 16
"""A disk counts as at least so fast, relative to the fastest: one that was slow for once gets shards to show that it is not."""
HALF_LIFE_S: Final = 20.0
"""Seconds of writing after which a measured speed has forgotten half of what was before."""


@dataclass(frozen=True, slots=True)
class RootSpace:
    """What placement knows of one root; all sizes in bytes.

    Attributes:
        name: the root's name.
        free: free bytes of its file system.
        reserve: bytes that must stay free.
        pending: bytes promised to it that are not yet on the disk, or were not when `free` was read.
        usable: False once the root is out of service, or takes nothing new for another reason.
        speed: bytes per second that one of its writers reaches; None where that is not known.
    """

    name: str
    free: int
    reserve: int
    pending: int
    usable: bool = True
    speed: float | None = None

    @property
    def room(self) -> int:
        """Bytes that may still be promised to this root."""
        return self.free - self.reserve - self.pending if self.usable else 0


class Shares:
    """Deals shards out to roots, each its share of the bytes; a smooth weighted round robin.

    Of each shard every root that could take it is credited its share, and the one that takes it is debited the whole. So no
    root is ever ahead or behind by more than a few of the largest shards, whatever the order of sizes.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, roots: Iterable[RootSpace], size: int) -> str | None:
        """The root that takes a shard of `size` bytes; None when none has room, which changes nothing.

        Of several with equal credit the one with the greatest share takes it, and of those the first in order.
        """
        fitting = [(root.name, room, root.speed) for root in roots if (room := root.room) >= size]
        if not fitting:
            return None
        fastest = max((speed for _, _, speed in fitting if speed is not None), default=1.0)
        slowest = fastest * SLOWEST
        # A root of unknown speed counts as the fastest. A shard of no bytes fits a root without room, which must have a share.
        weights = [max(room, 1) * (fastest if speed is None else max(speed, slowest)) for _, room, speed in fitting]
        part = size / sum(weights)
        best, ahead = "", (float("-inf"), 0.0)
        for (name, _, _), weight in zip(fitting, weights, strict=True):
            credit = self._credit[name] = self._credit.get(name, 0.0) + part * weight
            if (credit, weight) > ahead:
                best, ahead = name, (credit, weight)
        self._credit[best] -= size
        return best


class Speed:
    """The speed of one disk, as its writers find it: bytes over seconds of writing, the recent past above all."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    def wrote(self, nbytes: int, seconds: float) -> None:
        """One writer took `seconds` for `nbytes`, from preallocation to the name's change."""
        keep = 0.5 ** (seconds / HALF_LIFE_S)
        self._bytes = self._bytes * keep + nbytes
        self._seconds = self._seconds * keep + seconds

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second of one writer; None before anything was measured."""
        return self._bytes / self._seconds if self._seconds > 0 and self._bytes > 0 else None
