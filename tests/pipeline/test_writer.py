"""The writer over real roots, a real ledger and a real view, with disks that break between write and commit."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.clock import SystemClock
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.ports import Commit, Receipt, Row
from hsx.space import RootsSettings, Space
from hsx.stores.group import create_store
from hsx.stores.ledger import SqliteLedger, create, new_run
from hsx.stores.root import attach_roots
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.tokens import TokenTable
from hsx.stores.view import UnionView
from hsx.telemetry import Telemetry
from hsx.testing.roots import FailingRoot
from hsx.testing.stores import payload, random_states
from hsx.writer import Writer, WriterSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hsx.core.sample import Lease

SAMPLES, TOKENS = 6, 5


def indexed(group: Path) -> TokenTable:
    """The token index of `SAMPLES` prompts."""
    with TokenTableWriter(group) as writer:
        for index in range(SAMPLES):
            writer.add(Row(f"s{index}", np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, np.uint8), index + 1))
        writer.finish({}, {})
    return TokenTable(group)


class Bench:
    """A writer with all that it writes to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run = new_run()
        layout = StoreLayout(SAMPLES, TOKENS, 2, 8)
        places = {name: folder / name for name in ("a", "b")}
        for place in places.values():
            place.mkdir()
        info, roots = attach_roots(create_store(folder / "store", layout, CaptureSpec((1,), "post_norm"), {}, run), places)
        create(folder / "ledger.sqlite", run, {}, [TOKENS] * SAMPLES, [])
        self.layout = layout
        self.ledger = SqliteLedger(folder / "ledger.sqlite")
        self.view = UnionView(info)
        self.roots = {root.name: FailingRoot(root) for root in roots}
        self.telemetry = Telemetry()
        self.space = Space(list(self.roots.values()), RootsSettings(), SystemClock(), self.telemetry)
        self.writer = Writer(
            list(self.roots.values()),
            self.space,
            self.view,
            self.ledger,
            indexed(folder / "store"),
            self.telemetry,
            SystemClock(),
            WriterSettings(threads=1, group_samples=2, group_seconds=0.01),
        )
        self.rng = np.random.default_rng(1)

    async def write(self, lease: Lease) -> Receipt:
        """Writes one sample's shard, wherever it is taken."""
        states = random_states(self.rng, TOKENS, 2, 8)
        while True:
            booking = await self.space.book(self.layout.file_bytes(TOKENS))
            receipt = await self.writer.write(payload(self.marker(lease), states), booking)
            if receipt is not None:
                return receipt

    def marker(self, lease: Lease) -> Marker:
        """The marker of a lease."""
        return Marker(self.ledger.run, lease.sample.index, lease.attempt, TOKENS)

    async def commit(self, lease: Lease, receipt: Receipt) -> bool:
        """Commits one sample."""
        return await self.writer.commit(Commit(lease, self.marker(lease), "e", 1, receipt, {}, adopted=False))


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """A bench whose committer runs, and ends with the test."""
    bench = Bench(tmp_path)
    committing = asyncio.create_task(bench.writer.run())
    yield bench
    await bench.writer.close()
    await asyncio.wait([committing])
    bench.writer.shutdown()
    bench.space.shutdown()
    await bench.ledger.close()
    assert committing.exception() is None or isinstance(committing.exception(), RunError)


async def both_written(bench: Bench) -> tuple[list[Lease], list[Receipt]]:
    """Two samples, the first on root a, the second on root b: each time the other root is more crowded."""
    leases = await bench.ledger.acquire(2)
    receipts = []
    for lease, other in zip(leases, ("b", "a"), strict=True):
        bench.roots[other].crowded = 1 << 60
        receipts.append(await bench.write(lease))
        bench.roots[other].crowded = 0
    assert [receipt.root for receipt in receipts] == ["a", "b"]
    return leases, receipts


async def test_a_root_that_cannot_be_synced_costs_only_its_own_samples(bench: Bench) -> None:
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


async def test_when_no_root_can_be_synced_nothing_is_committed_and_the_next_write_says_so(bench: Bench) -> None:
    leases, receipts = await both_written(bench)
    for root in bench.roots.values():
        root.failing = {"sync"}
    assert await asyncio.gather(*map(bench.commit, leases, receipts)) == [False, False]
    assert (await bench.ledger.counts()).committed == 0
    with pytest.raises(RunError, match="sync failed") as caught:
        await bench.write(leases[0])
    assert caught.value.kind == "root_unusable"


async def test_a_root_that_fails_to_write_leaves_the_sample_to_another(bench: Bench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    bench.roots["b"].crowded = 1 << 60  # so that a is tried first
    bench.roots["a"].failing = {"write"}
    receipt = await bench.write(lease)
    assert receipt.root == "b"
    assert await bench.commit(lease, receipt)


async def test_a_root_that_fails_to_discard_undoes_no_commit(bench: Bench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    receipt = await bench.write(lease)
    other = "b" if receipt.root == "a" else "a"
    bench.roots[other].failing = {"discard"}
    assert await bench.commit(lease, receipt)
    assert bench.view.indices().tolist() == [0]
    assert bench.telemetry.snapshot()["last_errors"][0]["kind"] == "root_unusable"


async def test_a_copy_left_on_another_root_goes_when_the_sample_is_committed(bench: Bench) -> None:
    (lease,) = await bench.ledger.acquire(1)
    bench.roots["b"].write(payload(bench.marker(lease), random_states(bench.rng, TOKENS, 2, 8)))
    bench.roots["b"].crowded = 1 << 60
    receipt = await bench.write(lease)
    assert receipt.root == "a"
    assert await bench.commit(lease, receipt)
    assert len(list(bench.folder.glob("?/*/c.0.0.0.0"))) == 1


async def test_a_commit_under_way_ends_whole_when_the_run_is_cancelled(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
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
    bench.writer.shutdown()
    bench.space.shutdown()
    await bench.ledger.close()


async def committed(bench: Bench) -> int:
    """Samples that the ledger holds as committed now."""
    return (await bench.ledger.counts()).committed
