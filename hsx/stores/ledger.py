"""The ledger: the durable record of what is committed, and the local source of leases.

One thread writes it. A sample is pending, committed or quarantined; that it is leased is known only to this process, so a
crash frees it. Memory is bounded, and no start reads all rows. Here are leases and outcomes; what is known of servers and trust
is in `ledger_trust`, the tables are in `ledger_schema`.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from typing import TYPE_CHECKING

from hsx.core.sample import Lease, Sample
from hsx.errors import RunError
from hsx.stores.ledger_backup import backup
from hsx.stores.ledger_create import create, new_run
from hsx.stores.ledger_schema import connect, translated
from hsx.stores.ledger_trust import TrustLedger

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hsx.core.marker import Marker
    from hsx.records import Commit

__all__ = ["SqliteLedger", "create", "new_run"]


class SqliteLedger(TrustLedger):
    """Implements `hsx.ports.Ledger`.

    Args:
        path: a ledger made by `create`.

    Raises:
        RunError: kind `ledger_failed`, from here and from every method.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._copied: dict[Path, tuple[int, int]] = {}

    # --- leases

    async def acquire(self, limit: int, only: Collection[int] | None = None) -> list[Lease]:
        """Up to `limit` leases, attempts made durable first; samples that came back go last. See the port."""
        return await self._do(self._acquire, limit, only)

    def _acquire(self, limit: int, only: Collection[int] | None) -> list[Lease]:
        indices = self._free.next(limit) if only is None else self._free.among(only, limit)
        leases = []
        with self._transaction() as db:
            for idx in indices:
                row = db.execute(
                    "UPDATE samples SET attempts = attempts + 1 WHERE idx = ? AND state = 'pending' "
                    "RETURNING tokens, attempts, failures",
                    (idx,),
                ).fetchone()
                if row is None:
                    raise RunError("ledger_failed", f"ledger {self._path}: sample {idx} is not pending; expected it to be free")
                leases.append(Lease(Sample(idx, row[0]), row[1], row[2]))
        return leases

    async def give_back(self, leases: Iterable[Lease]) -> None:
        """Frees samples whose attempts were given up by no fault of theirs."""
        self._free.give_back(lease.sample.index for lease in leases)

    # --- outcomes

    async def twins(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """The pending samples with the same prompts as leased ones, kept from being handed out. See the port."""
        return await self._do(lambda: {idx: twins for idx in indices if (twins := self._free.claim(idx))})

    async def commit(self, group: Sequence[Commit]) -> None:
        """Marks a group committed in one transaction: here, and nowhere else, data becomes real."""
        await self._do(self._commit, group)

    def _commit(self, group: Sequence[Commit]) -> None:
        now = time.time()
        with self._moving() as db:
            for entry in group:
                timings = json.dumps({name: round(seconds, 6) for name, seconds in entry.timings.items()})
                self._commit_one(db, entry, entry.lease.sample.index, timings, shared=False, now=now)
                for twin in entry.shared:
                    self._commit_one(db, entry, twin, "{}", shared=True, now=now)
        self._free.settle(entry.lease.sample.index for entry in group)

    def _commit_one(self, db: sqlite3.Connection, entry: Commit, index: int, timings: str, *, shared: bool, now: float) -> None:
        receipt = entry.receipt
        changed = db.execute(
            "UPDATE samples SET state = 'committed', marker = ?, epoch = ?, sequence = ?, root = ?, nbytes = ?, crc32c = ?, "
            "timings = ?, adopted = ?, committed_at = ?, shared = ?, reason = NULL, evidence = NULL "
            "WHERE idx = ? AND state = 'pending'",
            (
                str(entry.marker),
                entry.epoch,
                entry.sequence,
                receipt.root,
                receipt.nbytes,
                receipt.crc32c,
                timings,
                entry.adopted,
                now,
                shared,
                index,
            ),
        ).rowcount
        if changed != 1:
            raise RunError("ledger_failed", f"ledger {self._path}: sample {index} is not pending; expected one commit")

    async def fail(self, lease: Lease, marker: Marker, epoch: str, reason: str, evidence: str, *, quarantine: bool) -> None:
        """Records a failure by the sample's own fault; the sample is free again, or quarantined."""
        await self._do(self._fail, lease, marker, epoch, reason, evidence, quarantine)
        if not quarantine:
            self._free.give_back([lease.sample.index])

    def _fail(self, lease: Lease, marker: Marker, epoch: str, reason: str, evidence: str, quarantine: bool) -> None:
        idx = lease.sample.index
        with self._moving() as db:
            db.execute(
                "INSERT INTO failures (at, idx, marker, epoch, reason, evidence, quarantined) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (time.time(), idx, str(marker), epoch, reason, evidence, quarantine),
            )
            db.execute(
                "UPDATE samples SET failures = failures + 1, marker = ?, epoch = ?, reason = ?, evidence = ?, "
                "state = CASE WHEN ? THEN 'quarantined' ELSE state END WHERE idx = ? AND state = 'pending'",
                (str(marker), epoch, reason, evidence, quarantine, idx),
            )
            # The same request would fail in the same way, and may kill the server again. Each is listed with what was tried.
            why = f"its prompt is that of sample {idx}, which was quarantined: {evidence}"
            db.executemany(
                "UPDATE samples SET marker = ?, epoch = ?, reason = ?, evidence = ?, state = 'quarantined' "
                "WHERE idx = ? AND state = 'pending'",
                ((str(marker), epoch, reason, why, twin) for twin in (self._free.claim(idx) if quarantine else ())),
            )
        if quarantine:
            self._free.settle([idx])

    # --- reading

    async def attempts_of(self, index: int, *, hold: bool = False) -> tuple[str, Lease] | None:
        """State of one sample and the lease of its last attempt; None where there is no such sample. See the port."""
        return await self._do(self._attempts_of, index, hold)

    def _attempts_of(self, index: int, hold: bool) -> tuple[str, Lease] | None:
        query = "SELECT state, tokens, attempts, failures FROM samples WHERE idx = ?"
        row = self._connection.execute(query, (index,)).fetchone()
        if row is None:
            return None
        free = not hold or row[0] != "pending" or self._free.hold(index)
        return (row[0] if free else "shared", Lease(Sample(index, row[1]), row[2], row[3]))

    def revoked(self) -> Iterator[int]:
        """The samples that were revoked and are not committed again: a shard of theirs is not to be kept. Blocks.

        In no order, and one that was revoked twice comes twice; on a connection of its own.
        """
        query = (
            "SELECT samples.idx FROM revocations, json_each(revocations.samples) AS given "
            "JOIN samples ON samples.idx = given.value WHERE samples.state != 'committed'"
        )
        with translated(self._path), closing(connect(self._path, read_only=True)) as reader:
            for (index,) in reader.execute(query):
                yield index

    def committed_roots(self) -> Iterator[tuple[int, str]]:
        """(index, root) of every committed sample, in order. Blocks; on a connection of its own."""
        with translated(self._path), closing(connect(self._path, read_only=True)) as reader:
            yield from reader.execute("SELECT idx, root FROM samples WHERE state = 'committed' ORDER BY idx")

    def homes(self) -> dict[str, int]:
        """How many committed samples lie on each root. Blocks: it reads all rows, on a connection of its own."""
        with translated(self._path):
            reader = connect(self._path, read_only=True)
            try:
                return dict(reader.execute("SELECT root, count(*) FROM samples WHERE state = 'committed' GROUP BY root"))
            finally:
                reader.close()

    async def requeue(self, indices: Sequence[int] | None) -> int:
        """Frees quarantined samples (all of them for None), forgiving their failures; returns how many.

        With each go those with the same prompt: they would be the same request.
        """
        return await self._do(self._requeue, indices)

    def _requeue(self, indices: Sequence[int] | None) -> int:
        update = (
            "UPDATE samples SET state = 'pending', failures = 0, reason = NULL, evidence = NULL WHERE state = 'quarantined'"
        )
        with self._moving() as db:
            if indices is None:
                freed = db.execute(update).rowcount
            else:
                same = "(idx = ?1 OR same_as = (SELECT same_as FROM samples WHERE idx = ?1))"
                freed = sum(db.execute(f"{update} AND {same}", (idx,)).rowcount for idx in indices)
        return freed

    async def backup(self, folders: Mapping[str, Path]) -> dict[str, RunError | None]:
        """Copies the ledger to each of these folders, by root name, while the run goes on; see `hsx.stores.ledger_backup`.

        A folder whose copy by this process is still up to date is passed by.
        """
        state = await self._do(self._changes)
        due = {name: folder for name, folder in folders.items() if self._copied.get(folder) != state}
        copies = await asyncio.to_thread(backup, self._path, due)
        self._copied.update({folder: state for name, folder in due.items() if copies[name] is None})
        return {name: copies.get(name) for name in folders}

    def _changes(self) -> tuple[int, int]:
        """Another pair after each change of the ledger, by this connection or another."""
        (version,) = self._connection.execute("PRAGMA data_version").fetchone()
        return self._connection.total_changes, version
