"""Looks at what the engine does and voids its epoch when it stalls, miscounts, or breaks too many identity invariants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsx.core.invariants import Violation
from hsx.core.policy import POLICY, Streak, ViolationWindow, WindowLimit
from hsx.core.progress import ProgressLimits, advancing
from hsx.errors import EngineError
from hsx.violated import CanaryError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from hsx.admission import Admission
    from hsx.core.marker import Marker
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, Dumps, Ledger, Observer
    from hsx.supervisor import Supervisor
    from hsx.sweeper import Sweeper

LOOK_S = 1.0
WEDGED_S = 30.0
STOOD_STILL_S = 10.0


@dataclass(frozen=True, slots=True)
class WatchdogParts:
    """What the watchdog looks at, and tells.

    Attributes:
        supervisor: is asked to restart.
        admission: keeps the engine's pulse.
        dumps: the dump directory.
        ledger: records violations.
        observer: hears of them.
        clock: monotonic time.
        canary: sends the server a canary; raises EngineError where it cannot, CanaryError where that fails.
    """

    supervisor: Supervisor
    admission: Admission
    dumps: Dumps
    ledger: Ledger
    observer: Observer
    clock: Clock
    canary: Callable[[LiveEpoch], Coroutine[Any, Any, object]]


class Watchdog:
    """Judges the run invariants.

    Args:
        parts: see there.
        progress: how long silence may last.
        window: how many identity violations are too many, and how many samples may fail in a row.
    """

    def __init__(self, parts: WatchdogParts, progress: ProgressLimits, window: WindowLimit) -> None:
        self._parts = parts
        self._clock = parts.clock
        self._progress = progress
        self._limit = window
        self._window = ViolationWindow(window)
        self._streak = Streak(window.count)
        self._trial = asyncio.Lock()
        self._seen: LiveEpoch | None = None
        self._others: set[str] = set()
        self._looked_at = parts.clock.monotonic()

    @property
    def looked_at(self) -> float:
        """When this watchdog last did its work, in monotonic seconds: while it does, a stall of the server is ended."""
        return self._looked_at

    async def run(self, sweeper: Sweeper) -> None:
        """Looks once a second until cancelled."""
        while True:
            await self._clock.sleep(LOOK_S)
            now = self._clock.monotonic()
            if now - self._looked_at > STOOD_STILL_S:
                self._parts.admission.advanced()  # hsx itself was stopped: that silence was its own
            self._looked_at = now
            epoch = self._parts.supervisor.epoch
            if epoch is None:
                continue
            self._meet(epoch, sweeper)
            violation = advancing(self._progress, self._parts.admission.snapshot())
            if violation is not None:
                epoch.void(violation, suspect=True)
            elif not self._parts.dumps.intact():
                epoch.void(_folder_gone(epoch))
            else:
                await self.look_at_counter(epoch, sweeper)

    def _meet(self, epoch: LiveEpoch, sweeper: Sweeper) -> None:
        """The first look at an epoch begins with a clean slate."""
        if epoch is self._seen:
            return
        # Time spent on a restart is not the new server's silence.
        self._seen, self._others = epoch, sweeper.others()
        self._window.clear()
        self._streak.clear()
        self._parts.admission.advanced()

    async def look_at_counter(self, epoch: LiveEpoch, sweeper: Sweeper) -> None:
        """Is one process alone writing into the epoch, and was every dump that it counted seen?"""
        self._meet(epoch, sweeper)  # a short run comes here before it was looked at for the first time
        try:
            refusal, states = self._parts.dumps.refusal(), self._parts.dumps.states()
        except EngineError as error:
            epoch.void(Violation("sole_writer", error.message))
            return
        writers = {rank: (state.pid, state.start_ticks) for rank, state in states.items()}
        changed = next(
            (rank for rank in sorted({*writers, *epoch.writers}) if writers.get(rank) != epoch.writers.get(rank)), None
        )
        last = {rank: state.sequence for rank, state in states.items()}
        if refusal is not None:
            epoch.void(Violation("sole_writer", f"the capture side says: {refusal}"))
        elif changed is not None and not self._parts.dumps.intact():
            epoch.void(_folder_gone(epoch))  # its account went with it, since it was last looked at
        elif changed is not None:
            found, wanted = writers.get(changed), epoch.writers.get(changed)
            of = f" of DP rank {changed}" if len({*writers, *epoch.writers}) > 1 else ""
            evidence = f"the dumps{of} are counted by process {found}; expected {wanted}, (pid, start time), as at boot"
            epoch.void(Violation("sole_writer", evidence))
        elif (gap := epoch.counter.gap(last, sweeper.unseen(epoch))) is not None:
            others = sweeper.others() - self._others  # what lay here before is only what a dead run left
            if others:
                evidence = f"{gap.evidence}, and dumps of runs {', '.join(sorted(others))} appear: another job uses this server"
                gap = Violation("sole_writer", evidence)
            await self.count(epoch, None, gap)

    async def failed(self, epoch: LiveEpoch, marker: Marker, reason: str, violation: Violation | None) -> None:
        """An attempt failed; returns once it is decided whether the epoch goes on.

        Breaches of identity are counted in a window of time, and too many void the epoch. Failures of whatever kind, of as many
        different samples without a commit between them, put the server to the test: if its canary fails too, the epoch is
        void; if not, the samples themselves are at fault.
        """
        if violation is not None:
            await self._record(epoch, marker, violation)
        if epoch is not self._parts.supervisor.epoch:
            return
        if POLICY[reason].epoch == "void" and violation is not None:
            epoch.void(violation, reported=True)
        elif POLICY[reason].epoch == "count":
            self._add(epoch, reason)
        async with self._trial:
            if self._streak.add(marker.index, reason) and not epoch.is_void:
                await self._try(epoch, reason)
                self._streak.clear()

    async def count(self, epoch: LiveEpoch, marker: Marker | None, violation: Violation) -> None:
        """A violation that fails no attempt: recorded, and counted against the epoch."""
        await self._record(epoch, marker, violation)
        self._add(epoch, violation.invariant)

    async def _try(self, epoch: LiveEpoch, reason: str) -> None:
        evidence = f"{self._limit.count} samples failed in a row, the last by {reason}, and so did the canary"
        try:
            await epoch.run(self._parts.canary(epoch))
        except CanaryError as error:
            epoch.void(Violation("canary", f"{evidence}: {error.message}"), doubt=True)
        except EngineError as error:
            if error.kind != "epoch_void":
                epoch.void(Violation("canary", f"{evidence}: {error.message}"))

    async def _record(self, epoch: LiveEpoch, marker: Marker | None, violation: Violation) -> None:
        self._parts.observer.violation(marker, violation.invariant, violation.evidence)
        await self._parts.ledger.violation(epoch.id, marker, violation.invariant, violation.evidence)

    def _add(self, epoch: LiveEpoch, reason: str) -> None:
        if epoch is self._parts.supervisor.epoch and self._window.add(self._clock.monotonic()):
            evidence = f"{self._limit.count} violations of identity within {self._limit.seconds:.0f} s, the last of {reason}"
            epoch.void(Violation(reason, evidence))

    def committed(self) -> None:
        """A sample was committed."""
        self._streak.clear()

    def server_lost(self, epoch: LiveEpoch, error: EngineError) -> None:
        """The server does not answer any more, or not as a server of this kind does."""
        epoch.void(Violation("alive", error.message), suspect=error.kind == "server_gone")


def _folder_gone(epoch: LiveEpoch) -> Violation:
    evidence = f"the folder of epoch {epoch.id} in the dump directory was deleted or replaced; expected it to stay"
    return Violation("alive", evidence)
