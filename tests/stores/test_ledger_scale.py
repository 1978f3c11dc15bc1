"""What a run asks of its ledger costs the same whatever the number of samples: counted in steps of SQLite, not in seconds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

from hsx.core.marker import Marker
from hsx.records import Commit, Receipt
from hsx.stores.ledger import SqliteLedger, create

if TYPE_CHECKING:
    from pathlib import Path

RUN = "0000abcd"


class CountedLedger(SqliteLedger):
    """Counts the instructions of SQLite's virtual machine."""

    def __init__(self, path: Path) -> None:
        self.steps = 0
        super().__init__(path)
        self._connection.set_progress_handler(self._step, 1)

    def _step(self) -> int:
        self.steps += 1
        return 0


def make(path: Path, rows: int) -> None:
    """Half of the samples committed, in two epochs of which one is vouched for."""
    create(path, RUN, {}, [7] * rows, [])
    with closing(sqlite3.connect(path)) as db:
        db.execute(
            "UPDATE samples SET state = 'committed', attempts = 1, marker = 'm', epoch = 'e' || (idx % 2), sequence = idx, "
            "root = 'a', nbytes = 10, crc32c = 1, committed_at = 1.0 WHERE idx < ?",
            (rows // 2,),
        )
        db.executemany("INSERT INTO epochs (epoch, began, record, vouched) VALUES (?, 1.0, '{}', ?)", [("e0", rows), ("e1", 0)])
        db.commit()


async def steps(path: Path) -> dict[str, int]:
    ledger = CountedLedger(path)
    found: dict[str, int] = {}

    def note(name: str) -> None:
        found[name] = ledger.steps
        ledger.steps = 0

    assert await ledger.unvouched() == ["e1"]
    note("unvouched")
    assert len(await ledger.last_doubtful("e1", 8)) == 8
    note("last_doubtful")
    leases = await ledger.acquire(8)
    note("acquire")
    group = [
        Commit(
            lease,
            Marker(RUN, lease.sample.index, lease.attempt, 7),
            "e1",
            lease.sample.index,
            Receipt("a", 10, 1),
            {},
            adopted=False,
        )
        for lease in leases
    ]
    await ledger.commit(group)
    note("commit")
    await ledger.vouch("e1", leases[3].sample.index)
    note("vouch")
    assert len(await ledger.doubtful("e1")) == 4
    note("doubtful")
    assert len(await ledger.requeue_damaged([0, 1], "chunk", "a bit")) == 2
    note("requeue_damaged")
    await ledger.close()
    return found


async def test_steps_do_not_grow_with_the_samples(tmp_path: Path) -> None:
    make(tmp_path / "few.sqlite", 200)
    make(tmp_path / "many.sqlite", 20_000)
    few, many = await steps(tmp_path / "few.sqlite"), await steps(tmp_path / "many.sqlite")
    assert {name: count for name, count in many.items() if count > 2 * few[name]} == {}
