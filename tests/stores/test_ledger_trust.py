"""What the ledger knows of trust: violations, what a canary vouches for, revocations; and ledgers of an older version."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import EpochRecord
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.records import Commit, CommittedRow, Receipt
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.sample import Lease

RUN = "0000abcd"
TOKENS = [5, 6, 7, 8]
RECORD = EpochRecord("e1", "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)
MARKER = Marker(RUN, 2, 1, 7)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    create(path, RUN, {}, TOKENS, [])
    return path


def entry(lease: Lease, sequence: int, epoch: str = "e1") -> Commit:
    index = lease.sample.index
    marker = Marker(RUN, index, lease.attempt, lease.sample.tokens)
    return Commit(lease, marker, epoch, sequence, Receipt("a", 100 + index, 42 + index), {"write": 0.5}, adopted=False)


async def committed(ledger: SqliteLedger, sequences: list[int]) -> None:
    """Commits the next samples in epoch e1, under these capture numbers."""
    await ledger.epoch_began(RECORD)
    leases = await ledger.acquire(len(sequences))
    await ledger.commit([entry(lease, sequence) for lease, sequence in zip(leases, sequences, strict=True)])


async def test_violations_are_counted_for_the_whole_job(path: Path) -> None:
    ledger = SqliteLedger(path)
    await ledger.violation("e1", MARKER, "expected", "dump is of another marker")
    await ledger.violation("e1", None, "advancing", "nothing for 60 s")
    await ledger.close()
    again = SqliteLedger(path)
    await again.violation("e2", MARKER, "expected", "dump is of another marker")
    assert await again.violations_by_invariant() == {"advancing": 1, "expected": 2}
    await again.close()
    with LedgerReader(path) as reader:
        assert reader.violations_by_invariant() == {"advancing": 1, "expected": 2}


async def test_the_end_of_an_epoch_names_what_went_back(path: Path) -> None:
    ledger = SqliteLedger(path)
    await ledger.epoch_began(RECORD)
    await ledger.epoch_ended("e1", "alive", "server died", requeued=[3, 1])
    await ledger.close()
    with LedgerReader(path) as reader:
        (epoch,) = reader.epochs()
    assert (epoch.reason, epoch.requeued, epoch.vouched) == ("alive", (3, 1), 0)


async def test_without_a_sound_canary_everything_is_doubtful(path: Path) -> None:
    ledger = SqliteLedger(path)
    await committed(ledger, [4, 2, 7])
    assert [(row.index, row.sequence) for row in await ledger.doubtful("e1")] == [(1, 2), (0, 4), (2, 7)]
    assert await ledger.doubtful("e2") == []
    await ledger.vouch("e1", 4)
    assert [row.index for row in await ledger.doubtful("e1")] == [2]
    await ledger.vouch("e1", 3)  # never goes down
    assert await ledger.doubtful("e1") == [CommittedRow(2, "a", 44, 102, 7, str(MARKER), "e1", 7)]
    await ledger.close()


async def test_what_is_doubtful_is_revoked_and_extracted_again(path: Path) -> None:
    ledger = SqliteLedger(path)
    await committed(ledger, [1, 2, 3])
    await ledger.vouch("e1", 1)
    revoked = await ledger.revoke("e1", "fingerprint", "relative error 0.7")
    assert [(row.index, row.root, row.crc32c) for row in revoked] == [(1, "a", 43), (2, "a", 44)]
    counts = await ledger.counts()
    assert (counts.pending, counts.committed, counts.tokens_committed, counts.bytes_committed) == (3, 1, 5, 100)
    # The one that was never handed out first, then those that came back; their attempts go on.
    assert [(lease.sample.index, lease.attempt) for lease in await ledger.acquire(9)] == [(3, 1), (1, 2), (2, 2)]
    await ledger.close()
    with LedgerReader(path) as reader:
        assert reader.counts() == counts
        sample = reader.sample(2)
        assert (sample.state, sample.attempts, sample.failures) == ("pending", 2, 0)
        assert {sample.marker, sample.epoch, sample.sequence, sample.root, sample.nbytes, sample.crc32c} == {None}
        assert (sample.committed_at, sample.timings) == (None, {})
        (revocation,) = reader.revocations()
        assert (revocation.epoch, revocation.invariant, revocation.evidence) == ("e1", "fingerprint", "relative error 0.7")
        assert revocation.samples == (1, 2)


async def test_a_sample_that_the_cursor_has_not_met_is_leased_once(path: Path) -> None:
    before = SqliteLedger(path)
    await committed(before, [1, 2])
    await before.close()
    ledger = SqliteLedger(path)  # its cursor is before all samples
    assert [row.index for row in await ledger.revoke("e1", "twins", "rows were mixed")] == [0, 1]
    assert [lease.sample.index for lease in await ledger.acquire(9)] == [0, 1, 2, 3]
    assert await ledger.acquire(9) == []
    await ledger.close()


async def test_a_sample_that_was_leased_ahead_of_the_cursor_comes_again(path: Path) -> None:
    ledger = SqliteLedger(path)
    await ledger.epoch_began(RECORD)
    (lease,) = await ledger.acquire(9, only={2})
    await ledger.commit([entry(lease, 1)])
    await ledger.revoke("e1", "fingerprint", "x")
    assert [lease.sample.index for lease in await ledger.acquire(9)] == [0, 1, 2, 3]
    assert await ledger.acquire(9) == []
    await ledger.close()


async def test_nothing_doubtful_leaves_no_trace(path: Path) -> None:
    ledger = SqliteLedger(path)
    await committed(ledger, [1, 2])
    await ledger.vouch("e1", 2)
    assert await ledger.revoke("e1", "fingerprint", "x") == []
    assert set(ledger.revoked()) == set()
    await ledger.close()
    with LedgerReader(path) as reader:
        assert reader.revocations() == []
        assert reader.counts().committed == 2


async def test_revoked_samples_are_known_until_they_are_committed_again(path: Path) -> None:
    ledger = SqliteLedger(path)
    await committed(ledger, [1, 2])
    await ledger.revoke("e1", "fingerprint", "x")
    assert set(ledger.revoked()) == {0, 1}
    leases = await ledger.acquire(4)
    (lease,) = [lease for lease in leases if lease.sample.index == 1]
    await ledger.commit([entry(lease, 9, "e2")])
    assert set(ledger.revoked()) == {0}
    await ledger.close()


async def test_a_doubt_outlives_a_crash_until_it_is_settled(path: Path) -> None:
    ledger = SqliteLedger(path)
    await committed(ledger, [1, 2])
    assert await ledger.overdue() == []
    await ledger.doubt("e1", "twins", "rows were mixed")
    await ledger.epoch_ended("e1", "twins", "rows were mixed")
    await ledger.close()
    again = SqliteLedger(path)
    assert await again.overdue() == [("e1", "twins", "rows were mixed")]
    assert [row.index for row in await again.revoke("e1", "twins", "rows were mixed")] == [0, 1]
    assert await again.overdue() == []
    await again.close()


async def test_a_remembered_fact_may_change(path: Path) -> None:
    ledger = SqliteLedger(path)
    assert await ledger.recall("suspects") is None
    await ledger.remember("suspects", "[1, 2]")
    await ledger.remember("suspects", "[1]")
    await ledger.close()
    again = SqliteLedger(path)
    assert await again.recall("suspects") == "[1]"
    await again.close()


VERSION_1 = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE samples (
    idx INTEGER PRIMARY KEY,
    tokens INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'committed', 'quarantined')),
    attempts INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    marker TEXT, epoch TEXT, sequence INTEGER,
    root TEXT, nbytes INTEGER, crc32c INTEGER,
    timings TEXT, adopted INTEGER, committed_at REAL,
    reason TEXT, evidence TEXT
) STRICT;
CREATE INDEX pending ON samples (idx) WHERE state = 'pending';
CREATE INDEX quarantined ON samples (idx) WHERE state = 'quarantined';
CREATE TABLE failures (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, idx INTEGER NOT NULL, marker TEXT NOT NULL, epoch TEXT NOT NULL,
    reason TEXT NOT NULL, evidence TEXT NOT NULL, quarantined INTEGER NOT NULL
) STRICT;
CREATE TABLE epochs (
    epoch TEXT PRIMARY KEY, began REAL NOT NULL, ended REAL, reason TEXT, evidence TEXT, record TEXT NOT NULL
) STRICT;
CREATE TABLE rejected (
    line INTEGER PRIMARY KEY, sample_id TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL
) STRICT;
INSERT INTO meta VALUES ('run', '0000abcd'), ('fingerprint', '{}');
INSERT INTO samples
    (idx, tokens, state, attempts, marker, epoch, sequence, root, nbytes, crc32c, timings, adopted, committed_at) VALUES
    (0, 5, 'committed', 1, 'hsx1-0000abcd-0-1-5', 'e1', 1, 'a', 100, 42, '{}', 0, 1.0);
INSERT INTO samples (idx, tokens, attempts, failures) VALUES (1, 6, 2, 2), (2, 7, 0, 0);
INSERT INTO failures (at, idx, marker, epoch, reason, evidence, quarantined) VALUES
    (1.0, 1, 'hsx1-0000abcd-1-1-6', 'e0', 'finite', 'a NaN', 0),
    (2.0, 1, 'hsx1-0000abcd-1-2-6', 'e0', 'request_failed', 'HTTP 500', 0);
INSERT INTO epochs VALUES ('e0', 1.0, 2.0, 'alive', 'server died', '{}'), ('e1', 3.0, NULL, NULL, NULL, '{}');
PRAGMA user_version = 1;
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A ledger as version 1 made it, with a commit, two failures and an epoch that ended."""
    path = tmp_path / "old.sqlite"
    db = sqlite3.connect(path)
    db.executescript(VERSION_1)
    db.close()
    return path


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return int(found)


def tables(path: Path) -> set[str]:
    """Each table and index with its columns, whatever the layout of the statement that made it."""
    db = sqlite3.connect(path)
    names = db.execute("SELECT name FROM sqlite_schema WHERE name NOT LIKE 'sqlite%'").fetchall()
    found = {f"{name}: {db.execute('SELECT name, type FROM pragma_table_xinfo(?)', (name,)).fetchall()}" for (name,) in names}
    db.close()
    return found


async def test_an_older_ledger_is_brought_up_to_date_when_it_is_opened_for_writing(old: Path, path: Path) -> None:
    ledger = SqliteLedger(old)
    assert version(old) == SCHEMA_VERSION
    assert tables(old) == tables(path)
    counts = await ledger.counts()
    assert (counts.committed, counts.pending) == (1, 2)
    # What an older hsx committed, no canary vouches for.
    assert [row.index for row in await ledger.doubtful("e1")] == [0]
    await ledger.violation("e1", MARKER, "finite", "another NaN")
    await ledger.vouch("e1", 1)
    assert await ledger.doubtful("e1") == []
    await ledger.close()
    with LedgerReader(old) as reader:
        assert reader.violations_by_invariant() == {"alive": 1, "finite": 2}
        assert [(epoch.epoch, epoch.requeued, epoch.vouched) for epoch in reader.epochs()] == [("e0", (), 0), ("e1", (), 1)]


def test_an_older_ledger_is_read_as_it_is(old: Path) -> None:
    before = old.read_bytes()
    with LedgerReader(old) as reader:
        counts = reader.counts()
        assert (counts.committed, counts.pending, counts.tokens_total, counts.bytes_committed) == (1, 2, 18, 100)
        assert reader.longest() == 7
        assert reader.violations_by_invariant() == {"alive": 1, "finite": 1}
        assert [(epoch.epoch, epoch.reason, epoch.requeued) for epoch in reader.epochs()] == [
            ("e0", "alive", ()),
            ("e1", None, ()),
        ]
        assert reader.revocations() == []
        assert [row.index for row in reader.committed()] == [0]
    assert old.read_bytes() == before


def test_a_step_that_fails_leaves_the_older_ledger_whole(old: Path) -> None:
    db = sqlite3.connect(old)
    db.execute("CREATE TABLE revocations (in_the_way)")
    db.commit()
    db.close()
    with pytest.raises(RunError, match="revocations already exists") as caught:
        SqliteLedger(old)
    assert caught.value.kind == "ledger_failed"
    assert version(old) == 1
    assert not any(table.startswith("violations") for table in tables(old))


def test_a_ledger_of_a_newer_hsx_is_refused(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1:d}")
    db.close()
    for opened in (SqliteLedger, LedgerReader):
        with pytest.raises(RunError, match="a newer hsx has written it") as caught:
            opened(path)
        assert caught.value.kind == "ledger_failed"
