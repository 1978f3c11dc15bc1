"""One run of a job: start-up, run and shutdown read from top to bottom. `hsx.wiring` puts its parts together."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from hsx.config_check import check
from hsx.config_load import load
from hsx.errors import ConfigError, HsxError, RunError
from hsx.locks import JOB_LOCK, locked, store_lock
from hsx.logs import set_level
from hsx.prepare import OpenJob, prepare
from hsx.progress_view import summary_line
from hsx.reload import changes, with_changes
from hsx.signals import handled_hangups, handled_signals
from hsx.status import StatusServer
from hsx.status.token import read_token
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_reader import LedgerReader
from hsx.systemd import Notifier
from hsx.telemetry import Telemetry
from hsx.wiring import Outside, Wiring, real_outside

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from hsx.config_load import LoadedConfig
    from hsx.progress_view import ProgressView
    from hsx.records import Counts

STATUS_EVERY_S = 5.0
STARTING_EVERY_S = 0.5
INDEXING_TIMEOUT_S = 120.0
"""How long a service manager should wait for the next word while the dataset is read."""


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
        shared: committed samples of the job that were not prefilled, as their prompt is that of another one.
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
    shared: int = 0


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
            with LedgerReader(job.ledger) as reader:
                quarantined = reader.quarantined_by_reason()
            structlog.contextvars.bind_contextvars(run=ledger.run)
            telemetry.job_began(loaded.config.job.name, ledger.run, str(loaded.store), before, violations, quarantined)
            await _revoke_overdue(ledger, telemetry)
            run = Run(loaded, job, ledger, telemetry, notifier, progress, outside or real_outside(loaded))
            await run.begin()
            anything_left = (await ledger.counts()).pending or await ledger.unvouched()
            interrupted = await run.run() if anything_left else False
            unvouched = await ledger.unvouched()
            if unvouched:
                telemetry.log.warning("run.unvouched", epochs=unvouched)
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
        self._parts = Wiring(loaded, job, ledger, telemetry, outside)
        self._interrupted = False
        self._reload = asyncio.Event()

    async def begin(self) -> None:
        """Finds out what a power cut has cost, where disks are synced now and then only; those samples are pending again."""
        try:
            # A sample that were moved while it is read again would look lost where it was.
            give = await asyncio.to_thread(self._parts.homes.take)
            try:
                await self._parts.syncing.begin()
            finally:
                give()
        except BaseException:
            self._parts.shutdown()
            raise

    async def run(self) -> bool:
        """Extracts; True when a signal cut the run short."""
        settings = self._loaded.config.status
        token = read_token(settings.token_file, os.environ) if settings.enabled else ""
        status = StatusServer(self._telemetry, self._facts, settings.host, settings.port, token=token)
        await asyncio.to_thread(self._meet_roots)
        if settings.enabled:
            self._telemetry.log.info("status.listening", url=await status.start())
        self._telemetry.phase("extracting")
        self._notifier.ready("extracting")
        try:
            with handled_signals(self._on_signal), handled_hangups(self._reload.set):
                async with asyncio.TaskGroup() as services:
                    committing = services.create_task(self._parts.writer.run())
                    others = [services.create_task(service) for service in self._services()]
                    await self._extract_all()
                    await self._parts.writer.close()
                    await committing
                    self._parts.busy_with = "copies of the ledger"
                    await self._parts.copies.take()
                    for task in others:
                        task.cancel()
            self._telemetry.phase(await self._end())
        except BaseException as error:
            self._tell_failure(error)
            raise
        finally:
            self._parts.shutdown()
            self._parts.dumps.close()
            await self._parts.client.close()
            await status.stop()
            self._notifier.stopping(summary_line(self._telemetry.snapshot()))
            if self._progress:
                self._progress.update(self._telemetry.snapshot())
        return self._interrupted

    def _meet_roots(self) -> None:
        """Tells how large the roots are. Blocks."""
        for root in self._loaded.roots:
            with suppress(OSError):
                disk = os.statvfs(root.path)
                self._telemetry.root_known(root.name, str(root.path), disk.f_blocks * disk.f_frsize, root.reserve)

    async def _end(self) -> str:
        """How a run ended that nothing broke, for its status."""
        return "interrupted" if self._interrupted and (await self._ledger.counts()).pending else "done"

    def _tell_failure(self, error: BaseException) -> None:
        """The run ends by an error, which the status shows to whoever listens."""
        cause = _deepest(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(cause, asyncio.CancelledError):
            self._telemetry.phase("interrupted", reason="forced to stop by a second signal")
        elif isinstance(cause, HsxError):
            self._telemetry.phase("failed", kind=cause.kind, reason=cause.message)
        else:
            self._telemetry.phase("failed", reason=f"{type(cause).__name__}: {cause}")

    async def _extract_all(self) -> None:
        """Extracts until nothing is pending, vouched for by a canary, and synced; or, drained, for what there is."""
        while True:
            await self._parts.pipeline.run()
            vouched = await self._parts.vouching.close(self._parts.supervisor.ready)
            self._parts.busy_with = "disks that are synced"
            synced = await self._parts.syncing.close()
            self._parts.busy_with = ""
            if synced and vouched:
                break
        epoch = self._parts.supervisor.epoch
        if epoch is not None:
            await self._parts.sweeper.sweep(epoch)
            await self._parts.watchdog.look_at_counter(epoch, self._parts.sweeper)

    def _services(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the pipeline until it is done."""
        return [
            self._parts.supervisor.run(),
            self._parts.watchdog.run(self._parts.sweeper),
            self._parts.vouching.run(self._parts.supervisor.ready),
            self._parts.dumps.watch(),
            self._parts.syncing.run(),
            self._parts.copies.run(),
            self._notifier.keep_alive(self._parts.soundness.ok),
            self._report(),
            self._reload_when_asked(),
        ]

    def _on_signal(self, name: str) -> None:
        if self._interrupted:
            self._telemetry.log.warning("run.forced", signal=name)
            for task in asyncio.all_tasks():
                task.cancel()
            return
        self._interrupted = True
        self._telemetry.log.info("run.draining", signal=name, attempts=self._parts.pipeline.attempts)
        self._telemetry.phase("draining", reason=name)
        self._notifier.stopping("draining")
        self._notifier.extend_timeout(self._parts.patience_s())
        self._parts.pipeline.drain()
        self._parts.vouching.drain()

    async def _reload_when_asked(self) -> None:
        """Reads the job file again at each SIGHUP; says what of it takes effect, and what does not."""
        while True:
            await self._reload.wait()
            self._reload.clear()
            self._notifier.reloading()
            said = await self._read_again()
            self._notifier.ready(said)

    async def _read_again(self) -> str:
        """Takes over what may change in a run. A file with a fault in it changes nothing."""
        log = self._telemetry.log
        try:
            new = await asyncio.to_thread(load, self._loaded.path)
            found = changes(self._loaded, new)
            together = with_changes(self._loaded, new)
            faults = [
                f"{finding.key}: {finding.message}"
                for finding in await asyncio.to_thread(check, together, self._job.shape, int(self._job.samples.lengths.max()))
                if finding.level == "error" and finding.key in found.taken
            ]
            if faults:
                raise ConfigError("config_conflict", faults)
        except ConfigError as error:
            log.warning("config.refused", keys=[], message=error.message)
            return f"reload refused: {error.message}"
        self._loaded = together
        self._parts.change(together)
        if "log.level" in found.taken:
            set_level(together.config.log.level)
        log.info("config.reloaded", changed=found.taken)
        if found.refused:
            why = "these may not change in a run: start hsx again to have them"
            log.warning("config.refused", keys=list(found.refused), message=why)
            return f"reloaded, but for {', '.join(found.refused)}, which may not change in a run"
        return "reloaded"

    async def _report(self) -> None:
        """Feeds the progress view and the service manager's status line."""
        every = min(STATUS_EVERY_S, self._progress.interval_s if self._progress else STATUS_EVERY_S)
        while True:
            self._telemetry.engine_waiting(self._parts.supervisor.situation)
            snapshot = self._telemetry.snapshot()
            if self._progress:
                self._progress.update(snapshot)
            self._notifier.status(summary_line(snapshot))
            if self._interrupted and self._parts.soundness.ok():
                self._notifier.extend_timeout(self._parts.patience_s())
            await asyncio.sleep(min(every, STARTING_EVERY_S) if self._parts.supervisor.epoch is None else every)

    def _facts(self) -> dict[str, Any]:
        config, fault = self._loaded.config, self._parts.soundness.fault()
        return {
            "limits": {
                "requests": config.pipeline.concurrency,
                "tokens": config.pipeline.max_tokens_in_flight,
                "staging_bytes": self._loaded.staging_bytes,
            },
            "restart_budget": {
                "allowed": config.watchdog.restart_budget,
                "window_s": config.watchdog.restart_window_s,
                "left": self._parts.supervisor.restarts_left,
            },
            "capture": {"states": list(self._job.spec.names), "hidden_size": self._job.shape.hidden_size},
            "health": {
                "ok": not fault,
                "reason": fault,
            },
        }


async def _revoke_overdue(ledger: SqliteLedger, telemetry: Telemetry) -> None:
    """Does what a killed run had begun: takes back what a canary brought into doubt. The store follows the ledger."""
    for epoch, invariant, evidence in await ledger.overdue():
        rows = await ledger.revoke(epoch, invariant, evidence)
        tokens, nbytes = sum(row.tokens for row in rows), sum(row.own_bytes for row in rows)
        if rows:
            telemetry.samples_revoked(epoch, invariant, evidence, len(rows), tokens, nbytes)


def _raise_file_limit() -> None:
    """As many file descriptors as this user may have: the usual soft limit is meant for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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
        shared=after.shared,
    )


def _deepest(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that ended the run: a RunError if there is one, else the first that is not a mere consequence."""
    run_errors, others = group.split(RunError)
    chosen: BaseException = run_errors if run_errors is not None else (others or group)
    while isinstance(chosen, BaseExceptionGroup):
        chosen = chosen.exceptions[0]
    return chosen
