"""When a voided engine is started again, and when to give up."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """Backoff and budget.

    Attributes:
        first_s: delay before the first restart, in seconds.
        factor: growth of the delay with each further restart within the window.
        longest_s: the delay's ceiling, in seconds.
        jitter: the delay is scaled by a random factor in [1 - jitter, 1 + jitter].
        budget: restarts allowed within the window.
        window_s: length of the window, in seconds.
    """

    first_s: float
    factor: float
    longest_s: float
    jitter: float
    budget: int
    window_s: float


class RestartPolicy:
    """Decides on each restart; the caller supplies monotonic time and randomness."""

    def __init__(self, limits: RestartLimits) -> None:
        self._limits = limits
        self._times: deque[float] = deque()

    def next_delay(self, now: float, uniform: float, *, counted: bool = True) -> float | None:
        """Seconds to wait before the next restart, or None when the budget is spent.

        Args:
            now: monotonic seconds.
            uniform: a random number in [0, 1).
            counted: whether this restart counts against the budget. One that brought a hunt for a poison sample further does
                not: such restarts are bounded by themselves.
        """
        limits = self._limits
        while self._times and self._times[0] <= now - limits.window_s:
            self._times.popleft()
        if counted and len(self._times) >= limits.budget:
            return None
        delay: float = min(limits.longest_s, limits.first_s * limits.factor ** len(self._times))
        if counted:
            self._times.append(now)
        return delay * (1 + limits.jitter * (2 * uniform - 1))

    def change(self, *, budget: int, window_s: float) -> None:
        """Another budget from now on; what was used of the old one counts."""
        self._limits = replace(self._limits, budget=budget, window_s=window_s)

    def left(self, now: float) -> int:
        """Restarts that the budget still allows at monotonic time `now`."""
        begun = sum(time > now - self._limits.window_s for time in self._times)
        return max(0, self._limits.budget - begun)

    @property
    def budget(self) -> int:
        """Restarts allowed within the window."""
        return self._limits.budget

    @property
    def used(self) -> int:
        """Restarts granted within the window, as of the last decision."""
        return len(self._times)
