"""Rates over sliding windows, in bounded memory: sums in a fixed ring of time buckets."""

from __future__ import annotations

from dataclasses import dataclass


class Window:
    """A sum over the last `seconds`, kept in `buckets` equal slices of time.

    Args:
        seconds: length of the window.
        buckets: slices of it; memory and resolution.
        start: monotonic seconds at which counting begins; a younger window divides by its own age.
    """

    def __init__(self, seconds: float, buckets: int, start: float) -> None:
        self._width = seconds / buckets
        self._sums = [0.0] * buckets
        self._start = start
        self._slot = int(start // self._width)

    def add(self, now: float, amount: float) -> None:
        """Counts `amount` at monotonic time `now`."""
        self._turn(now)
        self._sums[self._slot % len(self._sums)] += amount

    def rate(self, now: float) -> float:
        """Amount per second within the window that ends at `now`; 0 where no time has passed."""
        self._turn(now)
        begin = max(self._start, (self._slot - len(self._sums) + 1) * self._width)
        return sum(self._sums) / (now - begin) if now > begin else 0.0

    def _turn(self, now: float) -> None:
        slot = int(now // self._width)
        for passed in range(self._slot + 1, min(slot, self._slot + len(self._sums)) + 1):
            self._sums[passed % len(self._sums)] = 0.0
        self._slot = max(slot, self._slot)


@dataclass(frozen=True, slots=True)
class Rates:
    """Amounts per second over the last minute, the last ten minutes and the whole run."""

    minute: float
    ten_minutes: float
    run: float


class Meter:
    """A counter with its rates. Args: `start`, monotonic seconds."""

    def __init__(self, start: float) -> None:
        self.total = 0
        self._start = start
        self._minute = Window(60.0, 60, start)
        self._ten_minutes = Window(600.0, 60, start)

    def add(self, now: float, amount: int) -> None:
        """Counts `amount` at monotonic time `now`."""
        self.total += amount
        self._minute.add(now, amount)
        self._ten_minutes.add(now, amount)

    def rates(self, now: float) -> Rates:
        """The rates as of monotonic time `now`."""
        age = now - self._start
        return Rates(self._minute.rate(now), self._ten_minutes.rate(now), self.total / age if age > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Eta:
    """How long the rest will take, and what that was reckoned from."""

    seconds: float | None
    basis: str


def eta(remaining_tokens: int, rates: Rates, age_s: float) -> Eta:
    """The time left, from the token rate: samples differ in length, tokens do not.

    The last ten minutes count once they exist, because they show the present; before that, the whole run.

    Args:
        remaining_tokens: tokens of the samples still to be committed.
        rates: token rates.
        age_s: seconds since the run began.
    """
    if remaining_tokens <= 0:
        return Eta(0.0, "nothing is left")
    recent = age_s >= 600
    rate = rates.ten_minutes if recent else rates.run
    basis = "tokens/s of the last 10 minutes" if recent else "tokens/s of this run"
    if rate > 0:
        return Eta(remaining_tokens / rate, basis)
    return Eta(None, "nothing was committed in the last 10 minutes" if rates.run > 0 else "no sample has been committed yet")
