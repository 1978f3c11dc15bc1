"""A spawned server that hangs, lies or dies is restarted within the budget; beyond it the job stops, and nothing is lost.

Servers that hang, or die at boot, are rows of the fault matrix, in tests/faults.
"""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, command_lines, hsx_done, hsx_running, wait_until
from hsx.testing.servers import free_port
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

SAMPLES = 12
MIXED_UP = ("wrong_ids", "-3-1-"), ("dump_of_another_sample", "-4-1-")


Faults = tuple[str, str]
"""A kind of fault, and part of the marker of the first attempt that it strikes."""


def spawned(
    folder: Path, watchdog: dict[str, Any], *faults: Faults, pipeline: dict[str, Any] | None = None, count: int = 1
) -> TinyJob:
    """A job that owns its server; each life of the server arms the faults, and dies at boot while `deaths` is above 0."""
    armed = [{"kind": kind, "count": count, "match": match} for kind, match in faults]
    engine = {
        "ownership": "spawn",
        "port": free_port(),
        "args": ["--allow-faults", "--die-at-boot", str(folder / "deaths")]
        + [word for fault in armed for word in ("--fault", json.dumps(fault))],
        "stop_grace_s": 5.0,
    }
    watchdog = {"backoff_first_s": 0.05, "backoff_longest_s": 0.1, **watchdog}
    return make_job(folder, samples=SAMPLES, engine=engine, watchdog=watchdog, pipeline=pipeline or {})


def faults_of(job: TinyJob, method: str, body: dict[str, Any] | None = None, query: str = "") -> dict[str, int]:
    """Arms, disarms or lists faults of the job's server; returns how often each has struck. Nothing while it is not up."""
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault{query}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
    except OSError:
        return {}
    return dict(json.loads(text)["struck"]) if text else {}


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
    job = spawned(tmp_path, {"violations": 2, "violation_window_s": 600.0}, *MIXED_UP, pipeline={"retries": 5})
    with hsx_running(job.loaded.path, "run", "--json") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    complete(job)
    assert voided(job) == ["tokens_equal", None]
    assert json.loads(running.out.read_text())["restarts"] == 1


@pytest.mark.usefixtures("_no_server_left")
def test_violations_below_the_limit_cost_no_restart(tmp_path: Path) -> None:
    job = spawned(tmp_path, {"violations": 3, "violation_window_s": 600.0}, *MIXED_UP, pipeline={"retries": 5})
    with hsx_running(job.loaded.path, "run", "--json") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    complete(job)
    assert voided(job) == [None]
    assert json.loads(running.out.read_text())["violations"] == {"tokens_equal": 2}


@pytest.mark.usefixtures("_no_server_left")
def test_a_spent_restart_budget_ends_the_job_and_loses_nothing(tmp_path: Path) -> None:
    one_by_one = {"concurrency": 1, "commit_seconds": 0.01}
    job = spawned(tmp_path, {"restart_budget": 2}, ("hold", "-6-1-"), pipeline=one_by_one, count=-1)
    deaths = tmp_path / "deaths"
    with hsx_running(job.loaded.path, "run") as running:
        wait_until(lambda: bool(faults_of(job, "GET").get("hold")), "a prompt that is held")
        deaths.write_text("100")
        faults_of(job, "POST", {"kind": "die", "count": 1, "match": "-7-1-"})
        faults_of(job, "DELETE", query="?kind=hold")
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
    job = spawned(tmp_path, {"restart_budget": 0}, ("die", "-0-1-"))
    with hsx_running(job.loaded.path, "run") as running:
        assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
    assert running.error().startswith("[restart_budget]")
    assert "alive" in running.error()
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    complete(job)
    assert voided(job) == ["alive", None]
