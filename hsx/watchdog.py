"""Looks at what the engine does and voids its epoch when it stalls, or breaks too many identity invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.core.invariants import Violation
from hsx.core.policy import ViolationWindow, WindowLimit, against_epoch
from hsx.core.progress import ProgressLimits, advancing

if TYPE_CHECKING:
    from hsx.admission import Admission
    from hsx.epoch import LiveEpoch
    from hsx.errors import EngineError
    from hsx.ports import Clock, Observer
    from hsx.supervisor import Supervisor

LOOK_S = 1.0
WEDGED_S = 30.0


class Watchdog:
    """Judges the run invariants.

    Args:
        supervisor: is asked to restart.
        admission: keeps the engine's pulse.
        clock: monotonic time.
        observer: hears each violation.
        progress: how long silence may last.
        window: how many identity violations are too many.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        admission: Admission,
        clock: Clock,
        observer: Observer,
        progress: ProgressLimits,
        window: WindowLimit,
    ) -> None:
        self._supervisor = supervisor
        self._admission = admission
        self._clock = clock
        self._observer = observer
        self._progress = progress
        self._limit = window
        self._window = ViolationWindow(window)
        self._seen: LiveEpoch | None = None
        self._looked_at = clock.monotonic()

    def is_looking(self) -> bool:
        """Whether this watchdog does its work: then a silence is either sound or about to be ended."""
        return self._clock.monotonic() - self._looked_at < WEDGED_S

    async def run(self) -> None:
        """Looks once a second until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            self._looked_at = self._clock.monotonic()
            epoch = self._supervisor.epoch
            if epoch is None:
                continue
            if epoch is not self._seen:
                # Time spent on a restart is not the new server's silence.
                self._seen = epoch
                self._window.clear()
                self._admission.advanced()
            violation = advancing(self._progress, self._admission.snapshot())
            if violation is not None:
                self._void(epoch, violation)

    def violated(self, epoch: LiveEpoch, reason: str) -> None:
        """An attempt failed for `reason`; if that speaks against the server, it is held against the epoch."""
        if against_epoch(reason) and epoch is self._supervisor.epoch and self._window.add(self._clock.monotonic()):
            evidence = f"{self._limit.count} violations of identity within {self._limit.seconds:.0f} s, the last of {reason}"
            self._void(epoch, Violation(reason, evidence))

    def server_lost(self, epoch: LiveEpoch, error: EngineError) -> None:
        """The server does not answer any more, or not as a server of this kind does."""
        if epoch is self._supervisor.epoch:
            self._void(epoch, Violation("alive", error.message))

    def _void(self, epoch: LiveEpoch, violation: Violation) -> None:
        self._observer.violation(None, violation.invariant, violation.evidence)
        self._supervisor.void(epoch, violation)
