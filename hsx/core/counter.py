"""The capture counter as hsx sees it: the server numbers its dumps, and hsx accounts for every number.

Dumps are paired by marker and never by number. The numbers tell that the server is the one it was (a counter that goes back
is another process, or two of them), and that nothing is lost on the way (a number that was given and whose dump nobody saw).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from hsx.core.invariants import Violation

if TYPE_CHECKING:
    from hsx.core.marker import Marker

REMEMBERED: Final = 65536
"""Dumps that are remembered one by one; of older ones only that they were seen."""


class Counter:
    """The numbers of one epoch. Memory is bounded.

    Args:
        baseline: the last number given before hsx began to look: 0 for a new server.
    """

    def __init__(self, baseline: int = 0) -> None:
        self._baseline = baseline
        self._through = baseline
        self._above: set[int] = set()
        self._highest = baseline
        self._excused = 0
        self._markers: OrderedDict[Marker, int] = OrderedDict()

    @property
    def highest(self) -> int:
        """The highest number known to be given."""
        return self._highest

    def knows(self, marker: Marker) -> bool:
        """Whether the dump of `marker` was noted, as far as is remembered."""
        return marker in self._markers

    def note(self, sequence: int, marker: Marker, floor: int = 0) -> Violation | None:
        """Notes the number of a dump. Noting the same dump again is harmless.

        Args:
            sequence: the dump's number.
            marker: the dump's marker.
            floor: `highest` as it was before the request was sent; the number must be above it. 0 where that is not known.
        """
        known = self._markers.get(marker)
        if known == sequence:
            return None
        given = self._was_given(sequence)
        other = next((m for m, number in reversed(self._markers.items()) if number == sequence), None) if given else None
        if sequence <= self._baseline:
            given = other is not None  # which of those numbers were seen by an earlier life of hsx is not known
        self._remember(sequence, marker)
        if known is not None:
            return Violation("expected", f"{marker} has two dumps, numbers {known} and {sequence}; expected one")
        if sequence <= floor or given:
            self._excused += 1  # its own number is not known: that is told once, and not as a gap besides
        if sequence <= floor:
            evidence = f"the counter went back: {marker} has number {sequence}; expected more than {floor}, reached before"
            return Violation("sequence", evidence)
        if given:
            evidence = f"number {sequence} was given twice: to {marker} and to {other or 'a dump seen before'}"
            return Violation("sequence", evidence)
        return None

    def excuse(self) -> None:
        """A dump was seen that cannot tell its number: one gap is explained."""
        self._excused += 1

    def gap(self, last: int, unseen: int) -> Violation | None:
        """Numbers that were given and whose dumps are nowhere. Each is reported once.

        Args:
            last: the last number given, as the capture side says.
            unseen: dumps that are published and not noted yet; each of them may carry one of the missing numbers.
        """
        self._highest = max(self._highest, last)
        missing = self._highest - self._through - len(self._above)
        gone = missing - unseen - self._excused
        if unseen == 0:
            self._through, self._excused = self._highest, 0  # whatever is missing will never be seen
            self._above.clear()
        elif gone > 0:
            self._excused += gone
        if gone <= 0:
            return None
        return Violation("sequence", f"{gone} of the numbers up to {self._highest} were given, and their dumps were never seen")

    def _was_given(self, sequence: int) -> bool:
        return sequence <= self._through or sequence in self._above

    def _remember(self, sequence: int, marker: Marker) -> None:
        self._highest = max(self._highest, sequence)
        self._markers[marker] = sequence
        if len(self._markers) > REMEMBERED:
            self._markers.popitem(last=False)
        if sequence > self._through:
            self._above.add(sequence)
        if len(self._above) > REMEMBERED:
            # Old gaps were judged long ago; they must not cost memory for ever.
            self._excused = max(0, self._excused - (min(self._above) - self._through - 1))
            self._through = min(self._above) - 1
        while self._through + 1 in self._above:
            self._through += 1
            self._above.discard(self._through)
