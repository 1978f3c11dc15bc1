"""A spawned server that hangs, lies or dies is restarted within the budget; beyond it the job stops, and nothing is lost.

Servers that hang, or die at boot, are rows of the fault matrix, in tests/faults.
"""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.epoch import RECORD_NAME
from hsx.exit_codes import ExitCode
from hsx.testing.commands import HsxProcess, command_lines, hsx_done, hsx_running, wait_until
from hsx.testing.servers import free_port
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SAMPLES = 12


def spawned(folder: Path, watchdog: dict[str, Any], pipeline: dict[str, Any] | None = None) -> TinyJob:
    """A job that owns its server; the server takes faults, and dies at boot while `deaths` holds a number above 0."""
    engine = {
        "ownership": "spawn",
        "port": free_port(),
        "args": ["--allow-faults", "--die-at-boot", str(folder / "deaths")],
        "stop_grace_s": 5.0,
    }
    watchdog = {"backoff_first_s": 0.05, "backoff_longest_s": 0.1, **watchdog}
    return make_job(folder, samples=SAMPLES, engine=engine, watchdog=watchdog, pipeline=pipeline or {})


def arm(job: TinyJob, kind: str, match: str) -> bool:
    """Arms a fault in the job's server; False while it does not listen."""
    body = json.dumps({"kind": kind, "count": 1, "match": match, "value": None}).encode()
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault"
    request = urllib.request.Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def armed_before_the_first_request(job: TinyJob, running: HsxProcess, *faults: tuple[str, str]) -> None:
    """Halts hsx while its first server starts, until the faults (kind, part of the marker) are armed in it.

    The record is written before the server loads anything, so hsx cannot have asked for anything by then.
    """
    wait_until(lambda: any(job.loaded.dump_dir.glob(f"*/{RECORD_NAME}")), "a server's record")
    running.send(signal.SIGSTOP)
    for kind, match in faults:
        wait_until(partial(arm, job, kind, match), f"a server that takes {kind}")
    running.send(signal.SIGCONT)


def voided(job: TinyJob) -> list[str | None]:
    """Why each epoch so far was voided, the oldest first; None for the one that was not, which a drain ends."""
    with job.ledger() as ledger:
        return [row.reason for row in ledger.epochs()]


def complete(job: TinyJob) -> None:
    """Every sample is committed, and right."""
    with job.ledger() as ledger:
        counts = ledger.counts()
    assert (counts.committed, counts.pending, counts.quarantined) == (SAMPLES, 0, 0)
    assert wrong_samples(job.loaded) == []


@pytest.fixture
def _no_server_left(tmp_path: Path) -> Iterator[None]:
    """After the test no process that was given its folder is alive."""
    yield
    assert [line for line in command_lines() if str(tmp_path) in line] == []


@pytest.mark.usefixtures("_no_server_left")
def test_a_server_that_mixes_up_prompts_is_restarted(tmp_path: Path) -> None:
    job = spawned(tmp_path, {"violations": 2, "violation_window_s": 600.0}, pipeline={"retries": 5})
    with hsx_running(job.loaded.path, "run", "--json") as running:
        armed_before_the_first_request(job, running, ("wrong_ids", "-3-1-"), ("dump_of_another_sample", "-4-1-"))
        assert running.wait() == ExitCode.DONE, running.error()
    complete(job)
    assert voided(job) == ["tokens_equal", None]
    assert json.loads(running.out.read_text())["restarts"] == 1


@pytest.mark.usefixtures("_no_server_left")
def test_violations_below_the_limit_cost_no_restart(tmp_path: Path) -> None:
    job = spawned(tmp_path, {"violations": 3, "violation_window_s": 600.0}, pipeline={"retries": 5})
    with hsx_running(job.loaded.path, "run", "--json") as running:
        armed_before_the_first_request(job, running, ("wrong_ids", "-3-1-"), ("dump_of_another_sample", "-4-1-"))
        assert running.wait() == ExitCode.DONE, running.error()
    complete(job)
    assert voided(job) == [None]
    assert json.loads(running.out.read_text())["violations"] == {"tokens_equal": 2}


@pytest.mark.usefixtures("_no_server_left")
def test_a_spent_restart_budget_ends_the_job_and_loses_nothing(tmp_path: Path) -> None:
    job = spawned(tmp_path, {"restart_budget": 2}, pipeline={"concurrency": 1, "commit_seconds": 0.01})
    deaths = tmp_path / "deaths"
    with hsx_running(job.loaded.path, "run") as running:
        armed_before_the_first_request(job, running, ("die", "-7-1-"))
        deaths.write_text("100")
        assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
    assert running.error().startswith("[restart_budget]")
    assert "watchdog.restart_budget" in running.error()
    assert 100 - int(deaths.read_text()) == 2, "the budget is restarts, the first start not among them"
    with job.ledger() as ledger:
        before = {row.index: row.marker for row in ledger.committed()}
        assert ledger.failures_by_reason() == {}
    # One at a time, in order; what was asked for before 7 is committed, unless the death came before it was validated.
    assert 0 in before
    assert before.keys() <= set(range(7))

    deaths.write_text("0")
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    complete(job)
    with job.ledger() as ledger:
        assert before.items() <= {row.index: row.marker for row in ledger.committed()}.items()


@pytest.mark.usefixtures("_no_server_left")
def test_a_server_that_dies_at_every_prompt_spends_the_budget_too(tmp_path: Path) -> None:
    job = spawned(tmp_path, {"restart_budget": 0})
    with hsx_running(job.loaded.path, "run") as running:
        armed_before_the_first_request(job, running, ("die", "-0-1-"))
        assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
    assert running.error().startswith("[restart_budget]")
    assert "alive" in running.error()
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    complete(job)
    assert voided(job) == ["alive", None]
