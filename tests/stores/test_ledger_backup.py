"""Copies of the ledger on roots, and what is taken back when a shard is damaged."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.records import Commit, CommittedRow, Receipt
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_backup import BACKUP_NAME, backed_up, backup
from hsx.stores.ledger_reader import LedgerReader

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hsx.core.sample import Lease

RUN = "0000abcd"
TOKENS = [5, 6, 7, 8]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    create(path, RUN, {}, TOKENS, [])
    return path


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    folders = {name: tmp_path / f"root-{name}" for name in ("a", "b")}
    for folder in folders.values():
        folder.mkdir()
    return folders


async def commit(ledger: SqliteLedger, leases: Sequence[Lease]) -> None:
    def entry(lease: Lease) -> Commit:
        index = lease.sample.index
        marker = Marker(RUN, index, lease.attempt, lease.sample.tokens)
        return Commit(lease, marker, "e1", index + 1, Receipt("a", 100 + index, 42 + index), {}, adopted=False)

    await ledger.commit([entry(lease) for lease in leases])


async def test_every_root_gets_a_whole_copy_in_one_file(path: Path, folders: dict[str, Path]) -> None:
    ledger = SqliteLedger(path)
    await commit(ledger, await ledger.acquire(2))
    assert await ledger.backup(folders) == {"a": None, "b": None}
    await commit(ledger, await ledger.acquire(1))
    await ledger.close()
    for folder in folders.values():
        assert [file.name for file in folder.iterdir()] == [BACKUP_NAME]
        with LedgerReader(folder / BACKUP_NAME) as copy:
            assert (copy.run, copy.counts().committed) == (RUN, 2)
            assert [row.index for row in copy.committed()] == [0, 1]
        assert backed_up(folder / BACKUP_NAME) > 0
        assert [file.name for file in folder.iterdir()] == [BACKUP_NAME]  # reading leaves nothing beside it
    assert backed_up(path) == 0
    restored = SqliteLedger(folders["a"] / BACKUP_NAME)
    assert [lease.sample.index for lease in await restored.acquire(9)] == [2, 3]
    await restored.close()


def test_a_copy_replaces_the_one_before(path: Path, folders: dict[str, Path]) -> None:
    for left in (f".{BACKUP_NAME}.tmp", f".{BACKUP_NAME}.tmp-journal"):
        (folders["a"] / left).write_bytes(b"what a killed one left")
    assert backup(path, folders) == {"a": None, "b": None}
    first = backed_up(folders["a"] / BACKUP_NAME)
    assert backup(path, folders) == {"a": None, "b": None}
    assert backed_up(folders["a"] / BACKUP_NAME) >= first
    assert [file.name for file in folders["a"].iterdir()] == [BACKUP_NAME]


async def test_a_copy_is_made_again_only_after_a_change(path: Path, folders: dict[str, Path]) -> None:
    ledger = SqliteLedger(path)
    copies = [folder / BACKUP_NAME for folder in folders.values()]
    await ledger.backup(folders)
    first = [copy.stat().st_ino for copy in copies]
    assert await ledger.backup(folders) == {"a": None, "b": None}
    assert [copy.stat().st_ino for copy in copies] == first
    await ledger.remember("some", "fact")
    await ledger.backup(folders)
    second = [copy.stat().st_ino for copy in copies]
    other = sqlite3.connect(path)
    other.execute("UPDATE samples SET attempts = 1 WHERE idx = 0")  # as `hsx move` does, from another process
    other.commit()
    other.close()
    copies[1].unlink()
    copies[1].parent.rmdir()
    outcome = await ledger.backup(folders)
    assert outcome["a"] is None
    assert outcome["b"] is not None
    assert copies[0].stat().st_ino != second[0]
    copies[1].parent.mkdir()
    assert await ledger.backup(folders) == {"a": None, "b": None}  # one that failed is tried again
    assert copies[1].exists()
    await ledger.close()


def test_a_root_that_fails_does_not_fail_the_others(path: Path, folders: dict[str, Path]) -> None:
    folders["a"].rmdir()
    outcome = backup(path, {**folders, "c": path})
    assert outcome["b"] is None
    for name in ("a", "c"):
        error = outcome[name]
        assert error is not None
        assert error.kind == "root_unusable"
        assert f"root {name}" in error.message
    assert (folders["b"] / BACKUP_NAME).exists()


def test_a_full_root_keeps_the_copy_from_before(path: Path, small_disk: Path) -> None:
    assert backup(path, {"a": small_disk}) == {"a": None}
    before = (small_disk / BACKUP_NAME).read_bytes()
    large = path.with_name("large.sqlite")
    create(large, RUN, {}, range(300_000), [])
    error = backup(large, {"a": small_disk})["a"]
    assert error is not None
    assert error.kind == "roots_full"
    assert (small_disk / BACKUP_NAME).read_bytes() == before
    assert [file.name for file in small_disk.iterdir() if file.is_file()] == [BACKUP_NAME]


def test_a_ledger_that_is_gone_is_told_apart_from_a_root_that_fails(path: Path, folders: dict[str, Path]) -> None:
    path.unlink()
    kinds = {name: error.kind for name, error in backup(path, folders).items() if error is not None}
    assert kinds == {"a": "ledger_failed", "b": "ledger_failed"}
    assert backup(path, {}) == {}


async def test_damaged_samples_go_back_once(path: Path) -> None:
    ledger = SqliteLedger(path)
    await commit(ledger, await ledger.acquire(3))
    rows = await ledger.requeue_damaged([2, 3, 0, 99], "chunk", "chunk 0 has another crc32c")
    assert rows == [
        CommittedRow(0, "a", 42, 100, 5, f"hsx1-{RUN}-0-1-5", "e1", 1),
        CommittedRow(2, "a", 44, 102, 7, f"hsx1-{RUN}-2-1-7", "e1", 3),
    ]
    assert await ledger.requeue_damaged([2, 0], "chunk", "again") == []
    counts = await ledger.counts()
    assert (counts.pending, counts.committed, counts.tokens_committed, counts.bytes_committed) == (3, 1, 6, 101)
    assert set(ledger.revoked()) == {0, 2}
    # Attempts go on, in this process too: no marker is used twice.
    assert [(lease.sample.index, lease.attempt) for lease in await ledger.acquire(9)] == [(3, 1), (0, 2), (2, 2)]
    await ledger.close()
    with LedgerReader(path) as reader:
        assert reader.counts() == counts
        (revocation,) = reader.revocations()
        assert (revocation.epoch, revocation.invariant, revocation.samples) == ("", "chunk", (0, 2))


async def test_one_row_is_read_as_it_is_now(path: Path) -> None:
    ledger = SqliteLedger(path)
    await commit(ledger, await ledger.acquire(2))
    with LedgerReader(path) as reader:
        rows = reader.committed()
        assert next(rows) == reader.row(0)
        await ledger.requeue_damaged([1], "missing", "no file")
        assert reader.row(1) is None
        assert reader.row(99) is None
        assert reader.row(-1) is None
    await ledger.close()


async def test_rows_since_a_time(path: Path) -> None:
    ledger = SqliteLedger(path)
    await commit(ledger, await ledger.acquire(1))
    with LedgerReader(path) as reader:
        first = reader.sample(0).committed_at
        assert first is not None
        assert [row.index for row in reader.committed(first - 1)] == [0]
        assert list(reader.committed(first)) == []
    await ledger.close()


def test_rows_are_read_page_by_page(tmp_path: Path) -> None:
    path = tmp_path / "many.sqlite"
    create(path, RUN, {}, [1] * 2500, [])
    db = sqlite3.connect(path)
    db.execute(
        "UPDATE samples SET state = 'committed', root = 'a', crc32c = 1, nbytes = 2, marker = 'm', epoch = 'e', "
        "sequence = idx, committed_at = 1.0 WHERE idx != 1000"
    )
    db.commit()
    db.close()
    with LedgerReader(path) as reader:
        found = [row.index for row in reader.committed()]
        counts = reader.counts()
    assert found == [index for index in range(2500) if index != 1000]
    assert (counts.pending, counts.committed, counts.bytes_committed) == (1, 2499, 4998)


def test_a_ledger_that_cannot_be_copied_is_named(path: Path, folders: dict[str, Path]) -> None:
    path.write_bytes(b"x" * 5000)
    error = backup(path, folders)["a"]
    assert isinstance(error, RunError)
    assert error.kind == "ledger_failed"


async def test_a_sample_that_was_moved_off_a_lost_root_is_not_taken_back(path: Path) -> None:
    ledger = SqliteLedger(path)
    await commit(ledger, await ledger.acquire(3))
    rows = await ledger.requeue_damaged([0, 1], "unsynced", "root b was lost", where={0: "b", 1: "a"})
    assert [row.index for row in rows] == [1]
    assert (await ledger.counts()).committed == 2
