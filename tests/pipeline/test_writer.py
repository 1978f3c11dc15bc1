"""The writer over real roots, a real ledger and a real view, with disks that break between write and commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.testing.stores import payload, random_states
from hsx.testing.writer_bench import TOKENS, WriterBench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hsx.core.sample import Lease
    from hsx.records import Receipt


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[WriterBench]:
    """A bench whose committer runs, and ends with the test."""
    bench = WriterBench(tmp_path)
    committing = asyncio.create_task(bench.writer.run())
    yield bench
    await bench.writer.close()
    await asyncio.wait([committing])
    await bench.close()
    assert committing.exception() is None or isinstance(committing.exception(), RunError)


async def both_written(bench: WriterBench) -> tuple[list[Lease], list[Receipt]]:
    """Two samples, the first on root a, the second on root b."""
    leases = await bench.ledger.acquire(2)
    receipts = [await bench.write(lease, root) for lease, root in zip(leases, "ab", strict=True)]
    assert [receipt.root for receipt in receipts] == ["a", "b"]
    return leases, receipts


async def test_a_root_that_cannot_be_synced_costs_only_its_own_samples(bench: WriterBench) -> None:
    leases, receipts = await both_written(bench)
    bench.roots["a"].failing = {"sync"}
    assert await asyncio.gather(*map(bench.commit, leases, receipts)) == [False, True]
    again = await bench.write(leases[0])
    assert again.root == "b"
    assert await bench.commit(leases[0], again)
    assert sorted(bench.ledger.committed_roots()) == [(0, "b"), (1, "b")]
    assert bench.view.indices().tolist() == [0, 1]
    (error,) = bench.telemetry.snapshot()["last_errors"]
    assert (error["kind"], "sync failed" in error["message"]) == ("root_unusable", True)


async def test_when_no_root_can_be_synced_nothing_is_committed_and_the_next_write_says_so(bench: WriterBench) -> None:
    leases, receipts = await both_written(bench)
    for root in bench.roots.values():
        root.failing = {"sync"}
    assert await asyncio.gather(*map(bench.commit, leases, receipts)) == [False, False]
    assert (await bench.ledger.counts()).committed == 0
    with pytest.raises(RunError, match="sync failed") as caught:
        await bench.write(leases[0])
    assert caught.value.kind == "root_unusable"


async def test_a_root_that_fails_to_write_leaves_the_sample_to_another(bench: WriterBench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    bench.roots["a"].failing = {"write"}
    receipt = await bench.write(lease, "a")
    assert receipt.root == "b"
    assert await bench.commit(lease, receipt)


async def test_a_root_that_fails_to_discard_undoes_no_commit(bench: WriterBench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    receipt = await bench.write(lease)
    other = "b" if receipt.root == "a" else "a"
    bench.roots[other].failing = {"discard"}
    assert await bench.commit(lease, receipt)
    assert bench.view.indices().tolist() == [0]
    assert bench.telemetry.snapshot()["last_errors"][0]["kind"] == "root_unusable"


async def test_a_copy_left_on_another_root_goes_when_the_sample_is_committed(bench: WriterBench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    bench.roots["b"].write(payload(bench.marker(lease), random_states(bench.rng, TOKENS, 2, 8)))
    bench.roots["b"].crowded = 1 << 60
    receipt = await bench.write(lease)
    assert receipt.root == "a"
    assert await bench.commit(lease, receipt)
    assert len(list(bench.folder.glob("?/*/c.0.0.0.0"))) == 1


async def test_a_commit_under_way_ends_whole_when_the_run_is_cancelled(tmp_path: Path) -> None:
    bench = WriterBench(tmp_path)
    (lease,) = await bench.ledger.acquire(1)
    receipt = await bench.write(lease)
    committing = asyncio.create_task(bench.writer.run())
    waiting = asyncio.create_task(bench.commit(lease, receipt))
    while not await committed(bench):  # noqa: ASYNC110 - the event is a transaction in the ledger's thread
        await asyncio.sleep(0)
    committing.cancel()
    waiting.cancel()
    await asyncio.wait([committing, waiting])
    assert bench.view.indices().tolist() == [0], "committed, and so it is shown"
    await bench.close()


async def committed(bench: WriterBench) -> int:
    """Samples that the ledger holds as committed now."""
    return (await bench.ledger.counts()).committed
