"""Looks at what the engine does and voids its epoch when it stalls, or breaks too many identity invariants."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from hsx.core.invariants import Violation
from hsx.core.policy import Streak, ViolationWindow, WindowLimit, against_epoch
from hsx.core.progress import ProgressLimits, advancing
from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from hsx.admission import Admission
    from hsx.core.epoch import EpochRecord
    from hsx.core.marker import Marker
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock
    from hsx.supervisor import Supervisor

LOOK_S = 1.0
WEDGED_S = 30.0
STOOD_STILL_S = 10.0


class Watchdog:
    """Judges the run invariants.

    Args:
        supervisor: is asked to restart.
        admission: keeps the engine's pulse.
        clock: monotonic time.
        progress: how long silence may last.
        window: how many identity violations are too many, and how many samples may fail in a row.
        canary: sends the server a probe prompt; raises EngineError where it fails.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        admission: Admission,
        clock: Clock,
        progress: ProgressLimits,
        window: WindowLimit,
        canary: Callable[[EpochRecord], Coroutine[Any, Any, None]],
    ) -> None:
        self._supervisor = supervisor
        self._admission = admission
        self._clock = clock
        self._progress = progress
        self._limit = window
        self._window = ViolationWindow(window)
        self._streak = Streak(window.count)
        self._trial = asyncio.Lock()
        self._canary = canary
        self._seen: LiveEpoch | None = None
        self._looked_at = clock.monotonic()

    def is_looking(self) -> bool:
        """Whether this watchdog does its work: then a silence is either sound or about to be ended."""
        return self._clock.monotonic() - self._looked_at < WEDGED_S

    async def run(self) -> None:
        """Looks once a second until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            now = self._clock.monotonic()
            if now - self._looked_at > STOOD_STILL_S:
                self._admission.advanced()  # hsx itself was stopped: that silence was its own
            self._looked_at = now
            epoch = self._supervisor.epoch
            if epoch is None:
                continue
            if epoch is not self._seen:
                # Time spent on a restart is not the new server's silence.
                self._seen = epoch
                self._window.clear()
                self._streak.clear()
                self._admission.advanced()
            violation = advancing(self._progress, self._admission.snapshot())
            if violation is not None:
                epoch.void(violation)

    async def failed(self, epoch: LiveEpoch, marker: Marker, reason: str) -> None:
        """An attempt failed; returns once it is decided whether the epoch goes on.

        Breaches of identity are counted in a window of time, and too many void the epoch. Failures of whatever kind, of as many
        different samples without a commit between them, put the server to the test: if its canary fails too, the epoch is
        void; if not, the samples themselves are at fault.
        """
        if epoch is not self._supervisor.epoch:
            return
        if against_epoch(reason) and self._window.add(self._clock.monotonic()):
            evidence = f"{self._limit.count} violations of identity within {self._limit.seconds:.0f} s, the last of {reason}"
            epoch.void(Violation(reason, evidence))
        async with self._trial:
            if self._streak.add(marker.index, reason) and not epoch.is_void:
                try:
                    await epoch.run(self._canary(epoch.record))
                except EngineError as error:
                    if error.kind != "epoch_void":
                        evidence = f"{self._limit.count} samples failed in a row, the last by {reason}, and so did the canary"
                        epoch.void(Violation("canary", f"{evidence}: {error.message}"))
                self._streak.clear()

    def committed(self) -> None:
        """A sample was committed."""
        self._streak.clear()

    def server_lost(self, epoch: LiveEpoch, error: EngineError) -> None:
        """The server does not answer any more, or not as a server of this kind does."""
        epoch.void(Violation("alive", error.message))
