"""The ledger against a model of it, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hsx.core.epoch import EpochRecord
from hsx.core.marker import Marker
from hsx.errors import EngineError, RunError
from hsx.records import BadRow, Commit, Receipt
from hsx.stores.ledger import SqliteLedger, create, new_run
from hsx.stores.ledger_move import MoveLedger
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from hsx.core.sample import Lease

TOKENS = [5, 6, 7, 8]
RECORD = EpochRecord("e1", "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)


def entry(run: str, lease: Lease) -> Commit:
    marker = Marker(run, lease.sample.index, lease.attempt, lease.sample.tokens)
    return Commit(lease, marker, "e1", lease.sample.index + 1, Receipt("a", 100, 42), {"write": 0.5}, adopted=False)


@pytest.fixture
async def ledger(tmp_path: Path) -> SqliteLedger:
    path = tmp_path / "ledger.sqlite"
    create(path, "0000abcd", {"capture.layers": "[1]"}, TOKENS, [BadRow(3, "x", "empty", "input_ids is empty")])
    return SqliteLedger(path)


async def test_a_new_ledger_has_everything_pending(ledger: SqliteLedger, tmp_path: Path) -> None:
    counts = await ledger.counts()
    assert (counts.pending, counts.committed, counts.quarantined, counts.rejected) == (4, 0, 0, 1)
    assert (counts.tokens_total, counts.tokens_committed, counts.bytes_committed) == (26, 0, 0)
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        assert reader.fingerprint == {"capture.layers": "[1]"}
        assert list(reader.rejected()) == [BadRow(3, "x", "empty", "input_ids is empty")]
        assert reader.run == ledger.run == "0000abcd"
        assert reader.longest() == 8
    await ledger.close()


async def test_a_sample_is_committed_once(ledger: SqliteLedger) -> None:
    (lease,) = await ledger.acquire(1)
    await ledger.commit([entry(ledger.run, lease)])
    with pytest.raises(RunError, match="not pending") as caught:
        await ledger.commit([entry(ledger.run, lease)])
    assert caught.value.kind == "ledger_failed"
    assert (await ledger.counts()).committed == 1
    await ledger.close()


async def test_a_group_is_committed_whole_or_not_at_all(ledger: SqliteLedger) -> None:
    first, second = await ledger.acquire(2)
    await ledger.commit([entry(ledger.run, first)])
    with pytest.raises(RunError, match="not pending"):
        await ledger.commit([entry(ledger.run, second), entry(ledger.run, first)])
    state, _ = await ledger.attempts_of(second.sample.index) or ("", None)
    assert state == "pending"
    await ledger.close()


async def test_attempts_are_durable_before_a_lease_is_out(ledger: SqliteLedger, tmp_path: Path) -> None:
    leases = await ledger.acquire(3)
    with LedgerReader(tmp_path / "ledger.sqlite") as other:
        assert [other.sample(lease.sample.index).attempts for lease in leases] == [1, 1, 1]
    await ledger.close()
    again = SqliteLedger(tmp_path / "ledger.sqlite")
    assert [lease.attempt for lease in await again.acquire(4)] == [2, 2, 2, 1]
    await again.close()


async def test_an_epoch_goes_on_until_it_has_ended_and_never_after(ledger: SqliteLedger, tmp_path: Path) -> None:
    assert await ledger.epoch_began(RECORD) is False
    assert await ledger.epoch_began(RECORD) is True
    assert await ledger.epoch_began(replace(RECORD, epoch="e2")) is False
    assert await ledger.voided_epochs() == {}
    await ledger.epoch_ended("e1", "alive", "server died")
    with LedgerReader(tmp_path / "ledger.sqlite") as reader:
        epoch, _ = reader.epochs()
        assert (epoch.epoch, epoch.reason, epoch.evidence) == ("e1", "alive", "server died")
    with pytest.raises(EngineError, match="epoch e1 has ended: alive: server died") as caught:
        await ledger.epoch_began(RECORD)
    assert caught.value.kind == "epoch_void"
    await ledger.close()
    again = SqliteLedger(tmp_path / "ledger.sqlite")
    assert await again.voided_epochs() == {"e1": "alive"}
    assert await again.epoch_began(replace(RECORD, epoch="e2")) is True
    await again.close()


async def test_canaries_and_fixed_facts(ledger: SqliteLedger) -> None:
    assert [await ledger.next_canary() for _ in range(3)] == [1, 2, 3]
    assert await ledger.fix("engine", "sglang 0.5.23") == "sglang 0.5.23"
    assert await ledger.fix("engine", "sglang 0.5.18") == "sglang 0.5.23"
    await ledger.close()


async def test_requeue_forgives_failures(ledger: SqliteLedger) -> None:
    (lease,) = await ledger.acquire(1)
    marker = Marker(ledger.run, 0, 1, 5)
    await ledger.fail(lease, marker, "e1", "finite", "a NaN", quarantine=True)
    assert (await ledger.counts()).quarantined == 1
    assert await ledger.requeue([1, 2]) == 0
    assert await ledger.requeue(None) == 1
    assert (await ledger.counts()).pending == 4
    await ledger.close()


async def test_pauses_do_not_count_in_the_rate(ledger: SqliteLedger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with LedgerReader(path) as reader:
        assert reader.tokens_per_second() is None
    for lease in await ledger.acquire(4):
        await ledger.commit([entry(ledger.run, lease)])
    await ledger.close()
    # Two group commits of 2 samples, 10 s apart: 15 tokens in the second one. The same with a night in between.
    for times, expected in [((0, 0, 10, 10), 1.5), ((0, 10, 40_000, 40_004), (6 + 8) / 14), ((0, 60, 120, 180), None)]:
        with sqlite3.connect(path) as db:
            db.executemany("UPDATE samples SET committed_at = ? WHERE idx = ?", [(t, i) for i, t in enumerate(times)])
        db.close()
        with LedgerReader(path) as reader:
            assert reader.tokens_per_second() == expected


@pytest.mark.parametrize("name", ["a#b %41 ü?c", "x?mode=memory", "%00"])
async def test_any_folder_will_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "ledger.sqlite"
    path.parent.mkdir()
    create(path, "0000abcd", {}, TOKENS, [])
    ledger = SqliteLedger(path)
    assert len(await ledger.acquire(9)) == 4
    await ledger.close()
    with LedgerReader(path) as reader:
        assert (reader.run, reader.sample(0).attempts) == ("0000abcd", 1)
    assert os.listdir(tmp_path) == [name]  # noqa: PTH208 - pathlib's is flagged in a coroutine


def test_a_ledger_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "there").mkdir()
    (tmp_path / "draft" / "ledger.new").mkdir(parents=True)
    (tmp_path / "taken" / "ledger.sqlite").mkdir(parents=True)
    for folder in ("file", "nowhere", "draft", "taken"):
        with pytest.raises(RunError, match=f"{folder}/ledger.sqlite") as caught:
            create(tmp_path / folder / "ledger.sqlite", new_run(), {}, TOKENS, [])
        assert caught.value.kind == "ledger_failed"


def test_a_new_ledger_needs_no_writer_to_be_read(tmp_path: Path) -> None:
    """Its first use changes nothing in it: a crash in the middle of a change of mode would lock every reader out."""
    path = tmp_path / "ledger.sqlite"
    path.with_name("ledger.new-journal").write_bytes(b"of a killed one")
    create(path, "deadbeef", {}, [1, 2, 3], [])
    before = path.read_bytes()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    connect(path).close()
    assert path.read_bytes() == before


def test_a_full_disk_under_the_ledger(small_disk: Path) -> None:
    with pytest.raises(RunError, match="full") as caught:
        create(small_disk / "ledger.sqlite", new_run(), {}, range(200_000), [])
    assert caught.value.kind == "ledger_failed"
    assert not (small_disk / "ledger.sqlite").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [("DELETE FROM meta WHERE key = 'run'", "KeyError: 'run'"), ("UPDATE meta SET value = '{'", "JSONDecodeError")],
)
@pytest.mark.parametrize("opened", [LedgerReader, MoveLedger, SqliteLedger])
def test_a_ledger_without_its_facts_is_explained(
    tmp_path: Path, change: str, words: str, opened: Callable[[Path], object]
) -> None:
    path = tmp_path / "ledger.sqlite"
    create(path, new_run(), {}, [1], [])
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(RunError, match=f"its facts cannot be read: {words}") as caught:
        opened(path)
    assert caught.value.kind == "ledger_failed"


def test_a_missing_or_broken_ledger_is_explained(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is missing"):
        SqliteLedger(tmp_path / "none.sqlite")
    (tmp_path / "noise.sqlite").write_bytes(b"x" * 5000)
    with pytest.raises(RunError, match=r"noise\.sqlite") as caught:
        SqliteLedger(tmp_path / "noise.sqlite")
    assert caught.value.kind == "ledger_failed"
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE meta (key, value)")
    other.close()
    with pytest.raises(RunError, match="schema version 0; expected 4"):
        LedgerReader(tmp_path / "other.sqlite")


def test_an_unknown_sample_is_named(tmp_path: Path) -> None:
    create(tmp_path / "l.sqlite", new_run(), {}, TOKENS, [])
    with LedgerReader(tmp_path / "l.sqlite") as reader, pytest.raises(RunError, match="no sample 9") as caught:
        reader.sample(9)
    assert caught.value.kind == "sample_unknown"


class LedgerMachine(RuleBasedStateMachine):
    """Any order of leases, commits, failures and crashes: the ledger agrees with a plain dictionary."""

    @initialize()
    def start(self) -> None:
        import tempfile
        from pathlib import Path

        self.loop = asyncio.new_event_loop()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "ledger.sqlite"
        create(self.path, new_run(), {}, TOKENS, [])
        self.ledger = SqliteLedger(self.path)
        self.do(self.ledger.epoch_began(RECORD))
        self.vouched = 0
        self.state = dict.fromkeys(range(4), "pending")
        self.attempts = dict.fromkeys(range(4), 0)
        self.out: list[Lease] = []

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    @rule(limit=st.integers(1, 5))
    def acquire(self, limit: int) -> None:
        leases = self.do(self.ledger.acquire(limit))
        leased = {lease.sample.index for lease in self.out}
        free = [i for i in range(4) if self.state[i] == "pending" and i not in leased]
        assert len(leases) == min(limit, len(free))
        for lease in leases:
            assert lease.sample.index in free
            self.attempts[lease.sample.index] += 1
            assert lease.attempt == self.attempts[lease.sample.index]
        self.out += leases

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.do(self.ledger.commit([entry(self.ledger.run, lease)]))
        self.state[lease.sample.index] = "committed"

    @precondition(lambda self: self.out)
    @rule(data=st.data(), quarantine=st.booleans())
    def fail(self, data: st.DataObject, quarantine: bool) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        marker = Marker(self.ledger.run, lease.sample.index, lease.attempt, lease.sample.tokens)
        self.do(self.ledger.fail(lease, marker, "e1", "finite", "a NaN", quarantine=quarantine))
        if quarantine:
            self.state[lease.sample.index] = "quarantined"

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        self.do(self.ledger.give_back([lease]))

    @rule(vouched=st.integers(0, 5))
    def vouch(self, vouched: int) -> None:
        self.do(self.ledger.vouch("e1", vouched))
        self.vouched = max(self.vouched, vouched)

    @rule()
    def revoke(self) -> None:
        doubtful = [i for i in range(4) if self.state[i] == "committed" and i + 1 > self.vouched]
        assert [row.index for row in self.do(self.ledger.doubtful("e1"))] == doubtful
        assert [row.index for row in self.do(self.ledger.revoke("e1", "fingerprint", "other states"))] == doubtful
        self.state |= dict.fromkeys(doubtful, "pending")

    @rule(indices=st.sets(st.integers(0, 3)))
    def requeue_damaged(self, indices: set[int]) -> None:
        damaged = [i for i in sorted(indices) if self.state[i] == "committed"]
        assert [row.index for row in self.do(self.ledger.requeue_damaged(indices, "chunk", "a bit"))] == damaged
        self.state |= dict.fromkeys(damaged, "pending")

    @rule()
    def requeue(self) -> None:
        freed = self.do(self.ledger.requeue(None))
        assert freed == sum(state == "quarantined" for state in self.state.values())
        # A requeued sample is seen by the next run; this one's cursor has passed it.
        self.crash()
        self.state = {i: "pending" if s == "quarantined" else s for i, s in self.state.items()}

    @rule()
    def crash(self) -> None:
        self.do(self.ledger.close())
        self.ledger = SqliteLedger(self.path)
        self.out = []

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "ledger"):
            counts = self.do(self.ledger.counts())
            states = list(self.state.values())
            found = (counts.pending, counts.committed, counts.quarantined)
            assert found == tuple(states.count(s) for s in ("pending", "committed", "quarantined"))
            with LedgerReader(self.path) as reader:
                assert reader.counts() == counts

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            self.do(self.ledger.close())
            self.loop.close()
            self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


async def test_leases_on_chosen_samples_come_before_their_turn_and_only_once(ledger: SqliteLedger) -> None:
    (first,) = await ledger.acquire(1)
    assert [lease.sample.index for lease in await ledger.acquire(9, only={0, 2})] == [2]  # 0 is leased
    await ledger.give_back([first])
    assert [lease.sample.index for lease in await ledger.acquire(9, only={0, 2})] == [0]
    assert [lease.sample.index for lease in await ledger.acquire(1)] == [1]
    assert [lease.sample.index for lease in await ledger.acquire(1)] == [3]  # passes by 2
    assert await ledger.acquire(9) == []
    await ledger.close()


async def test_a_limit_loses_none_of_the_chosen(ledger: SqliteLedger) -> None:
    await ledger.give_back(await ledger.acquire(4))
    found = [lease.sample.index for _ in range(3) for lease in await ledger.acquire(2, only={0, 1, 2, 3})]
    assert found == [0, 1, 2, 3]
    await ledger.close()
