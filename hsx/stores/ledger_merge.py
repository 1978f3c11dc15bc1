"""Lays what shards say of themselves over a ledger that is being built again: which of them count as commits."""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

REBUILT: Final = "ledger_rebuilt"
"""What the ledger records as the reason: for the end of servers, and for taking back commits that only a copy knew."""
REBUILT_FROM: Final = "rebuilt_from"
"""Key of the fact that tells which run a ledger was built again from; so a rebuild that was cut short is known."""
_FOUND: Final = """
CREATE TEMP TABLE found (
    idx INTEGER NOT NULL, root TEXT NOT NULL, attempt INTEGER NOT NULL, marker TEXT NOT NULL, epoch TEXT NOT NULL,
    sequence INTEGER NOT NULL, nbytes INTEGER NOT NULL, crc32c INTEGER NOT NULL, written REAL NOT NULL, shared INTEGER NOT NULL
) STRICT
"""
_CHOOSE: Final = (
    "CREATE TEMP TABLE taken_back AS SELECT DISTINCT r.epoch AS epoch, given.value AS idx "
    "FROM revocations r, json_each(r.samples) AS given WHERE r.epoch != ''",
    "CREATE INDEX temp.by_sample ON taken_back (idx, epoch)",
    "DELETE FROM found WHERE EXISTS (SELECT 1 FROM taken_back t WHERE t.idx = found.idx AND t.epoch = found.epoch)",
    "CREATE TEMP TABLE best (idx INTEGER PRIMARY KEY, root TEXT, attempt INTEGER, marker TEXT, epoch TEXT, sequence INTEGER, "
    "nbytes INTEGER, crc32c INTEGER, written REAL, shared INTEGER)",
    "INSERT INTO best SELECT idx, root, attempt, marker, epoch, sequence, nbytes, crc32c, written, shared FROM ("
    "SELECT *, row_number() OVER (PARTITION BY idx ORDER BY attempt DESC, written DESC, root) AS place FROM found) "
    "WHERE place = 1",
)
"""The newest attempt wins; of one attempt that was being moved, either copy will do. What was revoked stays so."""
_TAKE_BACK: Final = (
    "INSERT INTO revocations (at, epoch, invariant, evidence, samples) "
    "SELECT :now, '', :reason, 'a copy of the ledger has them as committed; no sound shard of them was found', "
    "json_group_array(idx) FROM samples WHERE state = 'committed' AND idx NOT IN (SELECT idx FROM best) HAVING count(*)",
    "UPDATE samples SET state = 'pending', marker = NULL, epoch = NULL, sequence = NULL, root = NULL, nbytes = NULL, "
    "crc32c = NULL, timings = NULL, adopted = NULL, committed_at = NULL, shared = 0 "
    "WHERE state = 'committed' AND idx NOT IN (SELECT idx FROM best)",
)
_COMMIT: Final = (
    "UPDATE samples SET state = 'committed', shared = best.shared, "
    "attempts = CASE WHEN best.shared THEN samples.attempts ELSE max(samples.attempts, best.attempt) END, "
    "timings = CASE WHEN samples.marker = best.marker THEN ifnull(samples.timings, '{}') ELSE '{}' END, "
    "adopted = CASE WHEN samples.marker = best.marker THEN ifnull(samples.adopted, 0) ELSE 0 END, "
    "committed_at = CASE WHEN samples.marker = best.marker THEN ifnull(samples.committed_at, best.written) "
    "ELSE best.written END, "
    "marker = best.marker, epoch = best.epoch, sequence = best.sequence, root = best.root, nbytes = best.nbytes, "
    "crc32c = best.crc32c, reason = NULL, evidence = NULL FROM best WHERE samples.idx = best.idx",
    "INSERT OR IGNORE INTO epochs (epoch, began, record) SELECT epoch, min(written), '{}' FROM best GROUP BY epoch",
)
_END: Final = (
    "UPDATE epochs SET ended = :now, reason = :reason, "
    "evidence = 'the ledger was lost, and with it what was known of this server; start another' WHERE ended IS NULL",
)


@dataclass(frozen=True, slots=True)
class Found:
    """A proved shard, by its own record.

    Attributes:
        index: the sample.
        root: where it lies.
        attempt: out of its marker.
        marker: the attempt whose dump was stored.
        epoch: the life of the server.
        sequence: its number in that.
        nbytes: size of the file.
        crc32c: of the payload.
        written: when the file was last written, in Unix seconds.
        shared: it is the attempt of another sample, with the same prompt.
    """

    index: int
    root: str
    attempt: int
    marker: str
    epoch: str
    sequence: int
    nbytes: int
    crc32c: int
    written: float
    shared: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """What became of it: shards that are not taken though they are sound, and commits that were not found again."""

    superseded: int
    missing: int


class Merge:
    """One merge into a ledger that nobody else has open: within one transaction of its caller.

    Args:
        db: the ledger, a copy of an older state or a new one.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        db.execute(_FOUND)

    def add(self, found: Iterable[Found]) -> None:
        """Proved shards, in any order; more than one of a sample is fine."""
        self._db.executemany("INSERT INTO found VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", map(astuple, found))

    def finish(self, run: str, source: str, servers: Iterable[tuple[str, float, str]]) -> Merged:
        """Makes the newest of them the commits, and takes all others back.

        Args:
            run: the new run id.
            source: the run that the ledger is built again from.
            servers: (epoch, since in Unix seconds, record as JSON) of the servers that may still be there: what was known of
                them is lost, so they are never used again.
        """
        db = self._db
        values = {"now": time.time(), "reason": REBUILT}
        (added,) = db.execute("SELECT count(*) FROM found").fetchone()
        for statement in _CHOOSE:
            db.execute(statement)
        (best,) = db.execute("SELECT count(*) FROM best").fetchone()
        (missing,) = db.execute(
            "SELECT count(*) FROM samples WHERE state = 'committed' AND idx NOT IN (SELECT idx FROM best)"
        ).fetchone()
        db.execute(_TAKE_BACK[0], values)
        for statement in (*_TAKE_BACK[1:], *_COMMIT):
            db.execute(statement)
        db.executemany("INSERT OR IGNORE INTO epochs (epoch, began, record) VALUES (?, ?, ?)", servers)
        for statement in _END:
            db.execute(statement, values)
        db.execute("DELETE FROM meta WHERE key = 'backed_up'")
        db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", (("run", run), (REBUILT_FROM, source)))
        return Merged(added - best, missing)
