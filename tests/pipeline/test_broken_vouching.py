"""What stands in the way of vouching for a server that is gone must not stand in the way of the job."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples
from hsx.vouching import TRIES_AGAIN

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.records import CommittedRow

SAMPLES = 12


async def left_by_a_dead_server(job: TinyJob) -> list[CommittedRow]:
    """Runs the job until its server dies with all samples but one committed; they are returned, the last captured last."""
    async with job.server() as server:
        await server.fault("hold", count=-1, match=f"-{SAMPLES - 1}-1-")
        running = asyncio.create_task(job.run())
        while "hold" not in await server.struck():  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.05)
        while committed(job) < SAMPLES - 1:  # noqa: ASYNC110 - nor has the ledger
            await asyncio.sleep(0.05)
        server.kill()
        with pytest.raises(RunError) as caught:
            await running
        assert caught.value.kind == "restart_budget"
    with job.ledger() as ledger:
        return sorted(ledger.committed(), key=lambda row: row.sequence)


def committed(job: TinyJob) -> int:
    """How many samples are committed."""
    with job.ledger() as ledger:
        return ledger.counts().committed


@pytest.mark.slow
async def test_a_sample_that_kills_each_server_that_is_asked_for_it_again_is_pending_in_the_end(tmp_path: Path) -> None:
    job = make_job(tmp_path, SAMPLES, watchdog={"restart_budget": 0}, pipeline={"concurrency": 1})
    rows = await left_by_a_dead_server(job)
    last = rows[-1]
    for _ in range(TRIES_AGAIN):
        assert committed(job) == SAMPLES - 1
        async with job.server() as server:
            await server.fault("die", count=-1, match=f"-1-{last.tokens}")
            with pytest.raises(RunError, match=f"sample {last.index}, extracted again to vouch for epoch") as caught:
                await job.run()
            assert caught.value.kind == "restart_budget"
    with job.ledger() as ledger:
        (revoked,) = ledger.revocations()
    assert revoked.invariant == "canary"
    assert last.index in revoked.samples
    async with job.server():
        assert (await job.run()).committed == SAMPLES
    assert wrong_samples(job.loaded) == []


@pytest.mark.slow
async def test_a_sample_on_a_root_that_is_away_vouches_for_nothing_and_stops_nothing(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        SAMPLES,
        watchdog={"restart_budget": 0},
        pipeline={"concurrency": 1},
        storage={"on_missing_root": "go_on"},
    )
    last = (await left_by_a_dead_server(job))[-1]
    (away,) = [root.path for root in job.loaded.roots if root.name == last.root]
    away.rename(away.with_name("away"))
    async with job.server():
        assert (await job.run()).committed == SAMPLES
    with job.ledger() as ledger:
        first, second = ledger.epochs()
    assert first.vouched < last.sequence
    assert second.vouched > 0
