"""Verdicts that blame the server, one sample, or hsx itself: each by its kind, and with what it was seen by."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, cast

import pytest
from structlog.testing import capture_logs

from hsx.app import run_job
from hsx.canary import Canary
from hsx.clock import SystemClock
from hsx.core.epoch import STATE_NAME, CaptureState, EpochRecord, to_json
from hsx.core.invariants import Violation
from hsx.core.pairing import Outstanding
from hsx.core.policy import WindowLimit
from hsx.core.progress import ProgressLimits
from hsx.dumps.compare import row_distances
from hsx.dumps.directory import DumpDirectory
from hsx.dumps.measure import measure
from hsx.engines.external import ExternalOwner
from hsx.engines.process import process_alive
from hsx.engines.sglang import SGLangClient
from hsx.epoch import LiveEpoch
from hsx.errors import EngineError, RunError, SampleError
from hsx.model_config import read_model_shape
from hsx.stores.ledger import SqliteLedger, create
from hsx.suspects import Suspects
from hsx.sweeper import Sweeper
from hsx.telemetry import Telemetry
from hsx.testing.idle_server import write_record
from hsx.testing.tiny_job import make_job
from hsx.violated import CanaryError
from hsx.watchdog import Watchdog, WatchdogParts
from hsx.wiring import Outside

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.admission import Admission
    from hsx.core.invariants import Answer
    from hsx.core.marker import Marker
    from hsx.records import ServerFacts
    from hsx.supervisor import Supervisor
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

RECORD = EpochRecord("e1", "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)
KILLED = Violation("alive", "the server was killed by signal 9")
TOKENS = 5


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[SqliteLedger]:
    """Of eight samples."""
    create(tmp_path / "ledger.sqlite", "0123abcd", {}, [TOKENS] * 8, [])
    opened = SqliteLedger(tmp_path / "ledger.sqlite")
    yield opened
    await opened.close()


# --- canary_failed ----------------------------------------------------------------------------------------------------


async def enough(_nbytes: int) -> None:
    """The dump directory has room."""


@pytest.fixture
def canary_of(server: RunningServer, ledger: SqliteLedger, tmp_path: Path) -> Callable[[DumpDirectory, SGLangClient], Canary]:
    """Makes a canary for the shared server."""
    job = make_job(tmp_path, server=server)
    shape = read_model_shape(job.loaded.model)

    def make(dumps: DumpDirectory, client: SGLangClient) -> Canary:
        return Canary(
            run=ledger.run,
            spec=job.loaded.spec,
            shape=shape,
            timeout_s=lambda _: 60.0,
            tolerance=0.05,
            client=client,
            dumps=dumps,
            ledger=ledger,
            outstanding=Outstanding(ledger.run),
            measure=measure,
            distances=row_distances,
            room=enough,
        )

    return make


async def test_a_canary_with_wrong_states_is_told_from_one_that_captures_nothing(
    server: RunningServer, ledger: SqliteLedger, canary_of: Callable[[DumpDirectory, SGLangClient], Canary]
) -> None:
    dumps, client = DumpDirectory(server.folder.parent, process_alive), server.client()
    dumps.enter(server.record.epoch)
    epoch = LiveEpoch(server.record, dumps.states())
    canary = canary_of(dumps, client)
    try:
        assert (await canary.check(epoch))[0] > 0
        for match in ("-c3-", "-c4-"):
            await server.fault("shifted_states", match=match)
        with pytest.raises(
            CanaryError, match="the canary violates twins: state 0 of two prompts with a shared prefix"
        ) as wrong:
            await canary.check(epoch)
        assert (wrong.value.kind, wrong.value.violation.invariant) == ("canary_failed", "twins")
        assert [name for name in dumps.names() if ledger.run in name] == []
        await server.fault("wrong_ids", match="-c5-")
        with pytest.raises(CanaryError, match="the canary violates tokens_equal: hsx1-0123abcd-c5-") as other:
            await canary.check(epoch)
        assert (other.value.kind, other.value.violation.invariant) == ("capture_off", "tokens_equal")
    finally:
        dumps.close()
        await client.close()


# --- server_killed ----------------------------------------------------------------------------------------------------


async def killed_with(suspects: Suspects, *samples: int) -> bool:
    """A server dies with these samples at it; whether that brought the hunt further."""
    epoch = LiveEpoch(RECORD)
    for index in samples:
        epoch.asked(index)
    epoch.void(KILLED, suspect=True)
    return await suspects.died(epoch, KILLED)


async def test_a_sample_that_kills_the_server_is_convicted_with_all_that_was_seen(ledger: SqliteLedger) -> None:
    suspects = Suspects(ledger, Telemetry())
    assert not await killed_with(suspects, 3, 5), "one death is nobody's in particular"
    assert suspects.trial == frozenset({3})
    assert not suspects.admits(7), "everybody else waits"
    assert await killed_with(suspects, 3)
    assert suspects.conviction(3) is None
    with capture_logs() as log:
        assert await killed_with(suspects, 3)
    assert [(line["event"], line["index"], line["deaths"]) for line in log] == [("sample.convicted", 3, 3)]
    assert suspects.conviction(3) == (
        "the server died or stalled 3 times while it worked on this sample, at last with no other suspect; "
        "alive: the server was killed by signal 9"
    )
    assert not suspects.admits(3)


async def test_a_conviction_outlives_hsx_until_it_is_carried_out(ledger: SqliteLedger) -> None:
    suspects = Suspects(ledger, Telemetry())
    for samples in ((3, 5), (3,), (3,)):
        await killed_with(suspects, *samples)
    after_a_crash = Suspects(ledger, Telemetry())
    await after_a_crash.recall()
    assert after_a_crash.trial == frozenset({3}), "not yet in quarantine: a suspect again"
    await suspects.executed(3)
    after_another = Suspects(ledger, Telemetry())
    await after_another.recall()
    assert after_another.trial is None


# --- hsx_stopped ------------------------------------------------------------------------------------------------------


class AheadClock(SystemClock):
    """A clock that can be put forward, as it seems to be to a process that was stopped."""

    ahead = 0.0

    def monotonic(self) -> float:
        """Seconds, with what was skipped."""
        return time.monotonic() + self.ahead


class StoppedClient(SGLangClient):
    """During the first request for sample 3 its process stands still, until long after that request's time is over."""

    clock: AheadClock

    async def prefill(
        self, marker: Marker, input_ids: Sequence[int] | NDArray[np.int32], timeout_s: float, rank: int | None = None
    ) -> Answer:
        """As ever, but for that one request."""
        if (marker.index, marker.attempt, marker.canary) != (3, 1, False):
            return await super().prefill(marker, input_ids, timeout_s, rank)
        self.clock.ahead += timeout_s + 60.0
        raise SampleError("request_timeout", f"{marker}: no answer within {timeout_s:.0f} s")


async def test_a_request_that_nobody_watched_is_held_against_nobody(tmp_path: Path, server: RunningServer) -> None:
    job = make_job(tmp_path, server=server, pipeline={"retries": 0}, watchdog={"violations": 1})
    engine = job.loaded.config.engine
    client = StoppedClient(engine.host, engine.port)
    client.clock = AheadClock()
    owner = ExternalOwner(job.loaded.dump_dir, engine.port, engine.start_timeout_s)
    with capture_logs() as log:
        outcome = await run_job(job.loaded, outside=Outside(client=client, owner=owner, clock=client.clock))
    assert (outcome.committed, outcome.quarantined, outcome.restarts, outcome.violations) == (12, 0, 0, {})
    (told,) = [line for line in log if line["event"] == "error.met" and line["kind"] == "hsx_stopped"]
    assert "nobody watched this request for " in told["message"]
    with job.ledger() as opened:
        assert opened.failures_by_reason() == {}


# --- server_gone ------------------------------------------------------------------------------------------------------


def outside_with(job: TinyJob, client: SGLangClient) -> Outside:
    """The world as it is, but for the client."""
    engine = job.loaded.config.engine
    return Outside(client=client, owner=ExternalOwner(job.loaded.dump_dir, engine.port, engine.start_timeout_s))


class BusyClient(SGLangClient):
    """Its server answers the first question for its settings too late."""

    asked = 0

    async def facts(self) -> ServerFacts:
        """As ever, but for the first time."""
        self.asked += 1
        if self.asked == 1:
            raise EngineError("server_gone", "it does not answer: TimeoutError")
        return await super().facts()


async def test_a_server_that_answers_late_when_it_has_just_come_up_is_asked_again(
    tmp_path: Path, server: RunningServer
) -> None:
    job = make_job(tmp_path, server=server)
    client = BusyClient(job.loaded.config.engine.host, job.loaded.config.engine.port)
    outcome = await run_job(job.loaded, outside=outside_with(job, client))
    assert (outcome.committed, outcome.restarts) == (12, 0)
    assert client.asked >= 2  # a busy machine may be late once more


class AbandonedClient(SGLangClient):
    """The connection of sample 3 breaks, and then nobody listens any more; that the server has died is not known yet."""

    async def prefill(
        self, marker: Marker, input_ids: Sequence[int] | NDArray[np.int32], timeout_s: float, rank: int | None = None
    ) -> Answer:
        """As ever, but for that sample."""
        if marker.index == 3 and not marker.canary:
            raise SampleError("request_failed", f"{marker}: the connection was lost")
        return await super().prefill(marker, input_ids, timeout_s, rank)

    async def abort(self, marker: Marker) -> None:
        """Finds nobody."""
        raise EngineError("server_gone", "nobody listens")


async def test_a_connection_that_a_dying_server_breaks_is_held_against_no_sample(tmp_path: Path, server: RunningServer) -> None:
    job = make_job(tmp_path, server=server, pipeline={"retries": 0})
    client = AbandonedClient(job.loaded.config.engine.host, job.loaded.config.engine.port)
    with pytest.raises(RunError, match="voided for alive") as caught:
        await run_job(job.loaded, outside=outside_with(job, client))
    assert caught.value.kind == "epoch_void"
    with job.ledger() as opened:
        (epoch,) = opened.epochs()
        assert (epoch.reason, opened.failures_by_reason()) == ("alive", {})
        assert 3 in epoch.requeued


# --- sole_writer ------------------------------------------------------------------------------------------------------


class Steady:
    """What the watchdog tells that a server works; it is not asked here."""

    def advanced(self) -> None:
        """The engine showed a sign of work."""


@pytest.mark.parametrize(("gone", "reason"), [(True, "alive"), (False, "sole_writer")])
async def test_an_account_that_went_with_its_folder_is_no_other_writers(
    tmp_path: Path, ledger: SqliteLedger, *, gone: bool, reason: str
) -> None:
    """The folder is deleted after it was found in its place, and before the account in it is read; or the account alone."""
    folder = write_record(tmp_path / "dumps", RECORD)
    (folder / STATE_NAME).write_text(to_json(CaptureState(RECORD.epoch, 7, 8, 0, 0, 0, 0, 0, 0)))
    dumps = DumpDirectory(tmp_path / "dumps", process_alive)
    dumps.enter(RECORD.epoch)
    epoch, telemetry, clock = LiveEpoch(RECORD, dumps.states()), Telemetry(), SystemClock()
    parts = WatchdogParts(
        supervisor=cast("Supervisor", None),
        admission=cast("Admission", Steady()),
        dumps=dumps,
        ledger=ledger,
        observer=telemetry,
        clock=clock,
        canary=lambda _: never(),
    )
    watchdog = Watchdog(parts, ProgressLimits(60.0, 50.0), WindowLimit(8, 60.0))
    sweeper = Sweeper(ledger.run, Outstanding(ledger.run), dumps, ledger, clock, watchdog.count)
    await watchdog.look_at_counter(epoch, sweeper)
    assert not epoch.is_void
    if gone:
        shutil.rmtree(folder)
    else:
        (folder / STATE_NAME).unlink()
    await watchdog.look_at_counter(epoch, sweeper)
    dumps.close()
    assert (await epoch.voided()).invariant == reason


async def never() -> None:
    """No canary is sent."""
    raise AssertionError("a canary was sent")
