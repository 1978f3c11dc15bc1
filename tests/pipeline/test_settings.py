"""Keys of the job file, each seen to do in a run what its text says."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_done
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.testing.servers import RunningServer

SAMPLES = 12


def attempts(job: TinyJob) -> list[int]:
    """Attempts of each sample."""
    with job.ledger() as ledger:
        return [ledger.sample(index).attempts for index in range(SAMPLES)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allowed", "code"), [(0.0, ExitCode.INCOMPLETE), (0.05, ExitCode.INCOMPLETE), (1 / SAMPLES, ExitCode.DONE)]
)
async def test_allow_quarantined_decides_the_exit_code(
    tmp_path: Path, server: RunningServer, allowed: float, code: ExitCode
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline={"allow_quarantined": allowed, "retries": 0})
    await server.fault("nan_row", count=-1, match="-3-")
    done = hsx_done(job.loaded.path, "run", "--json")
    outcome = json.loads(done.out.read_text())
    assert (done.process.returncode, outcome["exit_code"]) == (code, code)
    assert (outcome["committed"], outcome["quarantined"]) == (SAMPLES - 1, 1)
    assert ("[incomplete]" in done.error()) == (code is ExitCode.INCOMPLETE)
    assert wrong_samples(job.loaded) == []
    # Nothing is pending, so the same command says the same again without a server.
    again = hsx_done(job.loaded.path, "run", "--json")
    assert again.process.returncode == code
    assert attempts(job) == [1] * SAMPLES


@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_retries_are_failures_forgiven(tmp_path: Path, server: RunningServer, retries: int) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline={"retries": retries})
    await server.fault("wrong_ids", count=-1, match="-3-")
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined) == (SAMPLES - 1, 1)
    assert attempts(job)[3] == retries + 1
    with job.ledger() as ledger:
        assert ledger.sample(3).failures == retries + 1


@pytest.mark.parametrize("threads", [1, 4])
async def test_writer_threads(tmp_path: Path, server: RunningServer, threads: int) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline={"writer_threads": threads})
    outcome = await job.run()
    assert outcome.committed == SAMPLES
    assert wrong_samples(job.loaded) == []


@pytest.mark.parametrize("tokens", [1, 40])
async def test_a_prompt_larger_than_the_token_budget_runs_alone(tmp_path: Path, server: RunningServer, tokens: int) -> None:
    job = make_job(tmp_path, samples=SAMPLES, longest=90, server=server, pipeline={"max_tokens_in_flight": tokens})
    outcome = await job.run()
    assert outcome.committed == SAMPLES
    assert attempts(job) == [1] * SAMPLES
    assert wrong_samples(job.loaded) == []
    with job.ledger() as ledger:
        rows = list(ledger.committed())
    assert max(row.tokens for row in rows) > tokens
    if tokens == 1:
        # Alone, and started in order: the server's own counter gives the order in which it finished them.
        assert [row.index for row in sorted(rows, key=lambda row: row.sequence)] == list(range(SAMPLES))


async def test_start_rate_holds_requests_back(tmp_path: Path, server: RunningServer) -> None:
    rate = 6.0
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline={"start_rate": rate})
    began = time.monotonic()
    outcome = await job.run()
    # A slow machine can only make it longer: the last of 12 starts at the earliest one second after the first.
    assert time.monotonic() - began >= (SAMPLES - rate) / rate
    assert outcome.committed == SAMPLES


@pytest.mark.parametrize("rate", [0.5, 1.5])
async def test_a_start_rate_that_is_no_integer(tmp_path: Path, server: RunningServer, rate: float) -> None:
    samples = 4
    job = make_job(tmp_path, samples=samples, server=server, pipeline={"start_rate": rate})
    began = time.monotonic()
    outcome = await job.run()
    assert time.monotonic() - began >= (samples - 1 - rate) / rate, "more requests were started than the rate allows"
    assert outcome.committed == samples


async def test_a_group_is_committed_at_its_size(tmp_path: Path, server: RunningServer) -> None:
    # Only the size can end a group here: waiting for the time would outlast the test.
    job = make_job(
        tmp_path, samples=SAMPLES, server=server, pipeline={"commit_samples": 4, "commit_seconds": 3600.0, "concurrency": 4}
    )
    outcome = await job.run()
    assert outcome.committed == SAMPLES
    assert wrong_samples(job.loaded) == []
