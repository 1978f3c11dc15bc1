"""The ledger: the durable record of what is committed, and the local source of leases.

One thread writes it. A sample is pending, committed or quarantined; that it is leased is known only to this process, so a
crash frees it. Memory is bounded: pending samples are read by a cursor, and only those that came back are held.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sqlite3
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from hsx.core.epoch import EpochRecord, to_json
from hsx.core.sample import Lease, Sample
from hsx.errors import EngineError, RunError
from hsx.ports import BadRow, Commit, CommittedRow, Counts
from hsx.stores.durable import sync_folder
from hsx.stores.ledger_schema import (
    COMMITTED,
    SCHEMA,
    SCHEMA_VERSION,
    TRUST,
    VIOLATIONS_BY_INVARIANT,
    connect,
    count,
    translated,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from hsx.core.marker import Marker

T = TypeVar("T")

UNVOUCHED = "epoch = :epoch AND sequence > ifnull((SELECT vouched FROM epochs WHERE epoch = :epoch), 0)"
"""Of the committed samples, those of one epoch that no canary vouches for."""


def new_run() -> str:
    """A run id: 8 hex digits that no other job has, in all likelihood."""
    return secrets.token_hex(4)


def create(path: Path, run: str, fingerprint: Mapping[str, str], tokens: Iterable[int], rejected: Iterable[BadRow]) -> None:
    """Makes the ledger of a new job; the file appears under its name only when it is whole.

    Args:
        path: where; must not exist.
        run: the job's run id, which its store carries too.
        fingerprint: the settings under which the job may be resumed.
        tokens: prompt length of each sample, in index order.
        rejected: dataset rows that are not samples.

    Raises:
        RunError: kind `ledger_failed`.
    """
    draft = path.with_suffix(".new")
    with translated(path):
        draft.unlink(missing_ok=True)
        connection = sqlite3.connect(draft)
        try:
            connection.executescript(SCHEMA + TRUST)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION:d}")
            meta = {"run": run, "fingerprint": json.dumps(dict(fingerprint), sort_keys=True)}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.executemany("INSERT INTO samples (idx, tokens) VALUES (?, ?)", enumerate(map(int, tokens)))
            rows = ((r.line, r.sample_id, r.reason, r.message) for r in rejected)
            connection.executemany("INSERT OR REPLACE INTO rejected VALUES (?, ?, ?, ?)", rows)
            connection.commit()
        finally:
            connection.close()
        draft.rename(path)
        sync_folder(path.parent)


class SqliteLedger:
    """Implements `hsx.ports.Ledger`.

    Args:
        path: a ledger made by `create`.

    Raises:
        RunError: kind `ledger_failed`, from here and from every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hsx-ledger")
        self._cursor = -1
        self._returned: deque[int] = deque()
        self._ahead: set[int] = set()
        with translated(path):
            meta = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
            self._counts = count(self._connection)
        self.run: str = meta["run"]
        self.fingerprint: dict[str, str] = json.loads(meta["fingerprint"])

    # --- leases

    async def acquire(self, limit: int, only: Collection[int] | None = None) -> list[Lease]:
        """Up to `limit` leases, attempts made durable first; samples that came back go last. See the port."""
        return await self._do(self._acquire, limit, only)

    def _acquire(self, limit: int, only: Collection[int] | None) -> list[Lease]:
        indices = self._fresh(limit) if only is None else self._free_among(only, limit)
        if only is None:
            # What came back goes last: so a server that fails everything fails many samples once, and not a few for good.
            indices += [self._returned.popleft() for _ in range(min(limit - len(indices), len(self._returned)))]
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
        self._returned.extend(lease.sample.index for lease in leases)

    def _fresh(self, limit: int) -> list[int]:
        """The next pending samples that were never leased by this process."""
        query = "SELECT idx FROM samples WHERE state = 'pending' AND idx > ? ORDER BY idx LIMIT ?"
        while fresh := [idx for (idx,) in self._connection.execute(query, (self._cursor, limit))]:
            self._cursor = fresh[-1]
            found = [idx for idx in fresh if idx not in self._ahead]
            self._ahead = {idx for idx in self._ahead if idx > self._cursor}
            if found:
                return found
        return []

    def _free_among(self, only: Collection[int], limit: int) -> list[int]:
        """Those of `only` that nobody has leased, taken out of where they wait."""
        found: list[int] = []
        for idx in sorted(only):
            if len(found) == limit:
                break
            if idx in self._returned:
                self._returned.remove(idx)  # in place: the event loop may be adding to it
                found.append(idx)
            elif idx > self._cursor and idx not in self._ahead:
                query = "SELECT 1 FROM samples WHERE idx = ? AND state = 'pending'"
                if self._connection.execute(query, (idx,)).fetchone():
                    self._ahead.add(idx)  # the cursor will come to it, and pass it by
                    found.append(idx)
        return found

    # --- outcomes

    async def commit(self, group: Sequence[Commit]) -> None:
        """Marks a group committed in one transaction: here, and nowhere else, data becomes real."""
        await self._do(self._commit, group)

    def _commit(self, group: Sequence[Commit]) -> None:
        now = time.time()
        with self._transaction() as db:
            for entry in group:
                receipt = entry.receipt
                changed = db.execute(
                    "UPDATE samples SET state = 'committed', marker = ?, epoch = ?, sequence = ?, root = ?, nbytes = ?, "
                    "crc32c = ?, timings = ?, adopted = ?, committed_at = ?, reason = NULL, evidence = NULL "
                    "WHERE idx = ? AND state = 'pending'",
                    (
                        str(entry.marker),
                        entry.epoch,
                        entry.sequence,
                        receipt.root,
                        receipt.nbytes,
                        receipt.crc32c,
                        json.dumps({name: round(seconds, 6) for name, seconds in entry.timings.items()}),
                        entry.adopted,
                        now,
                        entry.lease.sample.index,
                    ),
                ).rowcount
                if changed != 1:
                    index = entry.lease.sample.index
                    raise RunError("ledger_failed", f"ledger {self._path}: sample {index} is not pending; expected one commit")
        tokens = sum(entry.lease.sample.tokens for entry in group)
        self._move(
            pending=-len(group),
            committed=len(group),
            tokens_committed=tokens,
            bytes_committed=sum(entry.receipt.nbytes for entry in group),
        )

    async def fail(self, lease: Lease, marker: Marker, epoch: str, reason: str, evidence: str, *, quarantine: bool) -> None:
        """Records a failure by the sample's own fault; the sample is free again, or quarantined."""
        await self._do(self._fail, lease, marker, epoch, reason, evidence, quarantine)
        if not quarantine:
            self._returned.append(lease.sample.index)

    def _fail(self, lease: Lease, marker: Marker, epoch: str, reason: str, evidence: str, quarantine: bool) -> None:
        idx = lease.sample.index
        with self._transaction() as db:
            db.execute(
                "INSERT INTO failures (at, idx, marker, epoch, reason, evidence, quarantined) VALUES (?, ?, ?, ?, ?, ?, ?)",
                (time.time(), idx, str(marker), epoch, reason, evidence, quarantine),
            )
            db.execute(
                "UPDATE samples SET failures = failures + 1, marker = ?, epoch = ?, reason = ?, evidence = ?, "
                "state = CASE WHEN ? THEN 'quarantined' ELSE state END WHERE idx = ? AND state = 'pending'",
                (str(marker), epoch, reason, evidence, quarantine, idx),
            )
        if quarantine:
            self._move(pending=-1, quarantined=1)

    # --- epochs

    async def epoch_began(self, record: EpochRecord) -> bool:
        """Records an epoch with its record; True where it was known already, and goes on.

        Raises EngineError `epoch_void` for an epoch that has ended: it is never begun again.
        """
        return await self._do(self._epoch_began, record)

    def _epoch_began(self, record: EpochRecord) -> bool:
        with self._transaction() as db:
            known = db.execute("SELECT ended, reason, evidence FROM epochs WHERE epoch = ?", (record.epoch,)).fetchone()
            if known is None:
                db.execute(
                    "INSERT INTO epochs (epoch, began, record) VALUES (?, ?, ?)", (record.epoch, time.time(), to_json(record))
                )
            elif known[0] is not None:
                raise EngineError("epoch_void", f"epoch {record.epoch} has ended: {known[1]}: {known[2]}; expected another")
        return known is not None

    async def epoch_ended(self, epoch: str, reason: str, evidence: str, requeued: Sequence[int] = ()) -> None:
        """Records why an epoch was voided, and which samples went back to the queue for it.

        One that is merely left, by a drain or a crash of hsx, has not ended.
        """
        await self._do(
            self._write,
            "UPDATE epochs SET ended = ?, reason = ?, evidence = ?, requeued = ? WHERE epoch = ?",
            (time.time(), reason, evidence, json.dumps(list(requeued)), epoch),
        )

    async def voided_epochs(self) -> dict[str, str]:
        """The epochs that have ended, with the reason: no server of theirs may be used again, by whatever run."""
        query = "SELECT epoch, ifnull(reason, '') FROM epochs WHERE ended IS NOT NULL"
        return dict(await self._do(lambda: self._connection.execute(query).fetchall()))

    # --- trust

    async def violation(self, epoch: str, marker: Marker | None, invariant: str, evidence: str) -> None:
        """Records one violation; `marker` is None where it speaks of the whole run."""
        await self._do(
            self._write,
            "INSERT INTO violations (at, epoch, marker, invariant, evidence) VALUES (?, ?, ?, ?, ?)",
            (time.time(), epoch, None if marker is None else str(marker), invariant, evidence),
        )

    async def violations_by_invariant(self) -> dict[str, int]:
        """How often each invariant did not hold so far, in the whole job, by its name."""
        return await self._do(lambda: dict(self._connection.execute(VIOLATIONS_BY_INVARIANT).fetchall()))

    async def vouch(self, epoch: str, sequence: int) -> None:
        """Every dump of `epoch` up to this capture number lies before a sound canary. It never goes down."""
        await self._do(self._write, "UPDATE epochs SET vouched = max(vouched, ?) WHERE epoch = ?", (sequence, epoch))

    async def doubtful(self, epoch: str) -> list[CommittedRow]:
        """The committed samples of `epoch` that no sound canary vouches for, in the order of their capture."""
        return await self._do(self._doubtful, epoch)

    def _doubtful(self, epoch: str) -> list[CommittedRow]:
        query = f"{COMMITTED} AND {UNVOUCHED} ORDER BY sequence"
        return [CommittedRow(*row) for row in self._connection.execute(query, {"epoch": epoch})]

    async def unvouched(self, but: str = "") -> list[str]:
        """The epochs other than `but` of which `doubtful` would return something, oldest first."""
        query = (
            "SELECT s.epoch FROM samples s LEFT JOIN epochs e ON e.epoch = s.epoch "
            "WHERE s.state = 'committed' AND s.epoch != ? AND s.sequence > ifnull(e.vouched, 0) "
            "GROUP BY s.epoch ORDER BY e.began"
        )
        return [epoch for (epoch,) in await self._do(lambda: self._connection.execute(query, (but,)).fetchall())]

    async def last_doubtful(self, epoch: str, limit: int) -> list[CommittedRow]:
        """The last `limit` of `doubtful`, the latest capture first."""
        query = f"{COMMITTED} AND {UNVOUCHED} ORDER BY sequence DESC LIMIT :limit"
        values = {"epoch": epoch, "limit": limit}
        return [CommittedRow(*row) for row in await self._do(lambda: self._connection.execute(query, values).fetchall())]

    async def doubt(self, epoch: str, invariant: str, evidence: str) -> None:
        """Records that what `doubtful` returns has to be revoked, before it can be: until then, `overdue` says so."""
        verdict = json.dumps([invariant, evidence])
        await self._do(self._write, "UPDATE epochs SET doubt = ? WHERE epoch = ?", (verdict, epoch))

    async def overdue(self) -> list[tuple[str, str, str]]:
        """(epoch, invariant, evidence) of each `doubt` that no `revoke` has followed: hsx crashed in between."""
        query = "SELECT epoch, doubt FROM epochs WHERE doubt IS NOT NULL ORDER BY began"
        rows = await self._do(lambda: self._connection.execute(query).fetchall())
        return [(epoch, *json.loads(verdict)) for epoch, verdict in rows]

    async def revoke(self, epoch: str, invariant: str, evidence: str) -> list[CommittedRow]:
        """Takes back, in one transaction, every sample of `epoch` that no sound canary vouches for.

        They are pending again and handed out by `acquire`, in this process too; their attempts are kept, so that no marker is
        used twice, and their failures. Nothing is recorded where nothing was doubtful.

        Returns:
            What the ledger said of them, in the order of their capture: where the shards lie that are to be discarded.
        """
        return await self._do(self._revoke, epoch, invariant, evidence)

    def _revoke(self, epoch: str, invariant: str, evidence: str) -> list[CommittedRow]:
        with self._transaction() as db:
            rows = self._doubtful(epoch)
            db.execute("UPDATE epochs SET doubt = NULL WHERE epoch = ?", (epoch,))
            if rows:
                indices = [row.index for row in rows]
                db.execute(
                    "INSERT INTO revocations (at, epoch, invariant, evidence, samples) VALUES (?, ?, ?, ?, ?)",
                    (time.time(), epoch, invariant, evidence, json.dumps(indices)),
                )
                db.executemany(
                    "UPDATE samples SET state = 'pending', marker = NULL, epoch = NULL, sequence = NULL, root = NULL, "
                    "nbytes = NULL, crc32c = NULL, timings = NULL, adopted = NULL, committed_at = NULL WHERE idx = ?",
                    ((index,) for index in indices),
                )
        # Those beyond the cursor are met by it, and would be leased twice if they were kept too.
        self._returned.extend(row.index for row in rows if row.index <= self._cursor)
        self._ahead -= {row.index for row in rows}
        self._move(
            pending=len(rows),
            committed=-len(rows),
            tokens_committed=-sum(row.tokens for row in rows),
            bytes_committed=-sum(row.nbytes for row in rows),
        )
        return rows

    async def remember(self, key: str, value: str) -> None:
        """Records a fact that may change; `recall` returns it."""
        await self._do(
            self._write, "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
        )

    async def recall(self, key: str) -> str | None:
        """The fact last recorded under `key`; None where there is none."""
        return await self._do(self._recall, key)

    def _recall(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    async def next_canary(self) -> int:
        """A number for a canary's marker, from 1, durably never given twice."""
        return await self._do(self._next_canary)

    def _next_canary(self) -> int:
        with self._transaction() as db:
            db.execute(
                "INSERT INTO meta VALUES ('canaries', '1') "
                "ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT)"
            )
        return int(self._connection.execute("SELECT value FROM meta WHERE key = 'canaries'").fetchone()[0])

    async def fix(self, key: str, value: str) -> str:
        """Records a fact once, such as the server's version, and returns what is recorded: the first value given."""
        await self._do(self._write, "INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        return await self._do(self._meta, key)

    # --- reading

    async def attempts_of(self, index: int) -> tuple[str, Lease] | None:
        """State of one sample and the lease of its last attempt; None where there is no such sample."""
        row = await self._do(
            lambda: self._connection.execute(
                "SELECT state, tokens, attempts, failures FROM samples WHERE idx = ?", (index,)
            ).fetchone()
        )
        return None if row is None else (row[0], Lease(Sample(index, row[1]), row[2], row[3]))

    async def counts(self) -> Counts:
        """The job's totals, kept up to date in memory."""
        return self._counts

    def revoked(self) -> set[int]:
        """The samples that were revoked and are not committed again: a shard of theirs is not to be kept. Blocks."""
        query = (
            "SELECT DISTINCT samples.idx FROM revocations, json_each(revocations.samples) AS given "
            "JOIN samples ON samples.idx = given.value WHERE samples.state != 'committed'"
        )
        with translated(self._path):
            reader = connect(self._path, read_only=True)
            try:
                return {index for (index,) in reader.execute(query)}
            finally:
                reader.close()

    def committed_roots(self) -> Iterator[tuple[int, str]]:
        """(index, root) of every committed sample, in order. Blocks; on a connection of its own."""
        with translated(self._path):
            reader = connect(self._path, read_only=True)
            try:
                yield from reader.execute("SELECT idx, root FROM samples WHERE state = 'committed' ORDER BY idx")
            finally:
                reader.close()

    async def requeue(self, indices: Sequence[int] | None) -> int:
        """Frees quarantined samples (all of them for None), forgiving their failures; returns how many."""
        return await self._do(self._requeue, indices)

    def _requeue(self, indices: Sequence[int] | None) -> int:
        update = (
            "UPDATE samples SET state = 'pending', failures = 0, reason = NULL, evidence = NULL WHERE state = 'quarantined'"
        )
        with self._transaction() as db:
            if indices is None:
                freed = db.execute(update).rowcount
            else:
                freed = sum(db.execute(f"{update} AND idx = ?", (idx,)).rowcount for idx in indices)
        self._move(pending=freed, quarantined=-freed)
        return freed

    async def close(self) -> None:
        """Ends the writer thread and closes the file."""
        await self._do(self._connection.close)
        self._thread.shutdown()

    # --- plumbing

    async def _do(self, work: Callable[..., T], *args: object) -> T:
        # Shielded: a transaction that has begun finishes, and its caller may not be told otherwise by a cancellation.
        with translated(self._path):
            return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, work, *args))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _write(self, statement: str, values: tuple[object, ...]) -> None:
        with self._transaction() as db:
            db.execute(statement, values)

    def _meta(self, key: str) -> str:
        return str(self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()[0])

    def _move(self, **changes: int) -> None:
        fields = {name: getattr(self._counts, name) + change for name, change in changes.items()}
        self._counts = Counts(**{**_as_dict(self._counts), **fields})


def _as_dict(counts: Counts) -> dict[str, int]:
    return {name: getattr(counts, name) for name in Counts.__slots__}
