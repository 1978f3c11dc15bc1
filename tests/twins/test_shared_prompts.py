"""Whole runs over a dataset that has prompts more than once: each is prefilled once, and stored for each sample that has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zarr

from hsx.core.layout import shard_key
from hsx.stores.reader import Store
from hsx.stores.shard_reader import read_record
from hsx.testing.truth import wrong_samples
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.tiny_job import TinyJob

TWINS = {0: [2, 5], 1: [4], 7: [8]}


def attempts(job: TinyJob) -> list[int]:
    with job.ledger() as ledger:
        return [ledger.sample(index).attempts for index in range(10)]


def inodes(job: TinyJob) -> dict[int, int]:
    """The file that each sample's link leads to."""
    store = Store(job.loaded.store)
    return {int(index): store.shard_path(int(index)).stat().st_ino for index in store.committed}


async def test_a_prompt_is_prefilled_once_and_stored_for_each_sample(twin_job: TinyJob) -> None:
    outcome = await twin_job.run()
    assert (outcome.committed, outcome.pending, outcome.shared, outcome.violations) == (10, 0, 4, {})
    assert wrong_samples(twin_job.loaded) == []
    assert attempts(twin_job) == [1, 1, 0, 1, 0, 0, 1, 1, 0, 1]
    files = inodes(twin_job)
    assert len(set(files.values())) == 6
    for first, others in TWINS.items():
        assert {files[other] for other in others} == {files[first]}
    with twin_job.ledger() as ledger:
        counts = ledger.counts()
        rows = {row.index: row for row in ledger.committed()}
        assert {first: ledger.twins(first) for first in TWINS} == TWINS
        assert ledger.twins(3) == []
    lengths = Store(twin_job.loaded.store).lengths
    assert {index: row.captured_as for index, row in rows.items() if row.captured_as != index} == {
        other: first for first, others in TWINS.items() for other in others
    }
    shared = [other for others in TWINS.values() for other in others]
    assert (counts.shared, counts.tokens_shared) == (4, int(lengths[shared].sum()))
    assert counts.bytes_shared == sum(rows[index].nbytes for index in shared)
    assert counts.bytes_committed == sum(row.own_bytes for row in rows.values())
    assert outcome.tokens == int(lengths.sum()) - counts.tokens_shared


async def test_the_proof_is_by_ids_and_loss_masks_stay_each_samples_own(twin_job: TinyJob) -> None:
    await twin_job.run()
    store = Store(twin_job.loaded.store)
    for first, others in TWINS.items():
        for other in others:
            assert read_record(store.shard_path(other), store.info.layout).index == first
            assert np.array_equal(store.input_ids_numpy(other), store.input_ids_numpy(first))
            assert np.array_equal(store[other].hidden_states_numpy, store[first].hidden_states_numpy)
            if (other - first) % 2:
                assert not np.array_equal(store.loss_mask_numpy(other), store.loss_mask_numpy(first))
    with twin_job.ledger() as ledger:
        report = verify(store.path, ledger)
    assert (report.ok, report.read, report.uncommitted) == (True, 10, 0)


async def test_zarr_reads_a_twin_as_any_other_sample(twin_job: TinyJob) -> None:
    await twin_job.run()
    store = Store(twin_job.loaded.store)
    array = zarr.open_group(str(store.path), mode="r")["hidden_states"]
    assert isinstance(array, zarr.Array)
    for index in (0, 5, 8):
        tokens = store.tokens(index)
        found = np.asarray(array[index, :tokens]).view(np.uint16)
        assert np.array_equal(found, store.hidden_states_numpy(index))


async def test_a_job_may_extract_each_sample_by_itself(twin_job_of: Callable[..., TinyJob]) -> None:
    job = twin_job_of(dataset={"identical": "extract"})
    outcome = await job.run()
    assert (outcome.committed, outcome.shared) == (10, 0)
    assert attempts(job) == [1] * 10
    assert len(set(inodes(job).values())) == 10
    assert wrong_samples(job.loaded) == []


async def test_a_shard_copied_under_a_twins_name_is_told_where_nothing_is_shared(twin_job_of: Callable[..., TinyJob]) -> None:
    job = twin_job_of(dataset={"identical": "extract"})
    await job.run()
    store = Store(job.loaded.store)
    with job.ledger() as ledger:
        rows = {row.index: row for row in ledger.committed()}
    path = store.info.folder(rows[2].root) / shard_key(2)
    path.write_bytes(store.shard_path(0).read_bytes())
    with job.ledger() as ledger:
        report = verify(store.path, ledger)
    assert [(damage.index, damage.kind) for damage in report.damage] == [(2, "record")]


async def test_another_samples_shard_is_told_also_under_a_twins_name(twin_job: TinyJob) -> None:
    """Sample 6 has as many tokens as 0 has not; 9 is no twin of anybody."""
    await twin_job.run()
    store = Store(twin_job.loaded.store)
    twin, foreign = store.shard_path(8), store.shard_path(9)
    data = foreign.read_bytes()
    twin.unlink()
    twin.write_bytes(data)
    with twin_job.ledger() as ledger:
        report = verify(store.path, ledger)
    assert {damage.index for damage in report.damage} == {8}
    assert "record" in {damage.kind for damage in report.damage}
