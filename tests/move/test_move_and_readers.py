"""What reads committed samples beside a move: those that vouch for a dead server, the run's commit, `hsx verify`, a reader."""

from __future__ import annotations

import asyncio
import fcntl
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest

import hsx
from hsx.clock import SystemClock
from hsx.core.marker import Marker
from hsx.core.sample import Lease, Sample
from hsx.epoch import LiveEpoch
from hsx.errors import RunError
from hsx.locks import HOMES_LOCK
from hsx.records import Commit, CommittedRow
from hsx.space import RootsSettings, Space
from hsx.stores.attach import attach_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.tokens import TokenTable
from hsx.stores.view import UnionView
from hsx.suspects import Suspects
from hsx.telemetry import Telemetry
from hsx.testing.moving import RECORD, SAMPLES
from hsx.testing.stores import EPOCH, RUN, payload, random_states
from hsx.vouching import Vouching
from hsx.writer import Writer, WriterSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hsx.canary import Canary
    from hsx.core.invariants import Violation
    from hsx.testing.moving import MoveBench


class AgreeingCanary:
    """Finds what is stored of every sample to be right; stands in for `hsx.canary.Canary`, which needs a server."""

    def __init__(self) -> None:
        self.asked: list[NDArray[np.uint16]] = []

    async def agrees(
        self, epoch: LiveEpoch, ids: NDArray[np.int32], stored: NDArray[np.uint16], kept: NDArray[np.int64] | None
    ) -> Violation | None:
        self.asked.append(stored)
        return None


class InterruptedLedger(SqliteLedger):
    """Something happens right after it has said where the last samples lie, the first time."""

    def __init__(self, bench: MoveBench, then: Callable[[], object]) -> None:
        super().__init__(bench.ledger_path)
        self._then: Callable[[], object] | None = then

    async def last_doubtful(self, epoch: str, limit: int) -> list[CommittedRow]:
        rows = await super().last_doubtful(epoch, limit)
        if self._then is not None:
            self._then()
            self._then = None
        return rows


class Stored:
    """The samples on the bench's roots."""

    def __init__(self, bench: MoveBench) -> None:
        self._roots = {root.name: root for root in attach_roots(bench.info, bench.places)[1]}
        self._table = TokenTable(bench.info.path)

    def read(self, row: CommittedRow) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64] | None]:
        return self._roots[row.root].read(row.index, row.tokens), self._table.input_ids(row.index), None

    async def revoke(self, rows: list[CommittedRow]) -> None:
        raise AssertionError(f"nothing is in doubt, and {rows} are revoked")


async def vouched(bench: MoveBench, then: Callable[[], object]) -> tuple[list[NDArray[np.uint16]], list[str], Telemetry]:
    """Has the next server vouch for the last one: what it was shown, the epochs that nobody vouches for, and the log."""
    ledger, canary, telemetry = InterruptedLedger(bench, then), AgreeingCanary(), Telemetry()
    clock = SystemClock()
    vouching = Vouching(0, cast("Canary", canary), ledger, Stored(bench), Suspects(ledger, telemetry), telemetry, clock)
    await vouching.passed(LiveEpoch(replace(RECORD, epoch="the next one")))
    left = await ledger.unvouched()
    await ledger.close()
    return canary.asked, left, telemetry


async def test_a_sample_that_vouches_for_a_dead_server_may_be_moved_meanwhile(bench: MoveBench) -> None:
    assert bench.rows()[-1].root == "c"
    asked, left, _ = await vouched(bench, lambda: bench.move("c", ["a", "b"]))
    assert [len(states) for states in asked] == [bench.rows()[-1].tokens]
    assert left == []
    bench.in_order()


async def test_one_that_is_gone_cannot_vouch(bench: MoveBench) -> None:
    shard = bench.info.folder("c") / f"c.{SAMPLES - 1}.0.0.0"
    asked, left, telemetry = await vouched(bench, shard.unlink)
    assert (asked, left) == ([], [EPOCH])
    assert "cannot vouch" in telemetry.snapshot()["last_errors"][0]["message"]


class WatchedView(UnionView):
    """Asks, whenever a sample is shown, whether somebody else might change homes."""

    def __init__(self, bench: MoveBench) -> None:
        super().__init__(bench.info)
        self._lock = bench.folder / HOMES_LOCK
        self.free: list[bool] = []

    def link(self, index: int, root: str) -> None:
        with self._lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.free.append(False)
            else:
                self.free.append(True)
        super().link(index, root)


async def test_nothing_is_moved_between_a_commit_and_its_link(bench: MoveBench) -> None:
    ledger = SqliteLedger(bench.ledger_path)
    await ledger.revoke(EPOCH, "twins", "rows were mixed")
    (lease, *_) = await ledger.acquire(1)
    _, roots = attach_roots(bench.info, bench.places)
    telemetry, clock, view = Telemetry(), SystemClock(), WatchedView(bench)
    space = Space(roots, RootsSettings(), clock, telemetry)
    settings = WriterSettings(threads=1, group_samples=1, group_seconds=0.01)
    writer = Writer(roots, space, view, ledger, TokenTable(bench.info.path), telemetry, clock, settings, bench.homes)
    committing = asyncio.create_task(writer.run())
    tokens = lease.sample.tokens
    marker = Marker(RUN, lease.sample.index, lease.attempt, tokens)
    receipt = await writer.write(
        payload(marker, random_states(np.random.default_rng(5), tokens, 3, 16)), await space.book(1 << 16)
    )
    assert receipt is not None
    lease = Lease(Sample(lease.sample.index, tokens), lease.attempt, lease.failures)
    assert await writer.commit(Commit(lease, marker, "e2", 1, receipt, {}, adopted=False))
    await writer.close()
    await committing
    writer.shutdown()
    space.shutdown()
    await ledger.close()
    assert view.free == [False]
    view.link(lease.sample.index, receipt.root)
    assert view.free == [False, True]


def test_a_reader_that_looks_again_and_again_sees_every_sample_all_the_time(bench: MoveBench) -> None:
    store = hsx.open(bench.info.path)
    before = [store.hidden_states_numpy(index) for index in range(SAMPLES)]
    seen = 0

    def look(_step: str) -> None:
        nonlocal seen
        for index in range(SAMPLES):
            assert np.array_equal(store.hidden_states_numpy(index), before[index])
        seen += 1

    bench.move("a", reached=look)
    bench.move("b", ["c"], reached=look)
    assert seen > 20


def test_homes_cannot_be_changed_where_there_is_no_state_folder(bench: MoveBench) -> None:
    (bench.folder / HOMES_LOCK).unlink(missing_ok=True)
    (bench.folder / HOMES_LOCK).mkdir()
    with pytest.raises(RunError, match=r"ledger_failed.*homes.lock cannot be locked: Is a directory"):
        bench.move("a")
    assert bench.shards("a") == [0, 3, 6]
