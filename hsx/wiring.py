"""Puts the parts of a run together: with `hsx.app`, which runs them, the only place that names concrete classes."""

from __future__ import annotations

import asyncio
import math
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from asyncio_throttle import Throttler

from hsx.admission import Admission
from hsx.canary import Canary
from hsx.capture.report import read_norm
from hsx.clock import SystemClock
from hsx.core.admission import Limits
from hsx.core.pairing import Outstanding, Standing
from hsx.core.policy import WindowLimit
from hsx.core.progress import ProgressLimits, deadline_s
from hsx.core.restart import RestartLimits, RestartPolicy
from hsx.dumps.compare import row_distances
from hsx.dumps.directory import DumpDirectory
from hsx.dumps.measure import measure
from hsx.engines import sglang
from hsx.engines.external import ExternalOwner
from hsx.engines.leftovers import sweep_shared_memory
from hsx.engines.process import boot_id, process_alive
from hsx.engines.spawn import SpawnOwner, SpawnPlan
from hsx.engines.systemd_unit import SystemdOwner
from hsx.errors import EngineError, RunError
from hsx.gate import Gate
from hsx.locks import MOVE_LOCK, Homes, locked
from hsx.pipeline import Parts, Pipeline, Settings
from hsx.soundness import Soundness
from hsx.space import RootsSettings, Space, Staging
from hsx.stores.attach import attach_roots, drop_empty_roots, usable_roots
from hsx.stores.draining import is_draining
from hsx.stores.fp8 import row_error
from hsx.stores.group import open_store, record_final_norm
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.root import discard_strays
from hsx.stores.selection import kept_of, stored_counts
from hsx.stores.view import UnionView
from hsx.supervisor import Supervisor, SupervisorParts
from hsx.suspects import Suspects
from hsx.sweeper import Sweeper
from hsx.upkeep import Copies, Syncing
from hsx.vouching import Vouching
from hsx.watchdog import WEDGED_S, Watchdog, WatchdogParts
from hsx.writer import Writer, WriterSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.config_load import LoadedConfig
    from hsx.core.epoch import CaptureReport
    from hsx.core.invariants import Content
    from hsx.core.layout import StoreLayout
    from hsx.ports import Clock, EngineClient, EngineOwner, Root
    from hsx.prepare import OpenJob
    from hsx.records import CommittedRow
    from hsx.stores.group import StoreInfo
    from hsx.stores.ledger import SqliteLedger
    from hsx.stores.root import ShardRoot
    from hsx.telemetry import Telemetry


STAGED_PER_REQUEST = 16
"""Samples that may be between request and commit, per request slot: enough for any backlog that bytes allow to matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """The server, time and the eye that judges dumps: what a simulation puts in place of the real ones.

    Attributes:
        client: speaks to the server; closed by the run.
        owner: starts and stops it.
        clock: monotonic time.
        measure: measures a dump's tensors, (states, ids recorded, ids expected, tokens of an inner chunk).
    """

    client: EngineClient
    owner: EngineOwner
    clock: Clock = field(default_factory=SystemClock)
    measure: Callable[[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int32], int], Content] = measure


class Wiring:
    """The parts of one run. The roots are attached, and what crashes left on them and in the view is put in order.

    Args:
        loaded: the job file.
        job: the open job.
        ledger: its ledger.
        telemetry: hears what the parts observe.
        outside: the world to run in.

    Attributes:
        client, dumps: see `hsx.ports`.
        supervisor, watchdog, vouching, sweeper, space, writer, pipeline: each in the module of its name.
        syncing, copies: see `hsx.upkeep`.
        homes: see `hsx.locks`.
        soundness: see the module of its name.
        busy_with: what the end of the run waits for, such as disks that are synced; "" for nothing.

    Raises:
        RunError: a root, the store or the dump directory cannot be used; its kind says how.
    """

    def __init__(
        self, loaded: LoadedConfig, job: OpenJob, ledger: SqliteLedger, telemetry: Telemetry, outside: Outside
    ) -> None:
        self._loaded = loaded
        self._job = job
        self._ledger = ledger
        self._telemetry = telemetry
        config = loaded.config
        clock = outside.clock
        self.homes = Homes(loaded.state_dir)
        with self.homes.held():  # no sample is moved between reading the ledger and acting on it
            known = drop_empty_roots(open_store(loaded.store), [root.name for root in loaded.roots], ledger.homes)
            store, roots = self._attach(known)
            _sweep(roots, loaded.state_dir)
            view = UnionView(store)
            # Links first: one that an interrupted move left points to a copy that is about to go.
            view.repair(ledger.committed_roots())
            discard_strays(roots, ledger.committed_roots(), store.layout.samples, ledger.revoked())
        self._layout: StoreLayout = store.layout
        self._rows = stored_counts(job.samples, store.layout)
        self._kept = kept_of(job.samples, store.layout)
        self.client = outside.client
        self._owner = outside.owner
        chunk_tokens = store.layout.chunk_tokens
        self._measure = lambda states, ids, expected: outside.measure(states, ids, expected, chunk_tokens)
        self.dumps = DumpDirectory(loaded.dump_dir, process_alive)
        self._outstanding = Outstanding(ledger.run)
        self.space = Space(roots, self._roots_settings(roots), clock, telemetry)
        self._staging = Staging(self.dumps, self._is_outstanding, clock, telemetry)
        self._admission = Admission(
            _budgets(loaded),
            self.space,
            self._staging,
            clock,
            telemetry,
        )
        self._progress_limits = ProgressLimits(config.watchdog.grace_s, config.watchdog.slowest_tokens_per_s)
        canary = self._make_canary()
        self._suspects = Suspects(ledger, telemetry)
        self.writer = Writer(
            roots,
            self.space,
            view,
            ledger,
            job.samples,
            telemetry,
            clock,
            WriterSettings(
                threads=config.pipeline.writer_threads,
                group_samples=config.pipeline.commit_samples,
                group_seconds=config.pipeline.commit_seconds,
            ),
            self.homes,
            self._kept,
        )
        self.vouching = Vouching(config.watchdog.canary_every, canary, ledger, self.writer, self._suspects, telemetry, clock)
        self.busy_with = ""
        self.supervisor = self._make_supervisor(clock, canary)
        self.watchdog = self._make_watchdog(clock, canary)
        self.sweeper = Sweeper(ledger.run, self._outstanding, self.dumps, ledger, clock, self.watchdog.count)
        self.pipeline = self._make_pipeline(clock)
        self.syncing = self._make_syncing(roots, clock)
        self.soundness = self._make_soundness(clock)
        folders = {root.name: root.folder for root in roots}
        self.copies = Copies(config.storage.backup_seconds, folders, self.space, ledger, telemetry, clock)

    def shutdown(self) -> None:
        """Ends the threads; waits for what they are doing."""
        self.writer.shutdown()
        self.space.shutdown()

    def change(self, loaded: LoadedConfig) -> None:
        """Takes over what `hsx.reload.CHANGEABLE` names of a job file that was read again."""
        self._admission.change(_budgets(loaded))
        watchdog = loaded.config.watchdog
        self._restarts.change(budget=watchdog.restart_budget, window_s=watchdog.restart_window_s)

    def patience_s(self) -> float:
        """Seconds without a sign of work that are allowed for what is in flight now."""
        return deadline_s(self._progress_limits, self._admission.in_flight.tokens)

    def _attach(self, store: StoreInfo) -> tuple[StoreInfo, list[ShardRoot]]:
        """The roots that the job file names; without those that cannot be used, where it says so."""
        storage = self._loaded.config.storage
        paths = {root.name: root.path for root in self._loaded.roots}
        if storage.on_missing_root == "go_on":
            paths, missing = usable_roots(store, paths)
            for name, error in missing.items():
                self._telemetry.root_lost(name, error.kind, error.message)
        return attach_roots(store, paths, durable=storage.durability == "commit", writer=storage.writer)

    def _roots_settings(self, roots: Sequence[ShardRoot]) -> RootsSettings:
        folders = {root.name: root.folder for root in roots}
        layout, rows = self._layout, self._rows
        chunks = int((-(-rows // layout.chunk_tokens)).sum())
        most = chunks * layout.block_bytes + len(rows) * layout.tail_bytes
        return RootsSettings(
            reserves={root.name: root.reserve for root in self._loaded.roots},
            disks={name: folder.stat().st_dev for name, folder in folders.items()},
            needed=lambda: max(0, most - self._telemetry.bytes_settled),
            draining=lambda name: is_draining(folders[name]),
        )

    def _is_outstanding(self, name: str) -> bool:
        return self._outstanding.standing(name)[0] is Standing.OUTSTANDING

    def _make_syncing(self, roots: Sequence[ShardRoot], clock: Clock) -> Syncing:
        def committed(since: float) -> list[CommittedRow]:
            with LedgerReader(self._job.ledger) as ledger:
                return list(ledger.committed(since))

        def sound(root: Root, row: CommittedRow) -> bool:
            with suppress(RunError):
                return root.checksum(row.index, row.tokens, row.captured_as) == row.crc32c
            return False

        return Syncing(
            relaxed=self._loaded.config.storage.durability == "relaxed",
            roots=roots,
            space=self.space,
            ledger=self._ledger,
            store=self.writer,
            committed=committed,
            sound=sound,
            boot=boot_id(),
            observer=self._telemetry,
            clock=clock,
        )

    def _make_canary(self) -> Canary:
        config = self._loaded.config
        return Canary(
            run=self._ledger.run,
            spec=self._job.spec,
            shape=self._job.shape,
            timeout_s=lambda tokens: deadline_s(self._progress_limits, tokens) + config.pipeline.dump_deadline_s,
            tolerance=config.watchdog.canary_tolerance,
            rounding=0.0 if self._layout.dtype == "bf16" else row_error(self._layout.hidden_size),
            client=self.client,
            dumps=self.dumps,
            ledger=self._ledger,
            outstanding=self._outstanding,
            measure=self._measure,
            distances=row_distances,
            room=lambda nbytes: self._staging.admit(self._admission.in_flight, nbytes),
        )

    def _make_supervisor(self, clock: Clock, canary: Canary) -> Supervisor:
        config = self._loaded.config
        gate = Gate(
            spec=self._job.spec,
            shape=self._job.shape,
            longest=self._layout.max_tokens,
            canary=canary,
            client=self.client,
            dumps=self.dumps,
            ledger=self._ledger,
            clock=clock,
        )
        parts = SupervisorParts(
            owner=self._owner,
            client=self.client,
            dumps=self.dumps,
            ledger=self._ledger,
            observer=self._telemetry,
            clock=clock,
            gate=gate.check,
            on_report=self._record_norm,
            before_start=partial(sweep_shared_memory, self._loaded.dump_dir),
            consequences=self.vouching,
        )
        limits = RestartLimits(
            first_s=config.watchdog.backoff_first_s,
            factor=2.0,
            longest_s=config.watchdog.backoff_longest_s,
            jitter=0.2,
            budget=config.watchdog.restart_budget,
            window_s=config.watchdog.restart_window_s,
        )
        self._restarts = RestartPolicy(limits)
        return Supervisor(
            self._ledger.run,
            parts,
            self._restarts,
            start_timeout_s=config.engine.start_timeout_s,
            stop_grace_s=config.engine.stop_grace_s,
        )

    def _make_watchdog(self, clock: Clock, canary: Canary) -> Watchdog:
        config = self._loaded.config.watchdog
        parts = WatchdogParts(
            supervisor=self.supervisor,
            admission=self._admission,
            dumps=self.dumps,
            ledger=self._ledger,
            observer=self._telemetry,
            clock=clock,
            canary=canary.check,
        )
        return Watchdog(parts, self._progress_limits, WindowLimit(config.violations, config.violation_window_s))

    def _make_soundness(self, clock: Clock) -> Soundness:
        slack = self._loaded.config.pipeline.request_slack

        def marks() -> Hashable:
            now, epoch = self._admission.in_flight, self.supervisor.epoch
            flight = (now.requests, now.tokens, now.staging_bytes, now.samples)
            committed, failed = self._telemetry.bytes_committed, self._telemetry.attempts_failed
            advanced = self._admission.snapshot().last_advance
            return (
                committed,
                failed,
                flight,
                advanced,
                self.supervisor.state,
                epoch.id if epoch else "",
                self.pipeline.attempts,
            )

        def waits() -> str:
            if self.busy_with:
                return self.busy_with
            if self.supervisor.epoch is None:
                return f"the engine, which is {self.supervisor.state.value}"
            return self._telemetry.paused

        return Soundness(
            clock,
            marks=marks,
            waits=waits,
            looked_at=lambda: self.watchdog.looked_at,
            look_s=WEDGED_S,
            patience_s=lambda: slack * self.patience_s() + self._loaded.config.pipeline.dump_deadline_s,
            attempts=lambda: self.pipeline.attempts,
            tell=self._telemetry.run_unsound,
        )

    def _on_commit(self) -> None:
        self.watchdog.committed()
        self.vouching.committed()

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
            shard_bytes=lambda index: self._layout.file_bytes(int(self._rows[index])),
            kept=self._kept,
        )
        parts = Parts(
            engine=self.supervisor,
            client=self.client,
            dumps=self.dumps,
            samples=self._job.samples,
            leases=self._ledger,
            ledger=self._ledger,
            writer=self.writer,
            admission=self._admission,
            space=self.space,
            staging=self._staging,
            outstanding=self._outstanding,
            sweeper=self.sweeper,
            suspects=self._suspects,
            pace=Throttler(rate_limit=math.ceil(rate), period=math.ceil(rate) / rate),
            observer=self._telemetry,
            clock=clock,
            measure=self._measure,
            on_failure=self.watchdog.failed,
            on_success=self._on_commit,
            on_server_lost=self.watchdog.server_lost,
        )
        return Pipeline(settings, parts)

    async def _record_norm(self, report: CaptureReport) -> None:
        """Keeps the final norm in the store: with it, and only with it, pre_norm states convert to post_norm."""
        # What the owner has found beside the server is to be logged, however short the start was.
        self._telemetry.engine_waiting(self.supervisor.situation)
        try:
            weight = await asyncio.to_thread(read_norm, self.dumps.folder, report)
        except (OSError, ValueError) as error:
            raise EngineError("capture_off", f"the final norm beside the capture report cannot be read: {error}") from error
        if weight is not None:
            record_final_norm(self._loaded.store, weight, report.norm_eps)


def _budgets(loaded: LoadedConfig) -> Limits:
    pipeline = loaded.config.pipeline
    return Limits(
        requests=pipeline.concurrency,
        tokens=pipeline.max_tokens_in_flight,
        staging_bytes=loaded.staging_bytes,
        samples=pipeline.concurrency * STAGED_PER_REQUEST,
    )


def _sweep(roots: Sequence[ShardRoot], state_dir: Path) -> None:
    """Removes what killed writers left, and killed moves, unless one is under way. `Homes` is held: none begins meanwhile."""
    try:
        with locked(state_dir / MOVE_LOCK, "hsx move"):
            for root in roots:
                root.sweep()
    except RunError as error:
        if error.kind != "job_locked":
            raise
        for root in roots:
            root.sweep(moving=False)


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
    if engine.ownership == "systemd":
        return SystemdOwner(loaded.server_unit, loaded.dump_dir, engine.port, engine.start_timeout_s)
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
