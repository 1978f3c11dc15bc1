"""A fault that no single sample shows: canaries find it, and what they do not vouch for is taken back."""

from __future__ import annotations

import itertools
import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, hsx_running, log_lines, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result
    from hsx.testing.tiny_job import TinyJob

pytestmark = pytest.mark.slow

SAMPLES, HELD = 60, (30, 35, 40, 45, 50)
EVERY = 10
"""Samples between two canaries."""


def ask(job: TinyJob, method: str, body: dict[str, Any] | None = None, query: str = "") -> dict[str, int]:
    """Arms, disarms or lists faults of the job's present server; returns how often each has struck."""
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault{query}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
    except OSError:
        return {}
    return dict(json.loads(text)["struck"]) if text else {}


def hold(sample: int) -> dict[str, Any]:
    """The fault that holds the first attempt of a sample."""
    return {"kind": "hold", "count": -1, "match": f"-{sample}-1-"}


def wait_for_holds(job: TinyJob, count: int) -> None:
    """Returns once the server has come to the `count`-th prompt that it holds."""
    wait_until(lambda: ask(job, "GET").get("hold") == count, f"{count} prompts that were held")


def test_states_that_shift_from_some_moment_on(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    """From sample 30 on, every dump of the first server has right ids and states that are one token late.

    On a busy machine the first canary after ten samples may come behind sample 30; then it begins with a later one.
    """
    job = spawned(
        hold(HELD[0]),
        samples=SAMPLES,
        pipeline={"concurrency": 2},
        watchdog={"canary_every": EVERY, "grace_s": 600.0},
    )
    with hsx_running(job.loaded.path, "run", "--json") as running:
        for count, (held, later) in enumerate(itertools.pairwise(HELD), 1):
            wait_for_holds(job, count)
            if len(running.events("canary.passed")) > 1:  # the one at boot, and another
                break
            ask(job, "POST", hold(later))
            ask(job, "DELETE", query=f"?kind=hold&match=-{held}-1-")
        ask(job, "POST", {"kind": "shifted_states", "count": -1})
        ask(job, "DELETE", query="?kind=hold")
        assert running.wait() == ExitCode.DONE, running.error()
    log = log_lines(running.log)
    seen("states_shifted", job.loaded, log=log, restarts=1, events=("canary.passed", "samples.revoked", "engine.restarted"))
    (revoked,) = running.events("samples.revoked")
    assert revoked["invariant"] in {"fingerprint", "twins"}
    assert revoked["count"] > 0
    with job.ledger() as ledger:
        first, second = ledger.epochs()
        assert (first.reason, second.reason) == (revoked["invariant"], None)
        assert ledger.failures_by_reason() == {}
        # What the last sound canary vouches for was not taken back.
        assert sum(row.epoch == first.epoch for row in ledger.committed()) >= EVERY
