"""The engine's life: starts or finds the server, passes it through the boot gate, and restarts it when its epoch is void.

Drives the table in `hsx.core.lifecycle`. Nothing else starts or stops a server.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from hsx.core.invariants import Violation
from hsx.core.lifecycle import Event, State, step
from hsx.epoch import LiveEpoch
from hsx.errors import EngineError, RunError
from hsx.tasks import first
from hsx.violated import CanaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hsx.core.epoch import CaptureReport, EpochRecord
    from hsx.core.restart import RestartPolicy
    from hsx.ports import Clock, Dumps, EngineClient, EngineOwner, Ledger, Observer

T = TypeVar("T")

HOPELESS = frozenset({"server_refused", "capture_off"})
"""Errors at boot that another start with the same settings cannot mend."""
POLL_S = 0.2
SETTLE_S = 60.0


class Consequences(Protocol):
    """What the beginning and end of epochs mean for samples."""

    async def passed(self, epoch: LiveEpoch) -> None:
        """It passed the boot gate, and may be asked for what is to be done before its own work. Raises EngineError."""
        ...

    async def began(self, epoch: LiveEpoch) -> None:
        """It is on record, and ready."""
        ...

    async def failed_at_boot(self, epoch: LiveEpoch, error: CanaryError) -> None:
        """Its canary failed at the boot gate."""
        ...

    async def ended(self, epoch: LiveEpoch, violation: Violation) -> bool:
        """It ended, and no attempt is under way in it. True where the restart that follows is free of the budget."""
        ...


@dataclass(frozen=True, slots=True)
class SupervisorParts:
    """The supervisor's collaborators; see `hsx.ports`."""

    owner: EngineOwner
    client: EngineClient
    dumps: Dumps
    ledger: Ledger
    observer: Observer
    clock: Clock
    gate: Callable[[LiveEpoch], Awaitable[CaptureReport]]
    """Passes a fit server, and raises for any other."""
    on_report: Callable[[CaptureReport], Awaitable[None]]
    """Hears what the server captures, before the epoch becomes ready."""
    before_start: Callable[[], object]
    """Clears away what dead servers left on this machine. Blocks."""
    consequences: Consequences
    """Draws what follows from an epoch's end for the samples."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a life of the server ended.

    Attributes:
        violation: the verdict.
        requeued: samples that went back to the queue because of it.
        free: the restart that follows does not count against the budget.
    """

    violation: Violation
    requeued: int
    free: bool


class Supervisor:
    """One engine's supervisor. `run` must be running for `ready` to return.

    Args:
        run_id: the job's 8 hex digits: whose leftovers are swept.
        parts: see there.
        policy: when to restart.
        start_timeout_s: longest time from the start of a server to its first answer.
        stop_grace_s: how long a server may take to end.
    """

    def __init__(
        self, run_id: str, parts: SupervisorParts, policy: RestartPolicy, *, start_timeout_s: float, stop_grace_s: float
    ) -> None:
        self._run_id = run_id
        self._parts = parts
        self._policy = policy
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._state = State.STOPPED
        self._epoch: LiveEpoch | None = None
        self._changed = asyncio.Event()
        self._failed_starts = 0

    @property
    def state(self) -> State:
        """Where the engine is in its life."""
        return self._state

    @property
    def situation(self) -> str:
        """What the engine waits for while it is coming up; "" otherwise."""
        return self._parts.owner.situation if self._state is State.STARTING else ""

    @property
    def restarts_left(self) -> int:
        """Restarts that the budget still allows: within its window, and of failed starts in a row."""
        allowed = self._policy.budget - self._failed_starts
        return max(0, min(self._policy.left(self._parts.clock.monotonic()), allowed))

    @property
    def epoch(self) -> LiveEpoch | None:
        """The current epoch; None unless the engine is READY."""
        return self._epoch

    async def ready(self) -> LiveEpoch:
        """The current epoch, once there is one."""
        while self._epoch is None:
            self._changed.clear()
            await self._changed.wait()
        return self._epoch

    async def run(self) -> None:
        """Keeps an engine ready until cancelled; then stops it, where it must not outlive hsx.

        Raises:
            RunError: `restart_budget` when restarts are spent; `server_refused` or `capture_off` for a server that no restart
                would mend; `epoch_void` for one that was voided and that hsx may not restart.
        """
        self._go(Event.START)
        try:
            while True:
                end = await self._one_life()
                await self._parts.owner.stop(self._stop_grace_s)
                await self._back_off(end)
        finally:
            if self._state is not State.DRAINING:
                self._go(Event.DRAIN)
            await self._parts.owner.leave(self._stop_grace_s)
            self._go(Event.STOPPED)

    async def _one_life(self) -> _End:
        """From start to the verdict that ends the epoch, with all that follows from it."""
        try:
            epoch, continued = await self._boot()
        except EngineError as error:
            if error.kind in HOPELESS:
                self._go(Event.REFUSED, error.message)
                raise RunError(error.kind, error.message) from error
            self._go(Event.VOIDED, error.message)
            self._failed_starts += 1
            verdict = (
                error.violation if isinstance(error, CanaryError) else Violation("alive", f"{error.kind}: {error.message}")
            )
            return _End(verdict, requeued=0, free=False)
        self._failed_starts = 0
        self._epoch = epoch
        self._go(Event.GATE_PASSED)
        self._parts.observer.epoch_began(epoch.id, continued)
        self._changed.set()
        try:
            violation = await self._verdict(epoch)
        finally:
            self._epoch = None
        self._go(Event.VOIDED, f"{violation.invariant}: {violation.evidence}")
        return await self._draw_consequences(epoch, violation)

    async def _draw_consequences(self, epoch: LiveEpoch, violation: Violation) -> _End:
        """Records the verdict, at once and with what went back to the queue, and settles what it means for samples."""
        ledger = self._parts.ledger
        if not epoch.reported:
            self._parts.observer.violation(None, violation.invariant, violation.evidence)
            await ledger.violation(epoch.id, None, violation.invariant, violation.evidence)
        if epoch.doubt:
            await ledger.doubt(epoch.id, violation.invariant, violation.evidence)  # a crash may come before the revocation
        await ledger.epoch_ended(epoch.id, violation.invariant, violation.evidence)
        # An attempt that is being stored may still be committed; whatever follows has to know of it. A disk that hangs holds
        # up the next server only where something may have to be revoked.
        with suppress(TimeoutError):
            async with asyncio.timeout(None if epoch.doubt else SETTLE_S):
                await epoch.settled()
        await ledger.epoch_ended(epoch.id, violation.invariant, violation.evidence, requeued=epoch.requeued)
        free = await self._parts.consequences.ended(epoch, violation)
        return _End(violation, len(epoch.requeued), free)

    async def _boot(self) -> tuple[LiveEpoch, bool]:
        parts = self._parts
        record = await self._start()
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await first(self._answering(), self._ended())
        except TimeoutError:
            raise EngineError(
                "server_start_failed",
                f"the server gave no answer within {self._start_timeout_s:.0f} s (engine.start_timeout_s)",
            ) from None
        epoch = LiveEpoch(record, parts.dumps.states())
        try:
            report = await parts.gate(epoch)
        except CanaryError as error:
            await parts.consequences.failed_at_boot(epoch, error)
            raise
        await parts.on_report(report)
        await parts.consequences.passed(epoch)
        continued = await parts.ledger.epoch_began(record, len(epoch.ranks))
        await parts.consequences.began(epoch)
        return epoch, continued

    async def _start(self) -> EpochRecord:
        """A server whose epoch is not void, with the space that dead ones took on the tmpfs free again."""
        parts = self._parts
        await asyncio.to_thread(parts.before_start)
        record = await parts.owner.start()
        verdict = (await parts.ledger.voided_epochs()).get(record.epoch)
        if verdict is not None and parts.owner.restarts:
            # The run that voided it did not live to stop it.
            await parts.owner.stop(self._stop_grace_s)
            record = await parts.owner.start()
            verdict = (await parts.ledger.voided_epochs()).get(record.epoch)
        if verdict is not None:
            raise RunError(
                "epoch_void",
                f"the server (pid {record.pid}) is not trusted any more: its epoch {record.epoch} was voided for {verdict}; "
                "restart it, and run the job again",
            )
        parts.dumps.enter(record.epoch)
        await asyncio.to_thread(parts.dumps.sweep_other_epochs, record.epoch, self._run_id)
        return record

    async def _answering(self) -> None:
        while not await self._parts.client.answers():
            await self._parts.clock.sleep(POLL_S)

    async def _ended(self) -> None:
        raise EngineError("server_start_failed", await self._parts.owner.ended())

    async def _verdict(self, epoch: LiveEpoch) -> Violation:
        """Waits for the epoch's end: voided by a judge, or the server's death."""

        async def died() -> Violation:
            return Violation("alive", await self._parts.owner.ended())

        violation = await first(epoch.voided(), died())
        epoch.void(violation, suspect=True)
        return violation

    async def _back_off(self, end: _End) -> None:
        violation = end.violation
        delay = self._policy.next_delay(self._parts.clock.monotonic(), random.random(), counted=not end.free)
        # Starts that take as long as the budget's window would never be two in one window.
        if delay is None or self._failed_starts > self._policy.budget:
            self._go(Event.BUDGET_SPENT, violation.evidence)
            raise RunError(
                "restart_budget",
                f"the server needed more restarts than the budget allows ({self._policy.used} in the window, "
                f"{self._failed_starts} failed starts in a row; watchdog.restart_budget is {self._policy.budget}); "
                f"the last reason: {violation.invariant}: {violation.evidence}",
            )
        self._parts.observer.engine_restarted(violation.invariant, violation.evidence, end.requeued, delay)
        await self._parts.clock.sleep(delay)
        self._go(Event.RETRY_AFTER)

    def _go(self, event: Event, reason: str = "") -> None:
        self._state = step(self._state, event)
        self._parts.observer.engine_state(self._state, reason)
