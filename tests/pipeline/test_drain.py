"""Signals: the first drains, the second forces; either way the same command continues the job."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import HsxProcess, hsx_done, hsx_running
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 60
CONCURRENCY = 4
FIRST = "-0-1-"
"""Part of the marker of sample 0's first attempt, and of no canary's."""


def attempts_of_committed(job: TinyJob) -> dict[int, int]:
    """Attempts of each committed sample, by index."""
    with job.ledger() as ledger:
        return {row.index: ledger.sample(row.index).attempts for row in ledger.committed()}


async def wait_for_hold(server: RunningServer, running: HsxProcess, before: int) -> None:
    """Returns once the server holds a prompt, and with it everything else that it was given."""
    while (await server.struck()).get("hold", 0) == before:
        assert running.process.poll() is None, running.log.read_text()
        await asyncio.sleep(0.01)


def finish(job: TinyJob) -> None:
    """Continues the job to its end, and compares with the truth."""
    before = attempts_of_committed(job)
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    after = attempts_of_committed(job)
    assert sorted(after) == list(range(SAMPLES))
    assert before.items() <= after.items(), "a committed sample was asked for again"
    assert wrong_samples(job.loaded) == []
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_one_signal_lets_everything_under_way_be_committed(
    tmp_path: Path, server: RunningServer, number: signal.Signals
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, longest=40, server=server, pipeline={"concurrency": CONCURRENCY})
    held = (await server.struck()).get("hold", 0)
    await server.fault("hold", count=-1, match=FIRST)
    with hsx_running(job.loaded.path, "run") as running:
        await wait_for_hold(server, running, held)
        running.send(number)
        under_way = running.wait_for("run.draining")["attempts"]
        assert under_way >= 1
        assert 0 not in attempts_of_committed(job)
        assert running.process.poll() is None, "it did not wait for what is under way"
        await server.clear_faults()
        assert running.wait() == ExitCode.INTERRUPTED
    assert "[interrupted]" in running.error()
    committed = attempts_of_committed(job)
    assert 0 in committed
    # A few may have been done before the first one came to the server; none was begun after the signal.
    assert under_way <= len(committed) < SAMPLES
    assert wrong_samples(job.loaded) == []
    finish(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_a_second_signal_waits_for_nothing(tmp_path: Path, server: RunningServer, number: signal.Signals) -> None:
    job = make_job(tmp_path, samples=SAMPLES, longest=40, server=server, pipeline={"concurrency": CONCURRENCY})
    held = (await server.struck()).get("hold", 0)
    await server.fault("hold", count=-1, match=FIRST)
    with hsx_running(job.loaded.path, "run") as running:
        await wait_for_hold(server, running, held)
        running.send(number)
        running.wait_for("run.draining")
        running.send(number)
        # The server still holds every prompt: waiting for one would never end.
        assert running.wait() == ExitCode.INTERRUPTED
    assert "[interrupted]" in running.error()
    assert "Traceback" not in running.log.read_text()
    assert 0 not in attempts_of_committed(job)
    await server.clear_faults()
    finish(job)
