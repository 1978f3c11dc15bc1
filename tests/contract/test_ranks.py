"""Data-parallel ranks: each numbers its dumps by itself, is asked for canaries of its own, and is missed by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import epoch_of, report_name, state_from_json, state_name, stream_name
from hsx.errors import RunError
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

RANKS = 2


@pytest.fixture
def parallel(tmp_path: Path) -> Iterator[RunningServer]:
    with running_reference(tmp_path / "dumps", args=["--dp-size", str(RANKS)]) as server:
        yield server


@pytest.fixture
def job(tmp_path: Path, parallel: RunningServer) -> TinyJob:
    return make_job(tmp_path, server=parallel)


async def test_a_run_vouches_for_every_rank(job: TinyJob, parallel: RunningServer) -> None:
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined, outcome.violations) == (12, 0, {})
    epoch = parallel.record.epoch
    with job.ledger() as ledger:
        rows = [(row.epoch, row.sequence) for row in ledger.committed()]
        assert [life.epoch for life in ledger.epochs()] == [epoch]
    assert {stream for stream, _ in rows} == {stream_name(epoch, rank) for rank in range(RANKS)}
    assert len(set(rows)) == len(rows)
    assert {epoch_of(stream) for stream, _ in rows} == {epoch}
    states = [state_from_json((parallel.folder / state_name(rank)).read_text()) for rank in range(RANKS)]
    assert [state.rank for state in states] == [0, 1]
    assert sum(state.published for state in states) >= len(rows) + 2 * 2 * RANKS  # twins at boot and at the end, on each
    assert wrong_samples(job.loaded) == []


async def test_a_rank_that_is_not_here_is_missed_by_name(job: TinyJob, parallel: RunningServer) -> None:
    (parallel.folder / state_name(1)).unlink()
    with pytest.raises(RunError, match=r"ranks \[1\] are not in this dump directory.*another node") as caught:
        await job.run()
    assert caught.value.kind == "capture_off"


async def test_a_rank_that_captures_something_else_is_told(job: TinyJob, parallel: RunningServer) -> None:
    path = parallel.folder / report_name(1)
    path.write_text(path.read_text().replace('"norm_eps": ', '"norm_eps": 1'))
    with pytest.raises(RunError, match="DP rank 1 reports") as caught:
        await job.run()
    assert caught.value.kind == "capture_off"


async def test_a_fault_of_one_rank_fails_the_canary(job: TinyJob, parallel: RunningServer) -> None:
    """Both ranks are asked: what only the second one does wrong is seen."""
    await parallel.fault("shifted_states", count=-1, match="-c3-")
    await parallel.fault("shifted_states", count=-1, match="-c4-")
    with pytest.raises(RunError, match="was voided for twins"):
        await job.run()
    with job.ledger() as ledger:
        (life,) = ledger.epochs()
    assert life.evidence is not None
    assert life.evidence.startswith("DP rank 1: state 0 of two prompts with a shared prefix")
