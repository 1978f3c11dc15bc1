"""Puts a run together: the only place that names concrete classes. Start-up, run and shutdown read from top to bottom."""

from __future__ import annotations

import asyncio
import math
import resource
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncio_throttle import Throttler

from hsx.admission import Admission
from hsx.canary import Canary
from hsx.capture.report import read_norm
from hsx.clock import SystemClock
from hsx.core.admission import Limits
from hsx.core.pairing import Outstanding
from hsx.core.policy import WindowLimit
from hsx.core.progress import ProgressLimits, deadline_s
from hsx.core.restart import RestartLimits, RestartPolicy
from hsx.dumps.compare import row_distances
from hsx.dumps.directory import DumpDirectory
from hsx.dumps.measure import measure
from hsx.engines import sglang
from hsx.engines.external import ExternalOwner
from hsx.engines.leftovers import sweep_shared_memory
from hsx.engines.process import process_alive
from hsx.engines.spawn import SpawnOwner, SpawnPlan
from hsx.errors import EngineError, RunError
from hsx.gate import Gate
from hsx.locks import JOB_LOCK, locked, store_lock
from hsx.pipeline import Parts, Pipeline, Settings
from hsx.prepare import OpenJob, prepare
from hsx.progress_view import summary_line
from hsx.signals import handled_signals
from hsx.status import StatusServer
from hsx.stores.group import record_final_norm
from hsx.stores.ledger import SqliteLedger
from hsx.stores.root import attach_roots, discard_strays
from hsx.stores.view import UnionView
from hsx.supervisor import Supervisor, SupervisorParts
from hsx.suspects import Suspects
from hsx.sweeper import Sweeper
from hsx.systemd import Notifier
from hsx.telemetry import Telemetry
from hsx.vouching import Vouching
from hsx.watchdog import Watchdog, WatchdogParts
from hsx.writer import Writer, WriterSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import numpy as np
    from numpy.typing import NDArray

    from hsx.config_load import LoadedConfig
    from hsx.core.epoch import CaptureReport
    from hsx.core.invariants import Content
    from hsx.core.layout import StoreLayout
    from hsx.ports import Clock, Counts, EngineClient, EngineOwner
    from hsx.progress_view import ProgressView

STATUS_EVERY_S = 5.0
STARTING_EVERY_S = 0.5
INDEXING_TIMEOUT_S = 120.0
"""How long a service manager should wait for the next word while the dataset is read."""
STAGED_PER_REQUEST = 16
"""Samples that may be between request and commit, per request slot: enough for any backlog that bytes allow to matter."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended in good order.

    Attributes:
        committed: samples committed in the job, earlier runs included.
        quarantined: samples quarantined in the job.
        rejected: dataset rows that were never samples.
        pending: samples that are neither.
        tokens: tokens committed by this run.
        seconds: length of this run.
        violations: violations met by this run, by invariant.
        restarts: restarts of the engine in this run.
        store: the store's path.
        interrupted: a signal ended the run before the job was done.
        revoked: samples that were committed and taken back in this run.
    """

    committed: int
    quarantined: int
    rejected: int
    pending: int
    tokens: int
    seconds: float
    violations: dict[str, int]
    restarts: int
    store: str
    interrupted: bool
    revoked: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The server, time and the eye that judges dumps: what a simulation puts in place of the real ones.

    Attributes:
        client: speaks to the server; closed by the run.
        owner: starts and stops it.
        clock: monotonic time.
        measure: measures a dump's tensors, (states, ids recorded, ids expected).
    """

    client: EngineClient
    owner: EngineOwner
    clock: Clock = field(default_factory=SystemClock)
    measure: Callable[[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int32]], Content] = measure


class Indexing:
    """Tells that the dataset is being read, now and then: to the log, and to a service manager that waits for READY."""

    def __init__(self, telemetry: Telemetry, notifier: Notifier) -> None:
        self._telemetry = telemetry
        self._notifier = notifier
        self._next = time.monotonic()

    def __call__(self, rows: int, tokens: int) -> None:
        """Called with the rows and tokens read so far."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + STATUS_EVERY_S
        self._telemetry.log.info("dataset.indexing", rows=rows, tokens=tokens)
        self._notifier.status(f"reading the dataset: {rows} rows, {tokens} tokens")
        self._notifier.extend_timeout(INDEXING_TIMEOUT_S)


async def run_job(loaded: LoadedConfig, *, progress: ProgressView | None = None, outside: Outside | None = None) -> Outcome:
    """Runs a job until nothing is pending, or until a signal has drained it.

    Args:
        loaded: the job file.
        progress: shown to people.
        outside: the world to run in; default: the real one, as the job file says.

    Raises:
        RunError: the job cannot go on; what was committed stays. Its kind says why.
        asyncio.CancelledError: a second signal forced the end.
    """
    telemetry = Telemetry()
    notifier = Notifier()
    _raise_file_limit()
    with ExitStack() as held:
        held.enter_context(locked(loaded.state_dir / JOB_LOCK, f"job {loaded.config.job.name}"))
        held.enter_context(locked(loaded.dump_dir / "hsx.lock", f"dump directory {loaded.dump_dir}", "staging_failed"))
        held.enter_context(locked(store_lock(loaded.store), f"store {loaded.store}", "store_unwritable"))
        # Nothing else is on the loop yet, so reading the dataset may block it; a signal ends it as it ends any program.
        job = prepare(loaded, Indexing(telemetry, notifier))
        ledger = SqliteLedger(job.ledger)
        try:
            before = await ledger.counts()
            violations = await ledger.violations_by_invariant()
            telemetry.job_began(loaded.config.job.name, ledger.run, str(loaded.store), before, violations)
            await _revoke_overdue(ledger, telemetry)
            run = Run(loaded, job, ledger, telemetry, notifier, progress, outside or real_outside(loaded))
            anything_left = (await ledger.counts()).pending or await ledger.unvouched()
            interrupted = await run.run() if anything_left else False
            return _outcome(loaded, telemetry, await ledger.counts(), interrupted=interrupted)
        except BaseExceptionGroup as group:
            raise _deepest(group) from group
        finally:
            await ledger.close()


class Run:
    """One run of an open job that has something left to do."""

    def __init__(
        self,
        loaded: LoadedConfig,
        job: OpenJob,
        ledger: SqliteLedger,
        telemetry: Telemetry,
        notifier: Notifier,
        progress: ProgressView | None,
        outside: Outside,
    ) -> None:
        self._loaded = loaded
        self._job = job
        self._ledger = ledger
        self._telemetry = telemetry
        self._notifier = notifier
        self._progress = progress
        config = loaded.config
        clock = outside.clock
        store, roots = attach_roots(job.store, {root.name: root.path for root in loaded.roots})
        self._layout: StoreLayout = store.layout
        for root in roots:
            root.sweep()
        discard_strays(roots, ledger.committed_roots(), store.layout.samples, ledger.revoked())
        view = UnionView(store)
        view.repair(ledger.committed_roots())
        self._client = outside.client
        self._owner = outside.owner
        self._measure = outside.measure
        self._dumps = DumpDirectory(loaded.dump_dir, process_alive)
        self._admission = Admission(
            Limits(
                requests=config.pipeline.concurrency,
                tokens=config.pipeline.max_tokens_in_flight,
                staging_bytes=loaded.staging_bytes,
                samples=config.pipeline.concurrency * STAGED_PER_REQUEST,
            ),
            clock,
            telemetry,
        )
        self._progress_limits = ProgressLimits(config.watchdog.grace_s, config.watchdog.slowest_tokens_per_s)
        canary = self._make_canary()
        self._suspects = Suspects(ledger, telemetry)
        self._writer = Writer(
            roots,
            view,
            ledger,
            job.samples,
            telemetry,
            WriterSettings(
                threads=config.pipeline.writer_threads,
                group_samples=config.pipeline.commit_samples,
                group_seconds=config.pipeline.commit_seconds,
                reserves={root.name: root.reserve for root in loaded.roots},
            ),
        )
        self._vouching = Vouching(config.watchdog.canary_every, canary, ledger, self._writer, self._suspects, telemetry, clock)
        self._supervisor = self._make_supervisor(clock, canary)
        self._watchdog = self._make_watchdog(clock, canary)
        self._outstanding = Outstanding(ledger.run)
        self._sweeper = Sweeper(ledger.run, self._outstanding, self._dumps, ledger, clock, self._watchdog.count)
        self._pipeline = self._make_pipeline(clock)
        self._interrupted = False

    async def run(self) -> bool:
        """Extracts; True when a signal cut the run short."""
        status = StatusServer(self._telemetry, self._facts, self._loaded.config.status.host, self._loaded.config.status.port)
        if self._loaded.config.status.enabled:
            self._telemetry.log.info("status.listening", url=await status.start())
        self._notifier.ready("extracting")
        try:
            with handled_signals(self._on_signal):
                async with asyncio.TaskGroup() as services:
                    committing = services.create_task(self._writer.run())
                    others = [services.create_task(service) for service in self._services()]
                    await self._extract_all()
                    await self._writer.close()
                    await committing
                    for task in others:
                        task.cancel()
        finally:
            self._writer.shutdown()
            self._dumps.close()
            await self._client.close()
            await status.stop()
            self._notifier.stopping()
            if self._progress:
                self._progress.update(self._telemetry.snapshot())
        return self._interrupted

    async def _extract_all(self) -> None:
        """Extracts until nothing is pending and a canary vouches for all of it; or, drained, for what there is."""
        while True:
            await self._pipeline.run()
            if await self._vouching.close(self._supervisor.ready):
                break
        epoch = self._supervisor.epoch
        if epoch is not None:
            await self._sweeper.sweep(epoch)
            await self._watchdog.look_at_counter(epoch, self._sweeper)

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the pipeline until it is done."""
        return [
            self._supervisor.run(),
            self._watchdog.run(self._sweeper),
            self._vouching.run(self._supervisor.ready),
            self._dumps.watch(),
            self._notifier.keep_alive(self._watchdog.is_looking),
            self._report(),
        ]

    def _on_signal(self, name: str) -> None:
        if self._interrupted:
            self._telemetry.log.warning("run.forced", signal=name)
            for task in asyncio.all_tasks():
                task.cancel()
            return
        self._interrupted = True
        self._telemetry.log.info("run.draining", signal=name, attempts=self._pipeline.attempts)
        self._notifier.stopping("draining")
        self._pipeline.drain()
        self._vouching.drain()

    async def _report(self) -> None:
        """Feeds the progress view and the service manager's status line."""
        every = min(STATUS_EVERY_S, self._progress.interval_s if self._progress else STATUS_EVERY_S)
        while True:
            self._telemetry.engine_waiting(self._supervisor.situation)
            snapshot = self._telemetry.snapshot()
            if self._progress:
                self._progress.update(snapshot)
            self._notifier.status(summary_line(snapshot))
            if self._interrupted:
                self._notifier.extend_timeout(deadline_s(self._progress_limits, self._admission.in_flight.tokens))
            await asyncio.sleep(min(every, STARTING_EVERY_S) if self._supervisor.epoch is None else every)

    def _facts(self) -> dict[str, Any]:
        config = self._loaded.config
        return {
            "limits": {
                "requests": config.pipeline.concurrency,
                "tokens": config.pipeline.max_tokens_in_flight,
                "staging_bytes": self._loaded.staging_bytes,
            },
            "capture": {"states": list(self._job.spec.names), "hidden_size": self._job.shape.hidden_size},
        }

    def _make_canary(self) -> Canary:
        config = self._loaded.config
        return Canary(
            run=self._ledger.run,
            spec=self._job.spec,
            shape=self._job.shape,
            timeout_s=config.watchdog.grace_s + config.pipeline.dump_deadline_s,
            tolerance=config.watchdog.canary_tolerance,
            client=self._client,
            dumps=self._dumps,
            ledger=self._ledger,
            measure=self._measure,
            distances=row_distances,
        )

    def _make_supervisor(self, clock: Clock, canary: Canary) -> Supervisor:
        config = self._loaded.config
        gate = Gate(
            spec=self._job.spec,
            shape=self._job.shape,
            longest=self._layout.max_tokens,
            canary=canary,
            client=self._client,
            dumps=self._dumps,
            ledger=self._ledger,
            clock=clock,
        )
        parts = SupervisorParts(
            owner=self._owner,
            client=self._client,
            dumps=self._dumps,
            ledger=self._ledger,
            observer=self._telemetry,
            clock=clock,
            gate=gate.check,
            on_report=self._record_norm,
            before_start=partial(sweep_shared_memory, self._loaded.dump_dir),
            consequences=self._vouching,
        )
        limits = RestartLimits(
            first_s=config.watchdog.backoff_first_s,
            factor=2.0,
            longest_s=config.watchdog.backoff_longest_s,
            jitter=0.2,
            budget=config.watchdog.restart_budget,
            window_s=config.watchdog.restart_window_s,
        )
        return Supervisor(
            self._ledger.run,
            parts,
            RestartPolicy(limits),
            start_timeout_s=config.engine.start_timeout_s,
            stop_grace_s=config.engine.stop_grace_s,
        )

    def _make_watchdog(self, clock: Clock, canary: Canary) -> Watchdog:
        config = self._loaded.config.watchdog
        parts = WatchdogParts(
            supervisor=self._supervisor,
            admission=self._admission,
            dumps=self._dumps,
            ledger=self._ledger,
            observer=self._telemetry,
            clock=clock,
            canary=canary.check,
        )
        return Watchdog(parts, self._progress_limits, WindowLimit(config.violations, config.violation_window_s))

    def _on_commit(self) -> None:
        self._watchdog.committed()
        self._vouching.committed()

    def _make_pipeline(self, clock: Clock) -> Pipeline:
        config = self._loaded.config

        def request_timeout_s(tokens_in_flight: int) -> float:
            return config.pipeline.request_slack * deadline_s(self._progress_limits, tokens_in_flight)

        rate = config.pipeline.start_rate
        settings = Settings(
            run=self._ledger.run,
            spec=self._job.spec,
            hidden_size=self._job.shape.hidden_size,
            retries=config.pipeline.retries,
            dump_deadline_s=config.pipeline.dump_deadline_s,
            request_timeout_s=request_timeout_s,
            congestion_s=config.pipeline.congestion_s,
            shard_bytes=self._layout.file_bytes,
        )
        parts = Parts(
            engine=self._supervisor,
            client=self._client,
            dumps=self._dumps,
            samples=self._job.samples,
            leases=self._ledger,
            ledger=self._ledger,
            writer=self._writer,
            admission=self._admission,
            outstanding=self._outstanding,
            sweeper=self._sweeper,
            suspects=self._suspects,
            pace=Throttler(rate_limit=math.ceil(rate), period=math.ceil(rate) / rate),
            observer=self._telemetry,
            clock=clock,
            measure=self._measure,
            on_failure=self._watchdog.failed,
            on_success=self._on_commit,
            on_server_lost=self._watchdog.server_lost,
        )
        return Pipeline(settings, parts)

    async def _record_norm(self, report: CaptureReport) -> None:
        """Keeps the final norm in the store: with it, and only with it, pre_norm states convert to post_norm."""
        # What the owner has found beside the server is to be logged, however short the start was.
        self._telemetry.engine_waiting(self._supervisor.situation)
        try:
            weight = await asyncio.to_thread(read_norm, self._dumps.folder, report)
        except (OSError, ValueError) as error:
            raise EngineError("capture_off", f"the final norm beside the capture report cannot be read: {error}") from error
        if weight is not None:
            record_final_norm(self._loaded.store, weight, report.norm_eps)


async def _revoke_overdue(ledger: SqliteLedger, telemetry: Telemetry) -> None:
    """Does what a killed run had begun: takes back what a canary brought into doubt. The store follows the ledger."""
    for epoch, invariant, evidence in await ledger.overdue():
        rows = await ledger.revoke(epoch, invariant, evidence)
        tokens, nbytes = sum(row.tokens for row in rows), sum(row.nbytes for row in rows)
        if rows:
            telemetry.samples_revoked(epoch, invariant, evidence, len(rows), tokens, nbytes)


def _raise_file_limit() -> None:
    """As many file descriptors as this user may have: the usual soft limit is meant for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def real_outside(loaded: LoadedConfig) -> Outside:
    """The server that the job file names, and real time."""
    engine = loaded.config.engine
    limits = sglang.Limits(loaded.config.pipeline.concurrency)
    return Outside(client=sglang.SGLangClient(engine.host, engine.port, limits), owner=make_owner(loaded))


def make_owner(loaded: LoadedConfig) -> EngineOwner:
    """The owner that the job file names."""
    engine = loaded.config.engine
    if engine.ownership == "external":
        return ExternalOwner(loaded.dump_dir, engine.port, engine.start_timeout_s)
    python = engine.python or sys.executable
    return SpawnOwner(
        SpawnPlan(
            command=[python, "-m", "hsx", "serve", str(loaded.path)],
            args=engine.args,
            dump_dir=loaded.dump_dir,
            log_file=loaded.state_dir / "server.log",
            env=engine.env,
            host=engine.host,
            port=engine.port,
        )
    )


def _outcome(loaded: LoadedConfig, telemetry: Telemetry, after: Counts, *, interrupted: bool) -> Outcome:
    snapshot = telemetry.snapshot()
    return Outcome(
        committed=after.committed,
        quarantined=after.quarantined,
        rejected=after.rejected,
        pending=after.pending,
        tokens=snapshot["progress"]["tokens"]["committed_by_run"],
        seconds=snapshot["job"]["seconds"],
        violations=dict(snapshot["invariants"]["by_name"]),
        restarts=snapshot["engine"]["restarts"]["total"],
        store=str(loaded.store),
        interrupted=interrupted,
        revoked=snapshot["progress"]["samples"]["revoked_by_run"],
    )


def _deepest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: a RunError if there is one, else the first that is not a mere consequence."""
    run_errors, others = group.split(RunError)
    chosen: BaseException = run_errors if run_errors is not None else (others or group)
    while isinstance(chosen, BaseExceptionGroup):
        chosen = chosen.exceptions[0]
    return chosen
