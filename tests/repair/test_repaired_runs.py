"""Repaired and rebuilt jobs are gone on with by real runs, on the reference engine."""

from __future__ import annotations

import asyncio
import shutil
from typing import TYPE_CHECKING

import pytest

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.locks import at_rest
from hsx.rebuild import rebuild
from hsx.repair import repair
from hsx.stores.group import open_store
from hsx.stores.ledger_backup import BACKUP_NAME
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 8


def shards(job: TinyJob) -> list[Path]:
    """The shard of each committed sample."""
    store = open_store(job.loaded.store)
    with job.ledger() as ledger:
        return [store.folder(row.root) / shard_key(row.index) for row in ledger.committed()]


def is_whole(job: TinyJob) -> bool:
    with job.ledger() as ledger:
        report = verify(job.loaded.store, ledger)
    return report.ok and report.uncommitted == 0 and report.committed == SAMPLES and wrong_samples(job.loaded) == []


async def test_damage_is_repaired_by_the_next_run(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples=SAMPLES)
    async with job.server():
        assert (await job.run()).committed == SAMPLES
        places = shards(job)
        places[0].unlink()
        shutil.copyfile(places[3], places[2])
        with at_rest(job.loaded):
            assert (await asyncio.to_thread(repair, job.loaded)).requeued == 2
        outcome = await job.run()
    assert (outcome.committed, outcome.violations) == (SAMPLES, {})
    assert is_whole(job)


async def test_a_rebuilt_job_needs_another_server_and_then_goes_on(tmp_path: Path) -> None:
    job = make_job(tmp_path, samples=SAMPLES)
    async with job.server():
        assert (await job.run()).committed == SAMPLES
        shards(job)[5].unlink()
        shutil.rmtree(job.loaded.state_dir)
        store = open_store(job.loaded.store)
        for name in store.roots:
            (store.folder(name) / BACKUP_NAME).unlink(missing_ok=True)
        with at_rest(job.loaded):
            report = await asyncio.to_thread(rebuild, job.loaded)
        assert (report.committed, report.pending) == (SAMPLES - 1, 1)
        with pytest.raises(RunError) as caught:
            await job.run()
        assert caught.value.kind == "epoch_void"
    async with job.server():
        outcome = await job.run()
    assert (outcome.committed, outcome.revoked, outcome.violations) == (SAMPLES, 0, {})
    assert is_whole(job)
    with job.ledger() as ledger:
        assert all(epoch.vouched > 0 for epoch in ledger.epochs())
