"""Pairing: a dump belongs to the request whose marker it carries, and to nothing else.

`Outstanding` knows the markers that were sent and are not settled. A dump is never looked up by number, order, time or
length; one whose marker is not outstanding is told apart by why it is not.
"""

from __future__ import annotations

from enum import Enum

from hsx.core.marker import Marker, parse


class Standing(Enum):
    """How a dump's file name stands to this run."""

    OUTSTANDING = "outstanding"
    """The attempt is under way: this is its dump."""
    SETTLED = "settled"
    """An attempt of this run that is not under way: given up, committed, or made by an earlier life of hsx; swept, once the
    dumps worth adopting have been adopted at the start."""
    FOREIGN = "foreign"
    """Another run's marker, or no marker at all: not ours to read or to delete."""


class Outstanding:
    """The markers of one run, in one epoch, whose attempts are under way.

    An entry lives from before the request until the attempt is settled, so memory is bounded by what is in flight.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._open: set[Marker] = set()

    def add(self, marker: Marker) -> None:
        """Registers a marker before its request is sent. Raises ValueError for one of another run, or one already open."""
        if marker.run != self._run or marker in self._open:
            raise ValueError(f"marker {marker} cannot be opened in run {self._run}")
        self._open.add(marker)

    def settle(self, marker: Marker) -> None:
        """The attempt ended, one way or the other. Settling twice is harmless."""
        self._open.discard(marker)

    def standing(self, name: str) -> tuple[Standing, Marker | None]:
        """How a dump named `name` (file name without its suffix) stands to this run, and its marker if it is one."""
        marker = parse(name)
        if marker is None or marker.run != self._run:
            return Standing.FOREIGN, marker
        return (Standing.OUTSTANDING if marker in self._open else Standing.SETTLED), marker

    def __len__(self) -> int:
        return len(self._open)
