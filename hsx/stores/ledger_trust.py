"""What the ledger knows of trust: epochs, violations, what canaries vouch for, and what was committed and taken back.

Each DP rank of a server numbers its dumps by itself, and is vouched for by canaries of its own: what it captured is a stream
(`hsx.core.epoch.stream_name`), with a row in `epochs` of its own, which begins and ends with its epoch.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import EpochRecord, stream_name, to_json
from hsx.errors import EngineError
from hsx.records import CommittedRow
from hsx.stores.ledger_connection import LedgerConnection
from hsx.stores.ledger_schema import COMMITTED, SHARING, VIOLATIONS_BY_INVARIANT

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping, Sequence

    from hsx.core.marker import Marker

_UNVOUCHED: Final = "epoch = :epoch AND sequence > ifnull((SELECT vouched FROM epochs WHERE epoch = :epoch), 0)"
"""Of the committed samples, those of one epoch that no canary vouches for."""
_STREAMS: Final = "SELECT epoch FROM epochs WHERE epoch = :epoch OR epoch GLOB :epoch || '.*'"
"""The streams of one epoch."""
_END: Final = f"""
UPDATE epochs SET ended = :now, reason = :reason, evidence = :evidence,
    requeued = CASE WHEN epoch = :epoch THEN :requeued END WHERE epoch IN ({_STREAMS})
"""  # noqa: S608 - made of constants
_DOUBT: Final = f"UPDATE epochs SET doubt = :verdict WHERE epoch IN ({_STREAMS})"  # noqa: S608 - made of constants
_UNVOUCHED_EPOCHS: Final = """
WITH RECURSIVE known (epoch) AS (
    SELECT min(epoch) FROM samples WHERE state = 'committed'
    UNION ALL
    SELECT (SELECT min(epoch) FROM samples WHERE state = 'committed' AND epoch > known.epoch)
    FROM known WHERE known.epoch IS NOT NULL
)
SELECT known.epoch FROM known LEFT JOIN epochs e ON e.epoch = known.epoch
WHERE known.epoch IS NOT NULL AND known.epoch != :but AND known.epoch NOT GLOB :but || '.*' AND EXISTS (
    SELECT 1 FROM samples s
    WHERE s.state = 'committed' AND s.epoch = known.epoch AND s.sequence > ifnull(e.vouched, 0)
) ORDER BY e.began
"""
"""The recursion leaps from epoch to epoch along the index `captured`, so that its cost does not grow with the samples."""


class TrustLedger(LedgerConnection):
    """The ledger's side that speaks of servers, and of what they are trusted for."""

    async def epoch_began(self, record: EpochRecord, ranks: int = 1) -> bool:
        """Records an epoch with its record, and a stream for each of its DP ranks; True where it was known, and goes on.

        Raises EngineError `epoch_void` for an epoch that has ended: it is never begun again.
        """
        return await self._do(self._epoch_began, record, ranks)

    def _epoch_began(self, record: EpochRecord, ranks: int) -> bool:
        with self._transaction() as db:
            known = db.execute("SELECT ended, reason, evidence FROM epochs WHERE epoch = ?", (record.epoch,)).fetchone()
            if known is None:
                now, text = time.time(), to_json(record)
                rows = [(stream_name(record.epoch, rank), now, text) for rank in range(ranks)]
                db.executemany("INSERT INTO epochs (epoch, began, record) VALUES (?, ?, ?)", rows)
            elif known[0] is not None:
                raise EngineError("epoch_void", f"epoch {record.epoch} has ended: {known[1]}: {known[2]}; expected another")
        return known is not None

    async def epoch_ended(self, epoch: str, reason: str, evidence: str, requeued: Sequence[int] = ()) -> None:
        """Records why an epoch was voided, and which samples went back to the queue for it.

        One that is merely left, by a drain or a crash of hsx, has not ended.
        """
        await self._do(
            self._write,
            _END,
            {
                "now": time.time(),
                "reason": reason,
                "evidence": evidence,
                "requeued": json.dumps(list(requeued)),
                "epoch": epoch,
            },
        )

    async def voided_epochs(self) -> dict[str, str]:
        """The epochs that have ended, with the reason: no server of theirs may be used again, by whatever run."""
        query = "SELECT epoch, ifnull(reason, '') FROM epochs WHERE ended IS NOT NULL"
        return dict(await self._do(lambda: self._connection.execute(query).fetchall()))

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
        """Every dump of the stream `epoch` up to this capture number lies before a sound canary. It never goes down."""
        await self._do(self._write, "UPDATE epochs SET vouched = max(vouched, ?) WHERE epoch = ?", (sequence, epoch))

    async def doubtful(self, epoch: str) -> list[CommittedRow]:
        """The committed samples of the stream `epoch` that no sound canary vouches for, in the order of their capture."""
        return await self._do(self._doubtful, epoch)

    def _doubtful(self, epoch: str) -> list[CommittedRow]:
        query = f"{COMMITTED} AND {_UNVOUCHED} ORDER BY sequence"
        return [CommittedRow(*row) for row in self._connection.execute(query, {"epoch": epoch})]

    async def unvouched(self, but: str = "") -> list[str]:
        """The streams, but those of epoch `but`, of which `doubtful` would return something, oldest first."""
        values = {"but": but}
        return [epoch for (epoch,) in await self._do(lambda: self._connection.execute(_UNVOUCHED_EPOCHS, values).fetchall())]

    async def last_doubtful(self, epoch: str, limit: int) -> list[CommittedRow]:
        """The last `limit` of `doubtful`, the latest capture first."""
        query = f"{COMMITTED} AND {_UNVOUCHED} ORDER BY sequence DESC LIMIT :limit"
        values = {"epoch": epoch, "limit": limit}
        return [CommittedRow(*row) for row in await self._do(lambda: self._connection.execute(query, values).fetchall())]

    async def doubt(self, epoch: str, invariant: str, evidence: str) -> None:
        """Records that what `doubtful` returns of an epoch's streams has to be revoked, before it can be: until then, `overdue`
        says so.
        """
        values = {"verdict": json.dumps([invariant, evidence]), "epoch": epoch}
        await self._do(self._write, _DOUBT, values)

    async def overdue(self) -> list[tuple[str, str, str]]:
        """(stream, invariant, evidence) of each `doubt` that no `revoke` has followed: hsx crashed in between."""
        query = "SELECT epoch, doubt FROM epochs WHERE doubt IS NOT NULL ORDER BY began"
        rows = await self._do(lambda: self._connection.execute(query).fetchall())
        return [(epoch, *json.loads(verdict)) for epoch, verdict in rows]

    async def revoke(self, epoch: str, invariant: str, evidence: str) -> list[CommittedRow]:
        """Takes back, in one transaction, every sample of `epoch`, or of one stream, that no sound canary vouches for.

        They are pending again and handed out by `acquire`, in this process too; their attempts are kept, so that no marker is
        used twice, and their failures. Nothing is recorded where nothing was doubtful.

        Returns:
            What the ledger said of them, in the order of their capture within a stream: where the shards lie that are to be
            discarded.
        """
        return await self._do(self._revoke, epoch, invariant, evidence)

    def _revoke(self, epoch: str, invariant: str, evidence: str) -> list[CommittedRow]:
        with self._moving() as db:
            known = db.execute(_STREAMS, {"epoch": epoch}).fetchall()
            rows = [row for stream in sorted({epoch, *(name for (name,) in known)}) for row in self._doubtful(stream)]
            db.execute(_DOUBT, {"epoch": epoch, "verdict": None})
            _take_back(db, rows, epoch, invariant, evidence)
        self._free.reopened([row.index for row in rows])
        return rows

    async def requeue_damaged(
        self, indices: Iterable[int], invariant: str, evidence: str, *, where: Mapping[int, str] | None = None
    ) -> list[CommittedRow]:
        """Takes back, in one transaction, those of these samples that are committed: their shards are not what was committed.

        As after `revoke` they are pending again, with their attempts, and handed out by `acquire`, in this process too. With
        each go those that share its shard: it is one file.
        Recorded as a revocation of no epoch; nothing is recorded where none of them is committed.

        Args:
            indices: the samples; in any order, and few enough for one transaction.
            invariant: what does not hold, such as a kind of damage.
            evidence: what was expected and what was found.
            where: the root on which each was found damaged; one that was moved to another root meanwhile is left alone.

        Returns:
            What the ledger said of them, in index order: where the shards lie that are to be discarded.
        """
        return await self._do(self._requeue_damaged, sorted(set(indices)), invariant, evidence, where)

    def _requeue_damaged(
        self, indices: list[int], invariant: str, evidence: str, where: Mapping[int, str] | None
    ) -> list[CommittedRow]:
        with self._moving() as db:
            found = (db.execute(f"{COMMITTED} AND idx = ?", (index,)).fetchone() for index in indices)
            rows = [CommittedRow(*row) for row in found if row is not None]
            rows = [row for row in rows if where is None or where.get(row.index) == row.root]
            rows = _with_twins(db, rows)
            _take_back(db, rows, "", invariant, evidence)
        self._free.reopened([row.index for row in rows])
        return rows

    async def next_canary(self) -> int:
        """A number for a canary's marker, from 1, durably never given twice."""
        return await self._do(self._next_canary)

    def _next_canary(self) -> int:
        with self._transaction() as db:
            query = (
                "INSERT INTO meta VALUES ('canaries', '1') "
                "ON CONFLICT (key) DO UPDATE SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) RETURNING value"
            )
            ((number,),) = db.execute(query).fetchall()
        return int(number)


def _take_back(db: sqlite3.Connection, rows: list[CommittedRow], epoch: str, invariant: str, evidence: str) -> None:
    """Makes committed samples pending again, within a transaction, and records why."""
    if not rows:
        return
    indices = [row.index for row in rows]
    db.execute(
        "INSERT INTO revocations (at, epoch, invariant, evidence, samples) VALUES (?, ?, ?, ?, ?)",
        (time.time(), epoch, invariant, evidence, json.dumps(indices)),
    )
    db.executemany(
        "UPDATE samples SET state = 'pending', marker = NULL, epoch = NULL, sequence = NULL, root = NULL, "
        "nbytes = NULL, crc32c = NULL, timings = NULL, adopted = NULL, committed_at = NULL, shared = 0 WHERE idx = ?",
        ((index,) for index in indices),
    )


def _with_twins(db: sqlite3.Connection, rows: list[CommittedRow]) -> list[CommittedRow]:
    """These samples, and those whose shard is the same file, in index order."""
    found = {row.index: row for row in rows}
    for row in rows:
        for twin in db.execute(SHARING, (row.index, row.root, row.marker)):
            found.setdefault(twin[0], CommittedRow(*twin))
    return [found[index] for index in sorted(found)]
