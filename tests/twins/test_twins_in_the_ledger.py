"""The ledger and samples with identical prompts: one stands for all, none is forgotten, and none is handed out twice."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsx.core.epoch import EpochRecord
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.records import Commit, Receipt
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import MIGRATIONS, RECKONED, SCHEMA, TOTALS, TRUST

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from hsx.core.sample import Lease

RUN = "0000abcd"
RECORD = EpochRecord("e1", "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)
SAME = (0, 1, 0, -1, 0, 1)
"""0, 2 and 4 have one prompt, 1 and 5 another; 3 has no twin."""
LENGTHS = (7, 9, 7, 5, 7, 9)
GROUPS = {index: [other for other in range(6) if SAME[other] == SAME[index] >= 0] or [index] for index in range(6)}


def entry(lease: Lease, shared: list[int]) -> Commit:
    index = lease.sample.index
    marker = Marker(RUN, index, lease.attempt, lease.sample.tokens)
    return Commit(lease, marker, "e1", index + 1, Receipt("a", 1000, 5), {"request": 0.1}, False, tuple(shared))


@pytest.fixture
async def ledger(tmp_path: Path) -> SqliteLedger:
    create(tmp_path / "ledger.sqlite", RUN, {}, LENGTHS, [], SAME)
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    await ledger.epoch_began(RECORD)
    return ledger


def states(path: Path) -> list[str]:
    with LedgerReader(path / "ledger.sqlite") as reader:
        return [reader.sample(index).state for index in range(6)]


async def commit_all(ledger: SqliteLedger) -> list[int]:
    """Commits what is handed out until nothing is; returns that."""
    done = []
    while leases := await ledger.acquire(9):
        twins = await ledger.twins([lease.sample.index for lease in leases])
        await ledger.commit([entry(lease, twins.get(lease.sample.index, [])) for lease in leases])
        done += [lease.sample.index for lease in leases]
    return done


async def test_one_stands_for_all(ledger: SqliteLedger, tmp_path: Path) -> None:
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert sorted(reader.followers()) == [(2, 7), (4, 7), (5, 9)]
    leases = await ledger.acquire(9)
    assert [lease.sample.index for lease in leases] == [0, 1, 3]
    assert await ledger.acquire(9) == []
    assert await ledger.twins([0, 1, 3]) == {0: [2, 4], 1: [5]}
    await ledger.commit([entry(leases[0], [2, 4]), entry(leases[1], [5]), entry(leases[2], [])])
    counts = await ledger.counts()
    assert (counts.committed, counts.bytes_committed, counts.tokens_committed) == (6, 3000, 44)
    assert (counts.shared, counts.bytes_shared, counts.tokens_shared) == (3, 3000, 23)
    await ledger.close()


async def test_a_twin_that_got_no_link_is_extracted_by_itself(ledger: SqliteLedger) -> None:
    """The one that is left first stands for those that are left."""
    leases = await ledger.acquire(9)
    await ledger.twins([lease.sample.index for lease in leases])
    await ledger.commit([entry(lease, []) for lease in leases])
    again = await ledger.acquire(9)
    assert sorted(lease.sample.index for lease in again) == [2, 5]
    assert await ledger.twins([2, 5]) == {2: [4]}
    await ledger.commit([entry(lease, []) for lease in again])
    assert [lease.sample.index for lease in await ledger.acquire(9)] == [4]
    await ledger.close()


async def test_a_quarantined_prompt_is_quarantined_for_all_that_have_it(ledger: SqliteLedger, tmp_path: Path) -> None:
    """Each is listed with the sample that was tried; one of them requeued brings all of them back."""
    (lease, *_) = await ledger.acquire(9)
    marker = Marker(RUN, 0, 1, 7)
    await ledger.fail(lease, marker, "e1", "server_killed", "it died twice", quarantine=True)
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        listed = {row.index: (row.marker, row.reason, row.evidence, row.attempts) for row in reader.quarantined()}
        assert reader.failures_by_reason() == {"server_killed": 1}
    told = "its prompt is that of sample 0, which was quarantined: it died twice"
    assert listed == {
        0: (str(marker), "server_killed", "it died twice", 1),
        2: (str(marker), "server_killed", told, 0),
        4: (str(marker), "server_killed", told, 0),
    }
    assert await ledger.requeue([4]) == 3
    await ledger.close()
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    assert await commit_all(ledger) == [0, 1, 3]
    await ledger.close()


async def test_what_shares_a_damaged_shard_is_taken_back_with_it(ledger: SqliteLedger) -> None:
    assert await commit_all(ledger) == [0, 1, 3]
    rows = await ledger.requeue_damaged([4], "chunk", "a bit")
    assert [row.index for row in rows] == [0, 2, 4]
    assert [row.own_bytes for row in rows] == [1000, 0, 0]
    counts = await ledger.counts()
    assert (counts.pending, counts.bytes_committed, counts.shared, counts.bytes_shared) == (3, 2000, 1, 1000)
    assert await commit_all(ledger) == [0]
    await ledger.close()


async def test_what_no_canary_vouches_for_goes_with_its_twins(ledger: SqliteLedger) -> None:
    await commit_all(ledger)
    await ledger.vouch("e1", 1)
    rows = await ledger.revoke("e1", "fingerprint", "other states")
    assert [row.index for row in rows] == [1, 5, 3]
    assert sorted(await commit_all(ledger)) == [1, 3]
    await ledger.close()


async def test_an_adoption_and_a_twin_do_not_meet(ledger: SqliteLedger, tmp_path: Path) -> None:
    """A sample that is being adopted is not committed along with another; one that is, is not adopted."""
    known = await ledger.attempts_of(0, hold=True)
    assert known is not None
    assert known[0] == "pending"
    assert await ledger.twins([0]) == {0: [2, 4]}
    claimed = await ledger.attempts_of(2, hold=True)
    assert claimed is not None
    assert claimed[0] == "shared"
    assert (await ledger.attempts_of(1, hold=True) or ("",))[0] == "pending"
    assert (await ledger.attempts_of(5, hold=True) or ("",))[0] == "pending"
    assert await ledger.twins([1]) == {}
    await ledger.commit([entry(known[1], [2, 4])])
    assert states(tmp_path) == ["committed", "pending", "committed", "pending", "committed", "pending"]
    assert await commit_all(ledger) == [1, 3]
    await ledger.close()


async def test_a_suspect_on_trial_and_a_twin_do_not_meet(ledger: SqliteLedger) -> None:
    """A new life of hsx begins with the suspects of the last one: what they are at is not committed along with another."""
    (trial,) = await ledger.acquire(9, {2})
    leases = await ledger.acquire(9)
    assert [lease.sample.index for lease in leases] == [0, 1, 3]
    assert await ledger.twins([0]) == {0: [4]}
    await ledger.commit([entry(leases[0], [4])])
    await ledger.commit([entry(trial, [])])
    assert (await ledger.counts()).committed == 3
    await ledger.close()


async def test_a_ledger_of_version_3_goes_on_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(SCHEMA + TRUST + TOTALS)
        db.execute("INSERT INTO meta VALUES ('run', ?), ('fingerprint', '{}')", (RUN,))
        db.executemany("INSERT INTO samples (idx, tokens) VALUES (?, ?)", enumerate(LENGTHS))
        db.executescript(RECKONED)
        db.execute(
            "UPDATE samples SET state = 'committed', attempts = 1, marker = ?, epoch = 'e0', sequence = 1, root = 'a', "
            "nbytes = 10, crc32c = 1, committed_at = 1.0 WHERE idx = 0",
            (str(Marker(RUN, 0, 1, 7)),),
        )
        db.execute("PRAGMA user_version = 3")
        db.commit()
    assert max(MIGRATIONS) == 3
    with LedgerReader(path) as reader:  # as it is, without changing it
        before = reader.counts()
        assert reader.twins(0) == []
        assert [row.index for row in reader.committed()] == [0]
    assert (before.committed, before.bytes_committed, before.shared) == (1, 10, 0)
    ledger = SqliteLedger(path)
    assert await ledger.counts() == before
    assert await commit_all(ledger) == [1, 2, 3, 4, 5]
    counts = await ledger.counts()
    assert (counts.committed, counts.bytes_committed, counts.shared) == (6, 5010, 0)
    await ledger.close()


class TwinMachine(RuleBasedStateMachine):
    """A run, as the ledger sees it: whatever happens, nothing is handed out twice, and in the end nothing is left."""

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        create(self.path, RUN, {}, LENGTHS, [], SAME)
        self.ledger = SqliteLedger(self.path)
        self.do(self.ledger.epoch_began(RECORD))
        self.out: list[Lease] = []
        self.under_way: list[tuple[Lease, list[int], list[int]]] = []

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def state(self) -> list[str]:
        with LedgerReader(self.path) as reader:
            return [reader.sample(index).state for index in range(6)]

    def take(self, limit: int, only: set[int] | None = None) -> None:
        busy = {lease.sample.index for lease in self.out}
        busy |= {index for lease, twins, _ in self.under_way for index in (lease.sample.index, *twins)}
        leases = self.do(self.ledger.acquire(limit, only))
        taken = [lease.sample.index for lease in leases]
        assert len(set(taken)) == len(taken)
        assert not busy & set(taken)
        assert all(self.state()[index] == "pending" for index in taken)
        self.out += leases

    @rule(limit=st.integers(1, 4))
    def acquire(self, limit: int) -> None:
        self.take(limit)

    @rule(only=st.sets(st.integers(0, 5)))
    def hunt(self, only: set[int]) -> None:
        self.take(4, only)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        twins = self.do(self.ledger.twins([lease.sample.index])).get(lease.sample.index, [])
        assert set(twins) <= set(GROUPS[lease.sample.index])
        busy = {other.sample.index for other in self.out}
        busy |= {index for other, claimed, _ in self.under_way for index in (other.sample.index, *claimed)}
        assert not busy & set(twins)
        linked = [twin for twin in twins if data.draw(st.booleans())]
        self.under_way.append((lease, twins, linked))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), lost=st.booleans())
    def commit(self, data: st.DataObject, lost: bool) -> None:
        lease, _, linked = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if lost:  # its root: it is written again, or given back
            self.out.append(lease)
            return
        self.do(self.ledger.commit([entry(lease, linked)]))

    @precondition(lambda self: self.out)
    @rule(data=st.data(), quarantine=st.booleans())
    def fail(self, data: st.DataObject, quarantine: bool) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        marker = Marker(RUN, lease.sample.index, lease.attempt, lease.sample.tokens)
        self.do(self.ledger.fail(lease, marker, "e1", "finite", "a NaN", quarantine=quarantine))

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.do(self.ledger.give_back([lease]))

    @rule(vouched=st.integers(0, 6))
    def revoke(self, vouched: int) -> None:
        self.do(self.ledger.vouch("e1", vouched))
        self.do(self.ledger.revoke("e1", "fingerprint", "other states"))

    @rule(indices=st.sets(st.integers(0, 5)))
    def requeue_damaged(self, indices: set[int]) -> None:
        with LedgerReader(self.path) as reader:
            rows = {row.index: row for row in reader.committed()}
        hit = {rows[index].marker for index in indices if index in rows}
        wanted = [index for index, row in rows.items() if row.marker in hit]
        assert [row.index for row in self.do(self.ledger.requeue_damaged(indices, "chunk", "a bit"))] == wanted

    @rule()
    def crash(self) -> None:
        self.do(self.ledger.close())
        self.ledger = SqliteLedger(self.path)
        self.out, self.under_way = [], []

    @rule()
    def finish(self) -> None:
        """What is out comes back, and everything that is handed out is committed: nothing may be pending then."""
        for lease, _, linked in self.under_way:
            self.do(self.ledger.commit([entry(lease, linked)]))
        self.do(self.ledger.give_back(self.out))
        self.out, self.under_way = [], []
        self.do(commit_all(self.ledger))
        assert "pending" not in self.state()

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "ledger"):
            counts = self.do(self.ledger.counts())
            with LedgerReader(self.path) as reader:
                rows = list(reader.committed())
                assert reader.counts() == counts
            shared = [row for row in rows if row.captured_as != row.index]
            assert (counts.committed, counts.shared) == (len(rows), len(shared))
            assert (counts.bytes_committed, counts.bytes_shared) == (1000 * (len(rows) - len(shared)), 1000 * len(shared))
            assert counts.tokens_shared == sum(row.tokens for row in shared)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.do(self.ledger.close())
            self.loop.close()
            self.folder.cleanup()


TestTwinMachine = TwinMachine.TestCase
TestTwinMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


async def test_a_sample_is_never_committed_twice_with_a_twin(ledger: SqliteLedger) -> None:
    (lease,) = await ledger.acquire(1)
    await ledger.twins([0])
    await ledger.commit([entry(lease, [2, 4])])
    with pytest.raises(RunError, match="sample 0 is not pending"):
        await ledger.commit([entry(lease, [2])])
    await ledger.close()
