"""The ledger's tables, and how a connection to them is opened.

WAL with synchronous=FULL: a transaction that returned survives a power cut, and readers (status, `hsx show`, `hsx verify`)
never block the one writer.
"""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError
from hsx.ports import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_NAME: Final = "ledger.sqlite"
SCHEMA_VERSION: Final = 1
SCHEMA: Final = """
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
"""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns the errors of SQLite and of the file system into RunError `ledger_failed`, naming the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise RunError("ledger_failed", f"ledger {path}: {type(error).__name__}: {error}") from error


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Opens an existing ledger; checks its schema version. Raises RunError `ledger_failed`."""
    with translated(path):
        if not path.is_file():
            raise RunError("ledger_failed", f"ledger {path} is missing; expected it to be made by hsx run")
        mode = "ro" if read_only else "rw"
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, check_same_thread=False)
        connection.isolation_level = None
        connection.execute("PRAGMA busy_timeout = 30000")
        if not read_only:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION:
        connection.close()
        raise RunError("ledger_failed", f"ledger {path} has schema version {version}; expected {SCHEMA_VERSION}")
    return connection


def count(db: sqlite3.Connection) -> Counts:
    """A job's totals, read from all rows."""
    totals = {"pending": (0, 0, 0), "committed": (0, 0, 0), "quarantined": (0, 0, 0)}
    query = "SELECT state, count(*), sum(tokens), ifnull(sum(nbytes), 0) FROM samples GROUP BY state"
    for state, samples, tokens, nbytes in db.execute(query):
        totals[state] = (samples, tokens, nbytes)
    (rejected,) = db.execute("SELECT count(*) FROM rejected").fetchone()
    return Counts(
        pending=totals["pending"][0],
        committed=totals["committed"][0],
        quarantined=totals["quarantined"][0],
        rejected=rejected,
        tokens_total=sum(t[1] for t in totals.values()),
        tokens_committed=totals["committed"][1],
        bytes_committed=totals["committed"][2],
    )
