"""Samples that were committed and are revoked: hidden, discarded, extracted again; with lost roots, and over a crash."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.epoch import EpochRecord
from hsx.core.marker import Marker
from hsx.stores.attach import attach_roots
from hsx.stores.group import open_store
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.root import ShardRoot, discard_strays
from hsx.stores.view import UnionView, visible
from hsx.testing.stores import payload, random_states
from hsx.testing.truth import wrong_samples
from hsx.testing.writer_bench import WriterBench

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hsx.core.sample import Lease
    from hsx.testing.tiny_job import TinyJob

SAMPLES, EPOCH = 4, "e1"
RECORD = EpochRecord(EPOCH, "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)


class Bench(WriterBench):
    """Samples 0 and 2 are committed on root a, 1 and 3 on root b."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, samples=SAMPLES, group_samples=4)

    async def extract(self, lease: Lease, sequence: int, epoch: str = EPOCH, root: str = "") -> str:
        """Writes and commits one sample; returns its root."""
        receipt = await self.write(lease, root)
        assert await self.commit(lease, receipt, epoch=epoch, sequence=sequence)
        return receipt.root

    async def extract_all(self) -> None:
        """Commits every sample, on the roots by turns, under capture numbers from 1."""
        await self.ledger.epoch_began(RECORD)
        for lease in await self.ledger.acquire(SAMPLES):
            home = "ab"[lease.sample.index % 2]
            assert await self.extract(lease, lease.sample.index + 1, root=home) == home

    def shards(self) -> dict[str, list[int]]:
        """The samples whose shards lie on each root."""
        return {root.name: visible(root.folder).tolist() for root in self.real}

    async def start_again(self) -> tuple[list[ShardRoot], UnionView]:
        """What a start does with the store, in a process of its own for all it knows."""
        await self.ledger.close()
        self.ledger = SqliteLedger(self.folder / "ledger.sqlite")
        info, roots = attach_roots(open_store(self.folder / "store"), self.places)
        discard_strays(roots, self.ledger.committed_roots(), SAMPLES, self.ledger.revoked())
        view = UnionView(info)
        view.repair(self.ledger.committed_roots())
        return roots, view


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    committing = asyncio.create_task(bench.writer.run())
    await bench.extract_all()
    yield bench
    await bench.writer.close()
    await committing
    await bench.close()


async def test_what_no_canary_vouches_for_is_hidden_discarded_and_extracted_again(bench: Bench) -> None:
    await bench.ledger.vouch(EPOCH, 1)
    rows = await bench.ledger.revoke(EPOCH, "fingerprint", "other states")
    await bench.writer.revoke(rows)
    assert [row.index for row in rows] == [1, 2, 3]
    assert bench.view.indices().tolist() == [0]
    assert bench.shards() == {"a": [0], "b": []}
    for lease in await bench.ledger.acquire(9):
        assert lease.attempt == 2
        await bench.extract(lease, lease.sample.index, "e2")
    assert bench.view.indices().tolist() == [0, 1, 2, 3]
    shards = bench.shards()
    assert sorted([*shards["a"], *shards["b"]]) == [0, 1, 2, 3]


async def test_a_root_that_fails_is_lost_and_the_others_are_cleared(bench: Bench) -> None:
    bench.roots["a"].failing = {"discard"}
    await bench.writer.revoke(await bench.ledger.revoke(EPOCH, "twins", "rows were mixed"))
    assert bench.view.indices().tolist() == []
    assert bench.shards() == {"a": [0, 2], "b": []}
    (error,) = bench.telemetry.snapshot()["last_errors"]
    assert (error["kind"], "discard failed" in error["message"]) == ("root_unusable", True)
    # Lost for the rest of the run: it is not asked again, and takes no shards.
    await bench.writer.revoke([])
    for lease in await bench.ledger.acquire(9):
        assert await bench.extract(lease, lease.sample.index + 1, "e2") == "b"
    assert bench.shards() == {"a": [0, 2], "b": [0, 1, 2, 3]}
    _, view = await bench.start_again()
    assert bench.shards() == {"a": [], "b": [0, 1, 2, 3]}
    assert view.indices().tolist() == [0, 1, 2, 3]


async def test_after_a_crash_the_next_start_discards_what_was_revoked(bench: Bench) -> None:
    await bench.ledger.vouch(EPOCH, 2)
    await bench.ledger.revoke(EPOCH, "fingerprint", "other states")
    # Killed here: the ledger has revoked them, and nobody has hidden or discarded anything.
    assert bench.view.indices().tolist() == [0, 1, 2, 3]
    _, view = await bench.start_again()
    assert view.indices().tolist() == [0, 1]
    assert bench.shards() == {"a": [0], "b": [1]}
    assert [lease.sample.index for lease in await bench.ledger.acquire(9)] == [2, 3]


async def test_a_shard_is_not_written_while_its_revoked_one_is_about_to_be_discarded(bench: Bench) -> None:
    rows = await bench.ledger.revoke(EPOCH, "fingerprint", "other states")
    (lease, *_) = await bench.ledger.acquire(9)
    revoking = asyncio.create_task(bench.writer.revoke(rows))
    await asyncio.sleep(0)  # it has begun, and its thread has not been heard of
    home = await bench.extract(lease, 1, "e2")
    await revoking
    assert bench.shards()[home] == [lease.sample.index]
    assert bench.view.indices().tolist() == [lease.sample.index]


@pytest.mark.slow
async def test_a_run_begins_with_the_revocation_that_a_killed_one_had_not_come_to(job: TinyJob) -> None:
    async with job.server():
        assert (await job.run()).committed == 12
    with job.ledger() as reader:
        by_sequence = sorted(reader.committed(), key=lambda row: row.sequence)
        (epoch,) = reader.epochs()
        job_run = reader.run
    assert epoch.vouched >= by_sequence[-1].sequence  # the canary at the end of the run
    sound, doubtful = by_sequence[:5], by_sequence[5:]
    # As a run leaves it that was killed between the verdict of a canary and the revocation, with wrong states on the disks.
    path = job.loaded.state_dir / FILE_NAME
    with sqlite3.connect(path) as db:
        db.execute("UPDATE epochs SET vouched = ?", (sound[-1].sequence,))
    db.close()
    ledger = SqliteLedger(path)
    await ledger.doubt(epoch.epoch, "fingerprint", "other states")
    await ledger.epoch_ended(epoch.epoch, "fingerprint", "other states")
    await ledger.close()
    store = open_store(job.loaded.store)
    _, roots = attach_roots(store, {root.name: root.path for root in job.loaded.roots})
    places = {root.name: root for root in roots}
    for row in doubtful:
        states = random_states(np.random.default_rng(0), row.tokens, store.layout.states, store.layout.hidden_size)
        places[row.root].write(payload(Marker(job_run, row.index, 1, row.tokens), states))
    assert wrong_samples(job.loaded) == sorted(row.index for row in doubtful)
    async with job.server():
        outcome = await job.run()
    assert (outcome.committed, outcome.pending) == (12, 0)
    assert wrong_samples(job.loaded) == []
    with job.ledger() as reader:
        (revocation,) = reader.revocations()
        assert sorted(revocation.samples) == sorted(row.index for row in doubtful)
        rows = {row.index: row.epoch for row in reader.committed()}
        assert {rows[row.index] for row in sound} == {epoch.epoch}
        assert epoch.epoch not in {rows[row.index] for row in doubtful}


async def test_revoking_is_finished_even_when_it_is_cancelled(bench: Bench) -> None:
    rows = await bench.ledger.revoke(EPOCH, "fingerprint", "other states")
    revoking = asyncio.create_task(bench.writer.revoke(rows))
    await asyncio.sleep(0)
    revoking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await revoking
    assert bench.view.indices().tolist() == []
    assert bench.shards() == {"a": [], "b": []}


async def test_hiding_what_is_not_shown_is_fine_and_no_link_is_left_alone(bench: Bench) -> None:
    bench.view.unlink(0)
    bench.view.unlink(0)
    assert bench.view.indices().tolist() == [1, 2, 3]
    bench.view.path(0).write_bytes(b"somebody's own file")
    bench.view.unlink(0)
    assert bench.view.path(0).read_bytes() == b"somebody's own file"
