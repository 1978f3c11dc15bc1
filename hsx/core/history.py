"""The recent past in bounded memory: sums in a ring of equal slices of time, to be drawn as a curve."""

from __future__ import annotations

from typing import Final

SERIES: Final = ("samples", "tokens", "bytes", "restarts")
"""What is summed."""


class History:
    """Sums by slice of time; the oldest slices are forgotten.

    Args:
        step_s: length of a slice, in seconds.
        slices: how many are kept, the one that is being filled included.
        start: monotonic seconds at which counting begins: the first slice begins there.
    """

    def __init__(self, step_s: float, slices: int, start: float) -> None:
        self.step_s = step_s
        self._slices = slices
        self._start = start
        self._slot = 0
        self._sums: dict[str, list[int]] = {name: [0] * slices for name in SERIES}

    def add(self, now: float, **amounts: int) -> None:
        """Counts amounts, by name of series, at monotonic time `now`."""
        self._turn(now)
        for name, amount in amounts.items():
            self._sums[name][self._slot % self._slices] += amount

    def series(self, now: float) -> tuple[float, dict[str, list[int]]]:
        """The age of the oldest slice's beginning in seconds, and the sums by series, oldest first.

        The last slice is the one that is being filled: it covers less than `step_s`.
        """
        self._turn(now)
        first = max(0, self._slot - self._slices + 1)
        order = [number % self._slices for number in range(first, self._slot + 1)]
        age = now - (self._start + first * self.step_s)
        return age, {name: [sums[place] for place in order] for name, sums in self._sums.items()}

    def _turn(self, now: float) -> None:
        slot = int((now - self._start) // self.step_s)
        for passed in range(self._slot + 1, min(slot, self._slot + self._slices) + 1):
            for sums in self._sums.values():
                sums[passed % self._slices] = 0
        self._slot = max(slot, self._slot)
