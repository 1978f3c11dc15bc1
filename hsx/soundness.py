"""Keeps an eye on the run itself, as `hsx.watchdog` does on the server: what a service manager's watchdog is fed with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.core.soundness import Pulse, fault

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hsx.ports import Clock

PATIENCE_S = 300.0
"""How long nothing may change, beyond what the requests in flight are allowed."""


class Soundness:
    """Whether the run advances, or soundly waits. Cheap; asked now and then by whoever wants to know.

    Args:
        clock: monotonic time.
        marks: everything that changes when the run advances; compared with what it was.
        waits: what the run soundly waits for, such as a server that comes up or a full disk; "" for nothing.
        looked_at: when the judge of the server last looked.
        look_s: how long that may be ago.
        patience_s: how long the requests in flight may be silent.
        attempts: how many attempts are under way.
        tell: hears of each fault once, and with "" of its end.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        marks: Callable[[], Hashable],
        waits: Callable[[], str],
        looked_at: Callable[[], float],
        look_s: float,
        patience_s: Callable[[], float],
        attempts: Callable[[], int],
        tell: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._marks = marks
        self._waits = waits
        self._looked_at = looked_at
        self._look_s = look_s
        self._patience_s = patience_s
        self._attempts = attempts
        self._tell = tell
        self._seen: Hashable = None
        self._advanced_at = clock.monotonic()
        self._told = False

    def fault(self) -> str:
        """Why the run is not sound; "" where it is."""
        now, marks, waits = self._clock.monotonic(), self._marks(), self._waits()
        if marks != self._seen or waits:
            self._seen, self._advanced_at = marks, now
        pulse = Pulse(now, self._looked_at(), self._advanced_at, waits, f"{self._attempts()} attempts")
        found = fault(pulse, self._look_s, PATIENCE_S + self._patience_s())
        if bool(found) != self._told:
            self._told = bool(found)
            self._tell(found)
        return found

    def ok(self) -> bool:
        """Whether it is sound."""
        return not self.fault()
