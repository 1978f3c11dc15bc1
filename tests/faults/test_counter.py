"""The server's counter: what it says about the server is believed, and what it says about pairs is not."""

from __future__ import annotations

import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, hsx_done, hsx_running, log_lines, wait_until
from hsx.testing.fault_matrix import run_logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

RESTARTED = ("engine.restarted", "invariant.violated")


@pytest.mark.slow
def test_a_counter_that_begins_again_ends_the_epoch(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    job = spawned({"kind": "sequence_reset", "match": "-7-1-"})
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    seen("counter_reset", job.loaded, log=log_lines(done.log), restarts=1, events=RESTARTED)
    with job.ledger() as ledger:
        assert [row.reason for row in ledger.epochs()] == ["sequence", None]
        assert ledger.failures_by_reason() == {}


async def test_a_gap_is_counted_and_costs_no_sample(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    await server.fault("sequence_gap", match="-3-1-")
    outcome, log = await run_logged(job)
    seen("counter_gap", job.loaded, log=log, events=("invariant.violated",))
    assert outcome.violations == {"sequence": 1}
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


@pytest.mark.slow
def test_too_many_gaps_end_the_epoch(spawned: Callable[..., TinyJob], seen: Callable[..., Result]) -> None:
    """The server holds a later prompt, so that there is time to look before the job is done; and the next one holds nothing.

    That prompt may come to the next server for the first time, where the look was early.
    """
    gap, hold = {"kind": "sequence_gap", "match": "-3-1-"}, {"kind": "hold", "count": -1, "match": "-11-1-"}
    job = spawned(gap, hold, watchdog={"violations": 1})
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault?kind=hold"

    def ended() -> bool:
        with suppress(OSError):  # it is not up yet, or not any more
            urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=PATIENCE_S).close()
        return running.process.poll() is not None

    with hsx_running(job.loaded.path, "run") as running:
        running.wait_for("engine.restarted")  # so the first server is gone
        wait_until(ended, "the end of the run")
    assert running.process.returncode == ExitCode.DONE, running.error()
    seen("counter_gaps", job.loaded, log=log_lines(running.log), restarts=1, events=RESTARTED)
    with job.ledger() as ledger:
        assert [row.reason for row in ledger.epochs()] == ["sequence", None]
