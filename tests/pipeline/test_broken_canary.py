"""Dumps of canaries that nobody waits for any more: each is accounted for, and none stays on the tmpfs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsx.core.marker import Marker
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.commands import PATIENCE_S
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer

SAMPLES = 12


@pytest.fixture
def job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job for the shared server."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, SAMPLES, server=server, **options)

    return make


def canaries_in(folder: Path, run: str) -> list[str]:
    """Dumps and error files of a run's canaries."""
    return sorted(path.name for path in folder.glob(f"hsx1-{run}-c*"))


async def test_the_dump_of_one_twin_is_no_gap_where_a_busy_server_refuses_the_other(
    job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = job_of(watchdog={"canary_every": 1})
    await server.fault("http_503", count=1, match="-c4-")
    outcome = await job.run()
    assert await server.struck() == {"http_503": 1}
    assert (outcome.committed, outcome.restarts) == (SAMPLES, 0)
    with job.ledger() as ledger:
        assert ledger.violations_by_invariant() == {}
        (epoch,) = ledger.epochs()
    assert epoch.vouched >= SAMPLES
    assert canaries_in(server.folder, job_run(job)) == []


async def test_what_canaries_of_a_killed_hsx_left_is_swept(job_of: Callable[..., TinyJob], server: RunningServer) -> None:
    job = job_of()
    await server.fault("http_400", match="-3-1-")
    assert (await job.run()).quarantined == 1
    left = Marker(job_run(job), 999, 1, 48, canary=True)
    client = server.client()
    try:
        await client.prefill(left, np.arange(48, dtype=np.int32), PATIENCE_S)
    finally:
        await client.close()
    assert canaries_in(server.folder, job_run(job)) != []
    ledger = SqliteLedger(job.loaded.state_dir / FILE_NAME)
    try:
        await ledger.requeue(None)
    finally:
        await ledger.close()
    assert (await job.run()).committed == SAMPLES
    assert canaries_in(server.folder, job_run(job)) == []
    with job.ledger() as reader:
        assert reader.violations_by_invariant() == {}
    assert wrong_samples(job.loaded) == []


def job_run(job: TinyJob) -> str:
    """The job's run id."""
    with job.ledger() as ledger:
        return ledger.run


async def test_a_first_canary_with_a_broken_row_costs_a_restart_and_not_the_run(
    job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = job_of()
    await server.fault("nan_row", count=1, match="-c2-")
    outcome = await job.run()
    assert (outcome.committed, outcome.restarts) == (SAMPLES, 1)
    with job.ledger() as ledger:
        assert [row.invariant for row in ledger.violations()] == ["finite"]
    assert wrong_samples(job.loaded) == []
