"""Start reading here: the life of one sample, top to bottom.

`Pipeline.run` takes leases and starts one attempt per lease, as many at once as admission allows. `_extract` is the path of a
sample: request, pairing, validation, write, commit. Everything else in this module says what happens when a step fails.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hsx.core.dump import dump_bytes
from hsx.core.invariants import Evidence, Violation, judge_answer, judge_dump
from hsx.core.marker import Marker
from hsx.core.policy import Action, on_failure
from hsx.errors import EngineError, RunError, SampleError
from hsx.records import Commit, Payload
from hsx.space import Booking
from hsx.violated import ViolatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from hsx.admission import Admission, Place
    from hsx.core.invariants import Content
    from hsx.core.pairing import Outstanding
    from hsx.core.sample import Lease
    from hsx.core.spec import CaptureSpec
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, Dump, Dumps, EngineClient, Leases, Ledger, Observer, Samples
    from hsx.space import Space, Staging
    from hsx.suspects import Suspects
    from hsx.sweeper import Sweeper
    from hsx.writer import Writer

PAUSE_S = 1.0
"""How long an attempt waits before it goes back to the queue when the server is full or in trouble; its place stays taken."""
STOOD_STILL_S = 10.0
"""A timer that fires so much too late tells that hsx itself was stopped (SIGSTOP, a suspended machine)."""
UNFINISHED = frozenset({"request_failed", "request_timeout"})
"""A dying server causes these as well as a bad request; and a living one may still be working on the request."""


class Engine(Protocol):
    """What the pipeline needs of the supervisor."""

    @property
    def epoch(self) -> LiveEpoch | None:
        """The current epoch; None while there is no server that passed the gate."""
        ...

    async def ready(self) -> LiveEpoch:
        """The current epoch, once there is one."""
        ...


class Pace(Protocol):
    """Smooths the rate of starts (asyncio-throttle's Throttler)."""

    async def acquire(self) -> None:
        """Returns when the next start may be made."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change while a pipeline runs.

    Attributes:
        run: the job's 8 hex digits, for markers.
        spec: the capture spec.
        hidden_size: H.
        retries: failures of a sample that are forgiven.
        dump_deadline_s: longest time from an answer to its dump.
        request_timeout_s: longest time for a request, given the tokens in flight.
        congestion_s: longest time without a dump while the server's queue is full.
        shard_bytes: size of a sample's shard file, or the most that it may be, given its index.
        kept: the tokens of a sample that are stored, given its index; None: all.
        leases: how many leases are taken in one ledger transaction.
    """

    run: str
    spec: CaptureSpec
    hidden_size: int
    retries: int
    dump_deadline_s: float
    request_timeout_s: Callable[[int], float]
    congestion_s: float
    shard_bytes: Callable[[int], int]
    kept: Callable[[int], NDArray[np.int64] | None]
    leases: int = 64


@dataclass(frozen=True, slots=True)
class Parts:
    """The pipeline's collaborators; see `hsx.ports`."""

    engine: Engine
    client: EngineClient
    dumps: Dumps
    samples: Samples
    leases: Leases
    ledger: Ledger
    writer: Writer
    admission: Admission
    space: Space
    staging: Staging
    outstanding: Outstanding
    sweeper: Sweeper
    suspects: Suspects
    pace: Pace
    observer: Observer
    clock: Clock
    measure: Callable[[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int32]], Content]
    on_failure: Callable[[LiveEpoch, Marker, str, Violation | None], Awaitable[None]]
    """Hears each failed attempt with its reason, and returns once it is decided whether the epoch goes on."""
    on_success: Callable[[], None]
    """Hears each commit."""
    on_server_lost: Callable[[LiveEpoch, EngineError], None]
    """Hears that the server no longer answers, or not as a server should."""


class StopWatch:
    """Seconds spent per step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.monotonic()
        self.laps: dict[str, float] = {}

    def lap(self, step: str) -> None:
        """Books the time since the last lap under `step`."""
        now = self._clock.monotonic()
        self.laps[step] = now - self._last
        self._last = now


class Pipeline:
    """Extracts every sample that the ledger hands out.

    Args:
        settings: see there.
        parts: see there.
    """

    def __init__(self, settings: Settings, parts: Parts) -> None:
        self._settings = settings
        self._parts = parts
        self._leases: list[Lease] = []
        self._held: list[Lease] = []
        self._attempts = 0
        self._returned = asyncio.Event()
        self._intake: asyncio.Task[None] | None = None
        self._draining = False
        self._adopted = False
        self._last_pairing = parts.clock.monotonic()

    async def run(self) -> None:
        """Returns when no sample is pending any more, or, after `drain`, when the last attempt under way has ended.

        Raises:
            ExceptionGroup: of RunErrors, when the job cannot go on.
        """
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(self._parts.sweeper.run(self._parts.engine.ready))
            async with asyncio.TaskGroup() as attempts:
                self._intake = attempts.create_task(self._take_in(attempts))
                if self._draining:
                    self._intake.cancel()
            sweeper.cancel()

    def drain(self) -> None:
        """Takes no new sample; those under way go on to their end, but for those that wait for room on a root."""
        self._draining = True
        self._parts.space.drain()
        self._parts.staging.drain()
        if self._intake is not None:
            self._intake.cancel()

    @property
    def attempts(self) -> int:
        """Attempts under way."""
        return self._attempts

    # --- one sample -------------------------------------------------------------------------------------------------

    async def _extract(self, lease: Lease, marker: Marker, epoch: LiveEpoch, place: Place) -> None:
        """The path of a sample. Raises SampleError or EngineError where it ends early."""
        watch = StopWatch(self._parts.clock)
        ids = self._parts.samples.input_ids(lease.sample.index)
        floor = epoch.counter.reached
        epoch.asked(lease.sample.index)
        await epoch.run(self._request(marker, ids))
        await self._answered(lease, epoch)
        watch.lap("request")
        dump = await epoch.run(self._pair(marker, epoch, floor))
        watch.lap("dump")
        place.answered()
        await self._store(lease, marker, epoch, dump, place.shard, watch, adopted=False)

    async def _request(self, marker: Marker, ids: NDArray[np.int32]) -> None:
        """Has the server prefill the prompt under its marker, and judges the answer."""
        timeout = self._settings.request_timeout_s(self._parts.admission.in_flight.tokens)
        began = self._parts.clock.monotonic()
        try:
            answer = await self._parts.client.prefill(marker, ids, timeout)
        except SampleError as error:
            overrun = self._parts.clock.monotonic() - began - timeout
            if error.kind == "request_timeout" and overrun > STOOD_STILL_S:
                await self._parts.client.abort(marker)
                message = f"{marker}: nobody watched this request for {overrun:.0f} s; expected its end after {timeout:.0f} s"
                raise EngineError("hsx_stopped", message) from error
            raise
        violation = judge_answer(marker, answer)
        if violation is not None:
            raise ViolatedError(marker, violation)

    async def _pair(self, marker: Marker, epoch: LiveEpoch, floor: Mapping[int, int]) -> Dump:
        """Looks the dump up by its marker, and by nothing else. An answer without its dump violates `published`.

        The dump's number only has to be one that its DP rank's counter could give: above `floor`, which that had reached before
        the request was sent, and nobody else's.
        """
        deadline = self._settings.dump_deadline_s
        try:
            async with asyncio.timeout(deadline):
                await self._parts.dumps.arrival(marker)
        except TimeoutError:
            # Where hsx itself stood still, the deadline passed before anybody looked: the file's existence is the truth.
            if str(marker) not in self._parts.dumps.names():
                evidence = f"no dump within {deadline:.1f} s of a 200 answer"
                raise ViolatedError(marker, Violation("published", evidence)) from None
        self._parts.admission.advanced()
        self._parts.staging.took()
        self._last_pairing = self._parts.clock.monotonic()
        return self._parts.sweeper.open(epoch, marker, floor)

    async def _store(
        self, lease: Lease, marker: Marker, epoch: LiveEpoch, dump: Dump, shard: Booking, watch: StopWatch, *, adopted: bool
    ) -> None:
        """Validates, writes and commits a dump; only then drops it from the dump directory."""
        writer = self._parts.writer
        try:
            content = await self._validate(marker, epoch, dump)
            watch.lap("validate")
            epoch.check()
            ids = self._parts.samples.input_ids(lease.sample.index)
            stream = epoch.stream(dump.header.rank)
            kept = self._settings.kept(marker.index)
            payload = Payload(marker, stream, dump.header.sequence, ids, dump.states, content.crcs, dump.source, kept)
            while True:
                # Its root was promised before it was asked for. Where that one failed meanwhile another one takes it, and while
                # none has room the dump waits.
                await epoch.run(self._parts.space.place(shard))
                receipt = await writer.write(payload, shard)
                if receipt is None:
                    continue
                watch.lap("write")
                entry = Commit(lease, marker, stream, dump.header.sequence, receipt, watch.laps, adopted)
                if await writer.commit(entry):
                    break  # else its root was lost before the commit, and another takes it
        finally:
            # Unmapping and unlinking half a gigabyte takes a tenth of a second, so neither is done on the event loop.
            self._in_background(dump.close)
            self._parts.space.release(shard)
        self._parts.on_success()
        await self._parts.sweeper.drop(epoch, marker)

    def _in_background(self, work: Callable[[], None]) -> None:
        asyncio.get_running_loop().run_in_executor(None, work)

    async def _validate(self, marker: Marker, epoch: LiveEpoch, dump: Dump) -> Content:
        """Judges every invariant of the dump; returns what was measured. Raises ViolatedError for the first that fails."""
        expected = self._parts.samples.input_ids(marker.index)
        content = await asyncio.to_thread(self._parts.measure, dump.states, dump.input_ids, expected)
        settings = self._settings
        violation = judge_dump(Evidence(marker, epoch.id, settings.spec, settings.hidden_size, dump.header, content))
        if violation is not None:
            raise ViolatedError(marker, violation)
        return content

    # --- intake -----------------------------------------------------------------------------------------------------

    async def _take_in(self, attempts: asyncio.TaskGroup) -> None:
        """Starts an attempt for each lease, as soon as every budget has room for it."""
        if not self._adopted:
            await self._parts.suspects.recall()
            await self._adopt_leftovers()
        while (lease := await self._next_lease()) is not None:
            await self._parts.pace.acquire()
            await self._parts.engine.ready()
            place = await self._enter(lease.sample.index, lease.sample.tokens)
            epoch = self._parts.engine.epoch
            if epoch is None or not self._parts.suspects.admits(lease.sample.index):
                # The server died while this one waited. Its place is given back: the next server's canary needs room, too.
                place.cleared()
                self._held.append(lease)
                continue
            self._attempts += 1
            attempts.create_task(self._attempt(lease, epoch, place))

    async def _next_lease(self) -> Lease | None:
        """The next lease that may be worked on; None when nothing is pending.

        While attempts are under way that may come back, it waits. During a hunt only the suspects on trial are let in.
        """
        suspects = self._parts.suspects
        while True:
            self._returned.clear()
            self._leases, self._held = self._held + self._leases, []
            if not any(suspects.admits(lease.sample.index) for lease in self._leases):
                self._leases += await self._parts.leases.acquire(self._settings.leases, suspects.trial)
                self._leases.reverse()
            while self._leases:
                lease = self._leases.pop()
                evidence = suspects.conviction(lease.sample.index)
                if evidence is not None:
                    await self._quarantine_convicted(lease, evidence)
                elif suspects.admits(lease.sample.index):
                    return lease
                else:
                    self._held.append(lease)
            if self._returned.is_set():
                continue
            if self._attempts:
                await self._returned.wait()
            elif suspects.trial:
                await suspects.give_up_trial()
            else:
                return None

    async def _enter(self, index: int, tokens: int) -> Place:
        settings = self._settings
        size = dump_bytes(settings.spec, settings.hidden_size, tokens)
        return await self._parts.admission.enter(tokens, size, settings.shard_bytes(index))

    # --- when a step fails ------------------------------------------------------------------------------------------

    async def _attempt(self, lease: Lease, epoch: LiveEpoch, place: Place) -> None:
        """One attempt, whatever becomes of it: its marker is settled, its place free, its sample accounted for."""
        marker = Marker(self._settings.run, lease.sample.index, lease.attempt, lease.sample.tokens)
        self._parts.outstanding.add(marker)
        try:
            with epoch.attempt():
                try:
                    await self._extract(lease, marker, epoch, place)
                except EngineError as error:
                    await self._give_back(lease, marker, epoch, error)
                except SampleError as error:
                    await self._failed(lease, marker, epoch, error)
        finally:
            epoch.answered(lease.sample.index)
            self._parts.outstanding.settle(marker)
            place.cleared()
            self._attempts -= 1
            self._returned.set()

    async def _answered(self, lease: Lease, epoch: LiveEpoch) -> None:
        """The server is done with the sample and lives: if it was a suspect, it is none any more."""
        epoch.answered(lease.sample.index)
        if not epoch.is_void and await self._parts.suspects.cleared(lease.sample.index):
            self._returned.set()

    async def _quarantine_convicted(self, lease: Lease, evidence: str) -> None:
        """The sample kills the server: it is never sent again."""
        marker = Marker(self._settings.run, lease.sample.index, lease.attempt, lease.sample.tokens)
        epoch = await self._parts.engine.ready()
        await self._parts.ledger.fail(lease, marker, epoch.id, "server_killed", evidence, quarantine=True)
        await self._parts.suspects.executed(lease.sample.index)
        self._parts.observer.attempt_failed(marker, "server_killed", evidence, True)

    async def _give_back(self, lease: Lease, marker: Marker, epoch: LiveEpoch, error: EngineError) -> None:
        """The attempt ended by no fault of the sample: it goes back to the queue and nothing is held against it."""
        if error.kind == "server_full":
            self._parts.observer.error_met(error.kind, error.message)
            silence = self._parts.clock.monotonic() - max(self._last_pairing, self._parts.admission.resumed_at)
            if silence > self._settings.congestion_s:
                raise RunError("staging_failed", f"no dump arrived for {silence:.0f} s; the last reason: {error.message}")
            await self._parts.clock.sleep(PAUSE_S)
        elif error.kind == "staging_full":
            self._parts.observer.error_met(error.kind, error.message)
            self._parts.staging.refused(error.message)
            await self._parts.clock.sleep(PAUSE_S)
        elif error.kind == "roots_full":  # in a drained run: the next one adopts the dump
            self._parts.sweeper.keep(marker)
        elif error.kind == "hsx_stopped":
            self._parts.observer.error_met(error.kind, error.message)
        elif error.kind != "epoch_void":
            self._parts.on_server_lost(epoch, error)
        if epoch.is_void:
            epoch.requeued.append(lease.sample.index)
        await self._parts.leases.give_back([lease])

    async def _failed(self, lease: Lease, marker: Marker, epoch: LiveEpoch, error: SampleError) -> None:
        """The attempt failed: the sample is retried or quarantined by the policy table, with the reason in the ledger."""
        violation = error.violation if isinstance(error, ViolatedError) else None
        reason = violation.invariant if violation else error.kind
        if reason in UNFINISHED:
            # A dying server drops its connections before its death is known; so the verdict is awaited for a moment.
            with suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await epoch.voided()
            try:
                await self._parts.client.abort(marker)
            except EngineError as gone:  # on a busy machine a death takes longer to become known
                await self._give_back(lease, marker, epoch, gone)
                return
        await self._parts.on_failure(epoch, marker, reason, violation)
        if epoch.is_void:
            # The server is to blame, as far as anybody can tell.
            epoch.requeued.append(lease.sample.index)
            await self._parts.leases.give_back([lease])
            return
        quarantine = on_failure(reason, lease.failures + 1, self._settings.retries) is Action.QUARANTINE
        await self._parts.ledger.fail(lease, marker, epoch.id, reason, error.message, quarantine=quarantine)
        self._parts.observer.attempt_failed(marker, reason, error.message, quarantine)
        await self._answered(lease, epoch)
        await self._parts.sweeper.drop(epoch, marker)

    # --- what earlier attempts left ---------------------------------------------------------------------------------

    async def _adopt_leftovers(self) -> None:
        """Stores the dumps that an earlier life of hsx had asked this very epoch for and did not commit.

        Runs before the first lease is taken, so that no sample is adopted and asked for at once.
        """
        epoch = await self._parts.engine.ready()
        found: dict[int, list[Marker]] = {}
        for marker in self._parts.sweeper.settled():
            found.setdefault(marker.index, []).append(marker)
        async with asyncio.TaskGroup() as group:
            for markers in found.values():
                group.create_task(self._adopt(epoch, markers))
        self._adopted = True
        self._parts.sweeper.may_sweep()
        self._last_pairing = self._parts.clock.monotonic()

    async def _adopt(self, epoch: LiveEpoch, markers: list[Marker]) -> None:
        """Stores the newest sound dump of one sample; removes the others."""
        for marker in sorted(markers, key=lambda m: -m.attempt):
            known = await self._parts.ledger.attempts_of(marker.index, hold=True)
            if known is not None and known[0] == "pending":
                lease = known[1]
                try:
                    if marker.tokens == lease.sample.tokens and marker.attempt <= lease.attempt:
                        dump = self._parts.sweeper.open(epoch, marker)
                        with epoch.attempt():
                            shard = Booking(self._settings.shard_bytes(marker.index))
                            await self._store(lease, marker, epoch, dump, shard, StopWatch(self._parts.clock), adopted=True)
                except SampleError as error:
                    self._parts.observer.error_met(error.kind, f"not adopted: {error.message}")
                    if isinstance(error, ViolatedError):
                        await self._parts.on_failure(epoch, marker, error.violation.invariant, error.violation)
                except EngineError:
                    return  # the epoch ended: its dumps are void, and are swept with its folder
            await self._parts.sweeper.drop(epoch, marker)
