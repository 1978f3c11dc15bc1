"""The capture counter as hsx sees it: the server numbers its dumps, and hsx accounts for every number.

Dumps are paired by marker and never by number. The numbers tell that the server is the one it was (a counter that goes back
is another process, or two of them), and that nothing is lost on the way (a number that was given and whose dump nobody saw).

A data-parallel server numbers the dumps of each of its ranks by itself. A marker is nobody's: whichever rank it is sent to, it
has one dump.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from hsx.core.invariants import Violation

if TYPE_CHECKING:
    from hsx.core.marker import Marker

REMEMBERED: Final = 65536
"""Dumps that are remembered one by one; of older ones only that they were seen."""


NO_FLOOR: Final[Mapping[int, int]] = MappingProxyType({})
"""Nothing is known of what had been reached: every number of a known rank is above it."""
NEW_SERVER: Final[Mapping[int, int]] = MappingProxyType({0: 0})
"""The baselines of a new server without data parallelism."""


class Counter:
    """The numbers of one epoch, for each of its DP ranks. Memory is bounded.

    Args:
        baselines: for each rank the last number given before hsx began to look: 0 for a new server. A dump of any other rank
            is one too many.
    """

    def __init__(self, baselines: Mapping[int, int] = NEW_SERVER) -> None:
        self._ranks = {rank: _Numbers(baseline) for rank, baseline in baselines.items()}
        self._excused = 0
        self._markers: OrderedDict[Marker, tuple[int, int]] = OrderedDict()

    @property
    def reached(self) -> Mapping[int, int]:
        """For each rank the highest number known to be given, as of now: a floor for what is sent from now on."""
        return {rank: numbers.highest for rank, numbers in self._ranks.items()}

    def knows(self, marker: Marker) -> bool:
        """Whether the dump of `marker` was noted, as far as is remembered."""
        return marker in self._markers

    def note(self, rank: int, sequence: int, marker: Marker, floor: Mapping[int, int] = NO_FLOOR) -> Violation | None:
        """Notes the number of a dump. Noting the same dump again is harmless.

        Args:
            rank: the DP rank that the dump is of.
            sequence: the dump's number there.
            marker: the dump's marker.
            floor: `reached` as it was before the request was sent; the number must be above its rank's. Empty where that is
                not known.
        """
        known = self._markers.get(marker)
        if known == (rank, sequence):
            return None
        numbers = self._ranks.get(rank)
        if numbers is None:
            return Violation("sequence", f"{marker} has a dump of rank {rank}; expected one of ranks {sorted(self._ranks)}")
        name, given, other = f"number {sequence}{self._of(rank)}", numbers.was_given(sequence), None
        if given:
            other = next((m for m, seen in reversed(self._markers.items()) if seen == (rank, sequence)), None)
        if sequence <= numbers.baseline:
            given = other is not None  # which of those numbers were seen by an earlier life of hsx is not known
        self._remember(numbers, (rank, sequence), marker)
        if known is not None:
            first, second = f"{known[1]}{self._of(known[0])}", f"{sequence}{self._of(rank)}"
            return Violation("expected", f"{marker} has two dumps, numbers {first} and {second}; expected one")
        reached = floor.get(rank, 0)
        if sequence <= reached:
            evidence = f"the counter went back: {marker} has {name}; expected more than {reached}, reached before"
            return Violation("sequence", evidence)
        if given:
            evidence = f"{name} was given twice: to {marker} and to {other or 'a dump seen before'}"
            return Violation("sequence", evidence)
        return None

    def excuse(self) -> None:
        """A dump was seen that cannot tell its number: one gap is explained."""
        self._excused += 1

    def gap(self, last: Mapping[int, int], unseen: int) -> Violation | None:
        """Numbers that were given and whose dumps are nowhere. Each is reported once.

        Args:
            last: for each rank the last number given, as the capture side says.
            unseen: dumps that are published and not noted yet, of whatever rank; each of them may carry one of the missing
                numbers.
        """
        for rank, numbers in self._ranks.items():
            numbers.heard(last.get(rank, 0))
        missing = sum(numbers.missing for numbers in self._ranks.values())
        gone = missing - unseen - self._excused
        where = " and ".join(
            f"up to {numbers.highest}" + self._of(rank) for rank, numbers in sorted(self._ranks.items()) if numbers.missing
        )
        if unseen == 0:
            for numbers in self._ranks.values():
                numbers.forget()  # whatever is missing will never be seen
            self._excused = 0
        elif gone > 0:
            self._excused += gone
        if gone <= 0:
            return None
        return Violation("sequence", f"{gone} of the numbers {where} were given, and their dumps were never seen")

    def _of(self, rank: int) -> str:
        return f" of rank {rank}" if len(self._ranks) > 1 else ""

    def _remember(self, numbers: _Numbers, place: tuple[int, int], marker: Marker) -> None:
        self._markers[marker] = place
        if len(self._markers) > REMEMBERED:
            self._markers.popitem(last=False)
        given_up = numbers.add(place[1])
        self._excused = max(0, self._excused - given_up)


class _Numbers:
    """The numbers of one rank that were seen.

    Attributes:
        baseline: the last one given before hsx began to look.
        highest: the highest one known to be given.
    """

    def __init__(self, baseline: int) -> None:
        self.baseline = baseline
        self.highest = baseline
        self._through = baseline
        self._above: set[int] = set()

    @property
    def missing(self) -> int:
        """How many were given and not seen."""
        return self.highest - self._through - len(self._above)

    def was_given(self, sequence: int) -> bool:
        """Whether it was seen already, or lies below those that are remembered."""
        return sequence <= self._through or sequence in self._above

    def heard(self, last: int) -> None:
        """The capture side says that it has given this number."""
        self.highest = max(self.highest, last)

    def forget(self) -> None:
        """Takes all that were given for seen."""
        self._through = self.highest
        self._above.clear()

    def add(self, sequence: int) -> int:
        """One was seen; returns how many missing ones fell out of memory for it."""
        self.highest = max(self.highest, sequence)
        given_up = 0
        if sequence > self._through:
            self._above.add(sequence)
        if len(self._above) > REMEMBERED:
            # Old gaps were judged long ago; they must not cost memory for ever.
            given_up = min(self._above) - self._through - 1
            self._through = min(self._above) - 1
        while self._through + 1 in self._above:
            self._through += 1
            self._above.discard(self._through)
        return given_up
