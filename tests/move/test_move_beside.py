"""A run beside a move: revocations, new attempts, commits and starts fall into every gap between the steps of the move.

What a run does is done here at a step of the move in the same process: at the steps that hold no lock it gets in between; at
the others it would have to wait, which is shown as well.
"""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.locks import HOMES_LOCK
from hsx.records import Commit, CommittedRow
from hsx.stores.attach import attach_roots
from hsx.stores.group import forget_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.root import discard_strays
from hsx.testing.moving import SAMPLES
from hsx.testing.stores import EPOCH, RUN, payload, random_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.moving import MoveBench

OPEN: Final = ("copied", "linked", "named", "committed", "tidied")
"""Steps after which the move holds no lock."""
CLOSED: Final = ("shown", "switched", "discarded")
VOUCHED: Final = 2
"""Samples 0 and 1 stay; 3 and 6 of those on root a are revoked."""
MOMENTS = [(step, times) for step in OPEN for times in (1, 2)]


class Once:
    """Calls something as a step is reached for the n-th time, and never again."""

    def __init__(self, step: str, times: int, what: Callable[[], object]) -> None:
        self._step = step
        self._times = times
        self._what = what
        self.done = False

    def __call__(self, step: str) -> None:
        self._times -= step == self._step
        if self._times == 0 and not self.done:
            self.done = True
            self._what()


class RunBeside:
    """The parts of a run that touch committed samples, in the order in which it does that."""

    def __init__(self, bench: MoveBench) -> None:
        self.bench = bench
        self.ledger = SqliteLedger(bench.ledger_path)
        _, roots = attach_roots(bench.info, bench.places)
        self.roots = {root.name: root for root in roots}
        self.written: list[Commit] = []

    def revoke(self) -> list[CommittedRow]:
        """A canary failed: as `Vouching` and `Writer.revoke` do it."""

        async def revoke() -> list[CommittedRow]:
            await self.ledger.vouch(EPOCH, VOUCHED)
            return await self.ledger.revoke(EPOCH, "twins", "rows were mixed")

        rows = asyncio.run(revoke())
        for row in rows:
            self.bench.view.unlink(row.index)
        for row in rows:
            self.roots[row.root].discard(row.index)
        return rows

    def write_again(self) -> None:
        """New attempts of all that is pending, 3 to 5 on the root that is being emptied: booked before; not committed yet."""
        rng = np.random.default_rng(99)
        for lease in asyncio.run(self.ledger.acquire(SAMPLES)):
            index, tokens = lease.sample.index, lease.sample.tokens
            marker = Marker(RUN, index, lease.attempt, tokens)
            receipt = self.roots["cab"[index // 3]].write(payload(marker, random_states(rng, tokens, 3, 16)))
            self.written.append(Commit(lease, marker, "e2", index + 1, receipt, {}, adopted=False))

    def commit(self) -> None:
        """Commits what was written and shows it, as `Writer` does, with the right to change homes."""
        with self.bench.homes.held():
            asyncio.run(self.ledger.commit(self.written))
            for entry in self.written:
                self.bench.view.link(entry.lease.sample.index, entry.receipt.root)
                for name in self.roots.keys() - {entry.receipt.root}:
                    self.roots[name].discard(entry.lease.sample.index)
        self.written = []

    def start(self) -> None:
        """What a start does with roots and view, while a move is under way."""
        with self.bench.homes.held():
            for root in self.roots.values():
                root.sweep(moving=False)
            self.bench.view.repair(self.ledger.committed_roots())
            discard_strays(list(self.roots.values()), self.ledger.committed_roots(), SAMPLES, self.ledger.revoked())


@pytest.fixture
def beside(bench: MoveBench) -> RunBeside:
    """A run, beside the bench's moves."""
    return RunBeside(bench)


@pytest.mark.parametrize(("step", "times"), MOMENTS)
def test_a_revocation(bench: MoveBench, beside: RunBeside, step: str, times: int) -> None:
    revoke = Once(step, times, beside.revoke)
    report = bench.move("a", reached=revoke)
    assert revoke.done
    assert report.left == 0
    assert [row.index for row in bench.rows()] == [0, 1]
    bench.nothing_lost()
    assert bench.view.indices().tolist() == [0, 1]
    beside.start()
    bench.in_order()
    beside.write_again()
    beside.commit()
    bench.in_order()
    assert len(bench.rows()) == SAMPLES


@pytest.mark.parametrize(("step", "times"), MOMENTS)
def test_a_revocation_and_new_attempts_that_are_written_at_once(
    bench: MoveBench, beside: RunBeside, step: str, times: int
) -> None:
    def again() -> None:
        beside.revoke()
        beside.write_again()

    bench.move("a", reached=Once(step, times, again))
    beside.commit()
    bench.nothing_lost()
    bench.move("a", ["b", "c"])
    bench.in_order()
    assert {row.epoch for row in bench.rows() if row.index > 1} == {"e2"}


@pytest.mark.parametrize(("step", "times"), MOMENTS)
def test_a_revocation_and_new_attempts_that_are_committed_at_once(
    bench: MoveBench, beside: RunBeside, step: str, times: int
) -> None:
    def again() -> None:
        beside.revoke()
        beside.write_again()
        beside.commit()

    report = bench.move("a", reached=Once(step, times, again))
    assert report.left == 0
    bench.in_order()
    assert {row.epoch for row in bench.rows() if row.index > 1} == {"e2"}
    assert "a" not in bench.homes_now().values()


@pytest.mark.parametrize(("step", "times"), MOMENTS)
def test_a_run_that_starts(bench: MoveBench, beside: RunBeside, step: str, times: int) -> None:
    report = bench.move("a", reached=Once(step, times, beside.start))
    assert (report.moved, report.left) == (3, 0)
    bench.in_order()


def test_a_run_that_starts_without_the_target_ends_the_move(bench: MoveBench) -> None:
    """The job file was changed: the new root was taken out of it again, before anything lay there."""
    (bench.folder / "d").mkdir()
    info, _ = attach_roots(bench.info, {"d": bench.folder / "d"})
    bench.info = info
    forget = Once("named", 1, lambda: forget_roots(info, ["d"]))
    with pytest.raises(RunError, match=r"config_conflict.*root d is none of store .* any more"):
        bench.move("a", ["d"], reached=forget)
    assert bench.homes_now() == {index: "abc"[index % 3] for index in range(SAMPLES)}
    bench.nothing_lost()


@pytest.mark.parametrize("step", CLOSED)
def test_at_the_other_steps_a_run_has_to_wait(bench: MoveBench, step: str) -> None:
    def nobody_else_may() -> None:
        with (bench.folder / HOMES_LOCK).open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        db = sqlite3.connect(bench.ledger_path, timeout=0, isolation_level=None)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            db.execute("BEGIN IMMEDIATE")
        db.close()

    check = Once(step, 1, nobody_else_may)
    assert bench.move("a", reached=check).moved == 3
    assert check.done
    with (bench.folder / HOMES_LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it was given back


def test_turns_are_taken_by_threads_of_one_process_too(bench: MoveBench) -> None:
    with bench.homes.held(), (bench.folder / HOMES_LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
