"""The writer and samples with identical prompts: disks that take no links, fail at them, or go before the commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.testing.writer_bench import SAMPLES, WriterBench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ALL = list(range(SAMPLES))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[WriterBench]:
    """A bench of one prompt, whose committer runs, and ends with the test."""
    bench = WriterBench(tmp_path, twins=True, group_samples=1)
    committing = asyncio.create_task(bench.writer.run())
    yield bench
    await bench.writer.close()
    await asyncio.wait([committing])
    await bench.close()
    assert committing.exception() is None or isinstance(committing.exception(), RunError)


def files(bench: WriterBench, root: str) -> set[int]:
    """Files behind the names of all samples on a root."""
    folder = bench.real["ab".index(root)].folder
    return {path.stat().st_ino for index in ALL if (path := folder / shard_key(index)).exists()}


async def test_all_are_committed_with_one(bench: WriterBench) -> None:
    (lease,) = await bench.ledger.acquire(9)
    assert await bench.commit(lease, await bench.write(lease, "a"))
    assert sorted(bench.ledger.committed_roots()) == [(index, "a") for index in ALL]
    assert bench.view.indices().tolist() == ALL
    assert (len(files(bench, "a")), files(bench, "b")) == (1, set())
    shared = bench.telemetry.snapshot()["progress"]["shared"]
    assert (shared["samples_by_run"], shared["tokens_by_run"]) == (5, 25)
    assert await bench.ledger.acquire(9) == []


async def test_a_root_without_hard_links_has_each_extracted(bench: WriterBench) -> None:
    bench.roots["a"].failing = {"link_refused"}
    for index in ALL:
        (lease,) = await bench.ledger.acquire(9)
        assert lease.sample.index == index
        assert await bench.commit(lease, await bench.write(lease, "a"))
    assert await bench.ledger.acquire(9) == []
    assert len(files(bench, "a")) == SAMPLES
    assert (await bench.ledger.counts()).shared == 0


async def test_a_root_that_fails_at_a_link_costs_no_sample(bench: WriterBench) -> None:
    """It is lost, as one that cannot be synced; the sample goes to another one, and its twins with it."""
    bench.roots["a"].failing = {"link"}
    (lease,) = await bench.ledger.acquire(9)
    assert not await bench.commit(lease, await bench.write(lease, "a"))
    assert (await bench.ledger.counts()).committed == 0
    assert await bench.ledger.acquire(9) == []
    again = await bench.write(lease)
    assert again.root == "b"
    assert await bench.commit(lease, again)
    assert sorted(bench.ledger.committed_roots()) == [(index, "b") for index in ALL]
    assert len(files(bench, "b")) == 1


async def test_a_root_lost_after_its_links_leaves_names_that_do_no_harm(bench: WriterBench) -> None:
    bench.roots["a"].failing = {"sync"}
    (lease,) = await bench.ledger.acquire(9)
    assert not await bench.commit(lease, await bench.write(lease, "a"))
    assert len(files(bench, "a")) == 1
    assert bench.view.indices().tolist() == []
    assert await bench.commit(lease, await bench.write(lease))
    assert sorted(bench.ledger.committed_roots()) == [(index, "b") for index in ALL]


async def test_what_is_revoked_is_hidden_and_discarded_under_all_names(bench: WriterBench) -> None:
    (lease,) = await bench.ledger.acquire(9)
    assert await bench.commit(lease, await bench.write(lease, "a"))
    rows = await bench.ledger.revoke("e", "fingerprint", "other states")
    assert [row.index for row in rows] == ALL
    await bench.writer.revoke(rows)
    assert (files(bench, "a"), bench.view.indices().tolist()) == (set(), [])
    (lease,) = await bench.ledger.acquire(9)
    assert await bench.commit(lease, await bench.write(lease, "b"))
    assert bench.view.indices().tolist() == ALL


async def test_a_twin_that_was_just_revoked_is_linked_once_its_old_shard_is_gone(bench: WriterBench) -> None:
    """Else the new name would be discarded in the place of the old one, and a committed sample with it."""
    bench.roots["a"].failing = {"link_refused"}
    for _ in range(2):
        (lease,) = await bench.ledger.acquire(9)
        assert await bench.commit(lease, await bench.write(lease, "a"))
    (lease,) = await bench.ledger.acquire(9)
    receipt = await bench.write(lease, "a")
    bench.roots["a"].failing = set()
    bench.roots["a"].discarding.clear()
    rows = await bench.ledger.revoke("e", "fingerprint", "other states")
    assert [row.index for row in rows] == [0, 1]
    revoking = asyncio.create_task(bench.writer.revoke(rows))
    committing = asyncio.create_task(bench.commit(lease, receipt))
    await asyncio.wait(
        [committing], timeout=0.5
    )  # time enough for one that does not wait; no time is too short for one that does
    bench.roots["a"].discarding.set()
    await revoking
    assert await committing
    assert sorted(bench.ledger.committed_roots()) == [(index, "a") for index in ALL]
    assert bench.view.indices().tolist() == ALL
    assert [index for index in ALL if (bench.real[0].folder / shard_key(index)).exists()] == ALL


async def test_a_name_that_is_taken_is_replaced(bench: WriterBench) -> None:
    """By a killed writer's shard, say: the sample is pending, so that is nobody's."""
    stray = bench.real[0].folder / shard_key(3)
    stray.write_bytes(b"stray")
    (lease,) = await bench.ledger.acquire(9)
    assert await bench.commit(lease, await bench.write(lease, "a"))
    assert len(files(bench, "a")) == 1
