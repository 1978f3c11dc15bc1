"""A fault that no single sample shows: canaries find it, and what they do not vouch for is taken back."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_running, log_lines, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result
    from hsx.testing.tiny_job import TinyJob

pytestmark = pytest.mark.slow

SAMPLES, HELD = 60, 30


def ask(job: TinyJob, method: str, body: dict[str, Any] | None = None, query: str = "") -> dict[str, int]:
    """Arms, disarms or lists faults of the job's present server; returns how often each has struck."""
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault{query}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
    except OSError:
        return {}
    return dict(json.loads(text)["struck"]) if text else {}


def test_states_that_shift_from_some_moment_on(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    """From sample 30 on, every dump of the first server has right ids and states that are one token late."""
    job = spawned(
        {"kind": "hold", "count": -1, "match": f"-{HELD}-1-"},
        samples=SAMPLES,
        pipeline={"concurrency": 2},
        watchdog={"canary_every": 10, "grace_s": 600.0},
    )
    with hsx_running(job.loaded.path, "run", "--json") as running:
        wait_until(lambda: bool(ask(job, "GET").get("hold")), "a prompt that is held")
        ask(job, "POST", {"kind": "shifted_states", "count": -1})
        ask(job, "DELETE", query="?kind=hold")
        assert running.wait() == ExitCode.DONE, running.error()
    log = log_lines(running.log)
    seen("states_shifted", job.loaded, log=log, restarts=1, events=("canary.passed", "samples.revoked", "engine.restarted"))
    (revoked,) = running.events("samples.revoked")
    assert revoked["invariant"] in {"fingerprint", "twins"}
    assert revoked["count"] > 0
    with job.ledger() as ledger:
        assert [row.reason for row in ledger.epochs()] == [revoked["invariant"], None]
        assert ledger.failures_by_reason() == {}
        attempts = {row.index: ledger.sample(row.index).attempts for row in ledger.committed()}
        # What the last sound canary vouches for was not taken back.
        assert [index for index, count in attempts.items() if count == 1 and index < HELD - 12] != []
