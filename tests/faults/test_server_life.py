"""Servers that die, hang, crawl or are killed by a sample: restarted where that helps, and blamed for what is theirs."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from hsx.core.dump import SUFFIX
from hsx.core.epoch import RECORD_NAME
from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, POLL_S, delete_in_use, hsx_done, hsx_running, log_lines, wait_until
from hsx.testing.fault_matrix import run_logged
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 12
PATIENT = {"grace_s": 10.0, "slowest_tokens_per_s": 1000.0}
"""Seconds, not a minute, until a silence is a stall."""


def verdicts(job: TinyJob) -> list[str | None]:
    """Why each epoch ended, the oldest first; None for one that a drain ended."""
    with job.ledger() as ledger:
        return [row.reason for row in ledger.epochs()]


def failures(job: TinyJob) -> dict[str, int]:
    """Attempts that failed by the samples' own fault."""
    with job.ledger() as ledger:
        return ledger.failures_by_reason()


def test_a_server_killed_in_mid_prefill(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    job = spawned({"kind": "die", "match": "-3-1-"})
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    seen("server_killed", job.loaded, log=log_lines(done.log), restarts=1, events=("engine.restarted", "invariant.violated"))
    assert verdicts(job) == ["alive", None]
    assert failures(job) == {}


def test_a_server_that_hangs_and_looks_healthy(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    """The scheduler's thread stops in mid-prompt and the HTTP side answers on: in one process, its death looks the same."""
    job = spawned(
        {"kind": "hang", "match": "-5-1-"}, watchdog=PATIENT, pipeline={"dump_deadline_s": 20.0, "request_slack": 20.0}
    )
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    for row in ("server_hangs", "scheduler_killed"):
        # A busy machine may let a fresh server look stalled once more.
        seen(row, job.loaded, log=log_lines(done.log), restarts=range(1, 4), events=("engine.restarted",))
    assert verdicts(job)[0] == "advancing"
    assert failures(job) == {}


async def test_a_server_twenty_times_as_slow(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    await server.fault("slow", count=-1, match="hsx1-", value=20.0)
    _, log = await run_logged(job)
    seen("server_slow", job.loaded, log=log)
    assert failures(job) == {}


def test_a_server_that_dies_at_boot_three_times(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    job = spawned()
    (job.folder / "deaths").write_text("3")
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    seen("server_dies_at_boot", job.loaded, log=log_lines(done.log), restarts=3, events=("engine.restarted",))
    assert verdicts(job) == [None]


def test_a_sample_that_kills_the_server_is_found(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    """It dies of sample 5 at every attempt; eight are at the server at once, and one restart is all the budget allows."""
    job = spawned({"kind": "die", "count": -1, "match": "-5-"}, watchdog={"restart_budget": 1}, samples=24)
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.INCOMPLETE, done.error()
    seen(
        "poison_sample",
        job.loaded,
        log=log_lines(done.log),
        quarantined={"server_killed": 1},
        restarts=range(1, 6),
        events=("engine.restarted", "sample.convicted"),
    )
    with job.ledger() as ledger:
        (row,) = ledger.quarantined()
        assert row.index == 5
    assert failures(job).keys() <= {"server_killed"}


async def test_a_full_dump_tmpfs(small_disk: Path, tmp_path: Path, seen: Callable[..., Result]) -> None:
    """Every dump of the first batch finds no room; then somebody makes some."""
    with running_reference(small_disk / "dumps", LAYERS, model=None, chunk=32) as server:
        job = make_job(tmp_path, server=server, pipeline={"dump_deadline_s": 30.0})
        await server.fault("hold", count=-1, match="-0-1-")
        with capture_logs() as log:
            run = asyncio.create_task(job.run())
            while not run.done() and not (await server.struck()).get("hold"):  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(POLL_S)
            filler = small_disk / "filler"
            with filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
            await server.clear_faults()
            while not run.done() and "error.met" not in {line["event"] for line in log}:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            filler.unlink()
            await run
        seen("staging_full", job.loaded, log=log, events=("error.met",))
        assert failures(job) == {}
        assert list(server.folder.glob(f"hsx1-*{SUFFIX}")) == []


def struck(job: TinyJob) -> dict[str, int]:
    """How often each fault has struck in the job's present server; none while it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault", timeout=PATIENCE_S) as answer:
            found: dict[str, Any] = json.load(answer)
    except OSError:
        return {}
    return dict(found["struck"])


def test_a_dump_directory_that_is_deleted_under_us(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    job = spawned({"kind": "hold", "count": -1, "match": "-6-1-"}, watchdog={"grace_s": 60.0}, pipeline={"concurrency": 4})
    with hsx_running(job.loaded.path, "run") as running:
        wait_until(lambda: bool(struck(job).get("hold")), "a prompt that is held")
        for entry in job.loaded.dump_dir.iterdir():
            # The record first: a folder that is half gone, and has it yet, looks as if somebody had changed the account in it.
            if entry.is_dir():
                (entry / RECORD_NAME).unlink(missing_ok=True)
            delete_in_use(entry)
        assert running.wait() == ExitCode.DONE, running.error()
    seen("staging_gone", job.loaded, log=log_lines(running.log), restarts=1, events=("engine.restarted",))
    with job.ledger() as ledger:
        first, last = ledger.epochs()
    assert (first.reason, last.reason) == ("alive", None)
    assert "deleted or replaced" in str(first.evidence)
    assert failures(job) == {}
