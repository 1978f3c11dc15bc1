"""Relaxed durability: what a power cut or a lost disk costs is found out, and nothing else is; and copies of the ledger."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores.checksum import crc32c
from hsx.stores.ledger_backup import BACKUP_NAME
from hsx.stores.ledger_reader import LedgerReader
from hsx.testing.disks import HandClock
from hsx.testing.writer_bench import WriterBench
from hsx.upkeep import MARGIN_S, SYNC_S, SYNCED, Copies, Syncing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from hsx.ports import Root
    from hsx.records import CommittedRow


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[WriterBench]:
    """A bench of relaxed roots whose committer runs."""
    bench = WriterBench(tmp_path, durable=False)
    committing = asyncio.create_task(bench.writer.run())
    yield bench
    await bench.writer.close()
    await committing
    await bench.close()


class Wall:
    """Unix seconds, moved by hand; the ledger's own are the real ones."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sound(root: Root, row: CommittedRow) -> bool:
    try:
        return crc32c(root.read(row.index, row.tokens).reshape(-1).view(np.uint8)) == row.crc32c
    except RunError:
        return False


def syncing(
    bench: WriterBench,
    boot: str = "one",
    *,
    relaxed: bool = True,
    wall: Wall | None = None,
    clock: HandClock | None = None,
    roots: tuple[str, ...] = ("a", "b"),
) -> Syncing:
    """The bench's books of what is on its disks."""

    def committed(since: float) -> list[CommittedRow]:
        with LedgerReader(bench.folder / "ledger.sqlite") as ledger:
            return list(ledger.committed(since))

    return Syncing(
        relaxed=relaxed,
        roots=[bench.roots[name] for name in roots],
        space=bench.space,
        ledger=bench.ledger,
        store=bench.writer,
        committed=committed,
        sound=sound,
        boot=boot,
        observer=bench.telemetry,
        clock=clock or HandClock(),
        wall=wall or Wall(0.0),
    )


async def commit_one_each(bench: WriterBench) -> None:
    """Samples 0 and 2 lie on root a, 1 and 3 on root b."""
    for lease, root in zip(await bench.ledger.acquire(4), "abab", strict=True):
        assert await bench.commit(lease, await bench.write(lease, root))


def homes(bench: WriterBench) -> list[tuple[int, str]]:
    return sorted(bench.ledger.committed_roots())


ALL = [(0, "a"), (1, "b"), (2, "a"), (3, "b")]


async def test_after_a_power_cut_what_was_not_synced_is_read_again_and_the_damaged_goes_back(bench: WriterBench) -> None:
    await syncing(bench).begin()
    await commit_one_each(bench)
    shard = bench.real[1].folder / shard_key(3)
    shard.write_bytes(bytes(shard.stat().st_size))  # as after a journal replay: its size is there, its pages are not
    (bench.real[0].folder / shard_key(0)).unlink()
    await syncing(bench, "two").begin()
    assert homes(bench) == ALL[1:3]
    assert bench.view.indices().tolist() == [1, 2]
    assert not shard.exists()
    assert bench.telemetry.snapshot()["last_errors"][-1]["kind"] == "unsynced"
    assert (await bench.ledger.counts()).pending == 4
    assert json.loads(await bench.ledger.recall(SYNCED) or "") == {"through": 0.0, "boot": "two"}


@pytest.mark.parametrize("relaxed", [True, False])
async def test_a_root_that_is_away_after_a_power_cut_is_read_once_it_is_back(bench: WriterBench, *, relaxed: bool) -> None:
    await syncing(bench).begin()
    await commit_one_each(bench)
    (bench.real[1].folder / shard_key(3)).unlink()
    away = syncing(bench, "two", wall=Wall(4e9), roots=("a",), relaxed=relaxed)
    await away.begin()
    await away.close()
    assert homes(bench) == ALL, "root b is not there: nothing is known of its samples"
    await syncing(bench, "three", wall=Wall(4e9), roots=("a",), relaxed=relaxed).begin()
    await syncing(bench, "three", wall=Wall(4e9), relaxed=relaxed).begin()
    assert homes(bench) == ALL[:3]
    (bench.real[1].folder / shard_key(1)).unlink()
    await syncing(bench, "four", wall=Wall(4e9), relaxed=relaxed).begin()
    assert homes(bench) == ALL[:3], "it was read, and synced, when it came back"
    assert "away" not in (await bench.ledger.recall(SYNCED) or "")


async def test_what_was_synced_is_not_read_again(bench: WriterBench) -> None:
    await commit_one_each(bench)
    await syncing(bench, wall=Wall(4e9)).begin()
    (bench.real[0].folder / shard_key(0)).unlink()
    await syncing(bench, "two", wall=Wall(4e9)).begin()
    assert homes(bench) == ALL, "a shard that goes later is the business of verify and repair"


async def test_the_same_boot_reads_nothing_again(bench: WriterBench) -> None:
    await syncing(bench).begin()
    await commit_one_each(bench)
    (bench.real[0].folder / shard_key(0)).unlink()
    await syncing(bench).begin()
    assert homes(bench) == ALL


async def test_a_job_that_becomes_strict_settles_its_past_first(bench: WriterBench) -> None:
    await syncing(bench).begin()
    await commit_one_each(bench)
    (bench.real[0].folder / shard_key(2)).unlink()
    await syncing(bench, "two", relaxed=False).begin()
    assert homes(bench) == [(0, "a"), (1, "b"), (3, "b")]
    assert await bench.ledger.recall(SYNCED) == ""
    bench.roots["a"].failing = {"flush"}
    await syncing(bench, "three", relaxed=False).begin()
    assert bench.space.lost == {}, "nothing is synced where each commit is durable by itself"


async def test_a_root_that_cannot_be_synced_costs_what_it_took_since_the_last_time(bench: WriterBench) -> None:
    books = syncing(bench)
    await books.begin()
    await commit_one_each(bench)
    bench.roots["b"].failing = {"flush"}
    assert not await books.close()
    assert homes(bench) == [(0, "a"), (2, "a")]
    assert bench.view.indices().tolist() == [0, 2]
    assert bench.telemetry.snapshot()["roots"]["b"]["state"] == "lost"
    assert await books.close(), "the second time there is nothing left to take back"


async def test_all_disks_are_synced_every_minute_and_a_clock_that_steps_back_is_noticed(bench: WriterBench) -> None:
    wall = Wall(1000.0)
    seen: list[float] = []

    async def through() -> float:
        return float(json.loads(await bench.ledger.recall(SYNCED) or "")["through"])

    class Stopping(HandClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            wall.now += seconds
            if self.now == 30.0:
                wall.now = 500.0
            if self.now in (31.0, SYNC_S + 1, SYNC_S + 2):
                seen.append(await through())
            if self.now > SYNC_S + 5:
                raise asyncio.CancelledError

    books = syncing(bench, wall=wall, clock=Stopping())
    await books.begin()
    with pytest.raises(asyncio.CancelledError):
        await books.run()
    assert seen[0] == 500.0 - MARGIN_S
    assert seen[-1] > 500.0


async def test_copies_go_to_every_root_in_service_and_a_failure_is_told_once(bench: WriterBench, tmp_path: Path) -> None:
    folders = {"a": bench.real[0].folder, "b": tmp_path / "nowhere"}
    copies = Copies(600.0, folders, bench.space, bench.ledger, bench.telemetry, HandClock())
    await copies.take()
    assert (folders["a"] / BACKUP_NAME).stat().st_size > 0
    (error,) = bench.telemetry.snapshot()["last_errors"]
    assert error["kind"] == "root_unusable"
    assert error["message"].startswith("no copy of the ledger on root b: ")
    await copies.take()
    assert len(bench.telemetry.snapshot()["last_errors"]) == 1
    (folders["a"] / BACKUP_NAME).unlink()
    bench.space.failed("a", RunError("root_unusable", "root a: EIO"))
    await commit_nothing(bench)
    await copies.take()
    assert not (folders["a"] / BACKUP_NAME).exists()


async def commit_nothing(bench: WriterBench) -> None:
    """The ledger changes."""
    await bench.ledger.remember("anything", "else")


async def test_without_an_interval_there_are_no_copies(bench: WriterBench) -> None:
    copies = Copies(0, {"a": bench.real[0].folder}, bench.space, bench.ledger, bench.telemetry, HandClock())
    await copies.run()
    await copies.take()
    assert not (bench.real[0].folder / BACKUP_NAME).exists()
