"""The ledger's tables, and how a connection to them is opened.

WAL with synchronous=FULL: a transaction that returned survives a power cut, and readers (status, `hsx show`, `hsx verify`)
never block the one writer.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError
from hsx.records import Counts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_NAME: Final = "ledger.sqlite"
SCHEMA_VERSION: Final = 4
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
    epoch TEXT PRIMARY KEY, began REAL NOT NULL, ended REAL, reason TEXT, evidence TEXT, record TEXT NOT NULL,
    requeued TEXT, vouched INTEGER NOT NULL DEFAULT 0, doubt TEXT
) STRICT;
CREATE TABLE rejected (
    line INTEGER PRIMARY KEY, sample_id TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL
) STRICT;
"""
"""The tables of version 1, with the columns that `epochs` has now."""
TRUST: Final = """
CREATE TABLE violations (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, epoch TEXT NOT NULL, marker TEXT, invariant TEXT NOT NULL, evidence TEXT NOT NULL
) STRICT;
CREATE INDEX fired ON violations (invariant);
CREATE TABLE revocations (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, epoch TEXT NOT NULL, invariant TEXT NOT NULL, evidence TEXT NOT NULL,
    samples TEXT NOT NULL
) STRICT;
"""
TOTALS: Final = """
CREATE INDEX captured ON samples (epoch, sequence) WHERE state = 'committed';
CREATE TABLE totals (
    state TEXT PRIMARY KEY, samples INTEGER NOT NULL, tokens INTEGER NOT NULL, nbytes INTEGER NOT NULL
) STRICT;
CREATE TRIGGER moved AFTER UPDATE OF state, nbytes ON samples
WHEN old.state != new.state OR ifnull(old.nbytes, 0) != ifnull(new.nbytes, 0)
BEGIN
    UPDATE totals SET samples = samples - 1, tokens = tokens - old.tokens, nbytes = nbytes - ifnull(old.nbytes, 0)
    WHERE state = old.state;
    UPDATE totals SET samples = samples + 1, tokens = tokens + new.tokens, nbytes = nbytes + ifnull(new.nbytes, 0)
    WHERE state = new.state;
END;
"""
"""What version 3 has besides, so that no start of a run has to read every row: ten million of them take minutes."""
RECKONED: Final = """
INSERT INTO totals (state, samples, tokens, nbytes)
    SELECT given.value, count(idx), ifnull(sum(tokens), 0), ifnull(sum(nbytes), 0)
    FROM json_each('["pending", "committed", "quarantined"]') AS given LEFT JOIN samples ON state = given.value GROUP BY 1;
INSERT OR REPLACE INTO meta SELECT 'longest', CAST(ifnull(max(tokens), 0) AS TEXT) FROM samples;
"""
"""Fills `totals` once all samples are in the ledger; from then on its trigger keeps them."""
TWINS: Final = """
ALTER TABLE samples ADD COLUMN same_as INTEGER;
ALTER TABLE samples ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
CREATE INDEX twins ON samples (same_as, idx) WHERE same_as IS NOT NULL;
ALTER TABLE totals ADD COLUMN shared INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN shared_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE totals ADD COLUMN shared_nbytes INTEGER NOT NULL DEFAULT 0;
DROP TRIGGER moved;
CREATE TRIGGER moved AFTER UPDATE OF state, nbytes, shared ON samples
WHEN old.state != new.state OR ifnull(old.nbytes, 0) != ifnull(new.nbytes, 0) OR old.shared != new.shared
BEGIN
    UPDATE totals SET samples = samples - 1, tokens = tokens - old.tokens,
        nbytes = nbytes - ifnull(old.nbytes, 0) * (1 - old.shared), shared = shared - old.shared,
        shared_tokens = shared_tokens - old.tokens * old.shared,
        shared_nbytes = shared_nbytes - ifnull(old.nbytes, 0) * old.shared
    WHERE state = old.state;
    UPDATE totals SET samples = samples + 1, tokens = tokens + new.tokens,
        nbytes = nbytes + ifnull(new.nbytes, 0) * (1 - new.shared), shared = shared + new.shared,
        shared_tokens = shared_tokens + new.tokens * new.shared,
        shared_nbytes = shared_nbytes + ifnull(new.nbytes, 0) * new.shared
    WHERE state = new.state;
END;
"""
"""What version 4 has besides: samples with identical prompts. All of one group have the group's first sample in `same_as`; the
others have NULL. `shared` is 1 for a committed sample whose shard is a link to that of another one of its group: its bytes are
counted apart, as they are on the disk once."""
_OF_SAMPLES_1: Final = (
    "'prompt_tokens', 'uncached', 'epoch', 'expected', 'rows', 'tokens_equal', 'finite', 'nonzero_rows', 'not_repeated', "
    "'published'"
)
_VIOLATIONS_1: Final = f"""
SELECT at, epoch, marker, reason AS invariant, evidence FROM failures WHERE reason IN ({_OF_SAMPLES_1})
UNION ALL SELECT ended, epoch, NULL, reason, evidence FROM epochs
WHERE ended IS NOT NULL AND reason IN ('advancing', 'alive', 'canary')
"""  # noqa: S608 - made of constants
"""What version 1 knew of violations: those that failed an attempt, and those that voided an epoch for the run's sake."""
COMMITTED: Final = "SELECT idx, root, crc32c, nbytes, tokens, marker, epoch, sequence FROM samples WHERE state = 'committed'"
"""The fields of `hsx.records.CommittedRow`, in order, of every committed sample."""
SHARING: Final = f"""
{COMMITTED} AND same_as = (SELECT same_as FROM samples WHERE idx = ?) AND root = ? AND marker = ? ORDER BY idx
"""  # noqa: S608 - made of constants
"""Given (index, root, marker) of a committed sample: all whose shard there is the same file, where it has twins; else none."""
VIOLATIONS_BY_INVARIANT: Final = "SELECT invariant, count(*) FROM violations GROUP BY invariant ORDER BY invariant"
MIGRATIONS: Final[dict[int, str]] = {
    1: f"""
{TRUST}
INSERT INTO violations (at, epoch, marker, invariant, evidence) {_VIOLATIONS_1};
ALTER TABLE epochs ADD COLUMN requeued TEXT;
ALTER TABLE epochs ADD COLUMN vouched INTEGER NOT NULL DEFAULT 0;
ALTER TABLE epochs ADD COLUMN doubt TEXT;
""",
    2: TOTALS + RECKONED,
    3: TWINS,
}
"""By version: the statements that turn a ledger of that version into one of the next."""
SHOWN_AS_CURRENT: Final[dict[int, str]] = {
    1: f"""
CREATE TEMP VIEW violations AS {_VIOLATIONS_1.replace("FROM epochs", "FROM main.epochs")};
CREATE TEMP VIEW revocations AS SELECT NULL AS id, NULL AS at, NULL AS epoch, NULL AS invariant, NULL AS evidence,
    NULL AS samples WHERE 0;
CREATE TEMP VIEW epochs AS SELECT epoch, began, ended, reason, evidence, record, NULL AS requeued, 0 AS vouched
    FROM main.epochs;
""",  # noqa: S608 - made of constants
    2: """
CREATE TEMP VIEW totals AS SELECT state, count(*) AS samples, sum(tokens) AS tokens, ifnull(sum(nbytes), 0) AS nbytes,
    0 AS shared, 0 AS shared_tokens, 0 AS shared_nbytes FROM main.samples GROUP BY state;
""",
    3: """
CREATE TEMP VIEW IF NOT EXISTS totals AS SELECT state, samples, tokens, nbytes, 0 AS shared, 0 AS shared_tokens,
    0 AS shared_nbytes FROM main.totals;
CREATE TEMP VIEW samples AS SELECT idx, tokens, state, attempts, failures, marker, epoch, sequence, root, nbytes, crc32c,
    timings, adopted, committed_at, reason, evidence, NULL AS same_as, 0 AS shared FROM main.samples;
""",
}
"""By version: temporary views under which a reader, who may change nothing, sees an older ledger as one of the next."""


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns the errors of SQLite and of the file system into RunError `ledger_failed`, naming the file."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise RunError("ledger_failed", f"ledger {path}: {type(error).__name__}: {error}") from error


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Opens an existing ledger. One of an older version is brought up to date, or, read-only, shown as if it were.

    Raises RunError `ledger_failed`.
    """
    with translated(path):
        if not path.is_file():
            raise RunError("ledger_failed", f"ledger {path} is missing; expected it to be made by hsx run")
        mode = "ro" if read_only else "rw"
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, check_same_thread=False)
        try:
            connection.isolation_level = None
            connection.execute("PRAGMA busy_timeout = 30000")
            if read_only:
                _show_as_current(connection, path)
            else:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = FULL")
                _migrate(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def facts_of(connection: sqlite3.Connection, path: Path) -> tuple[str, dict[str, str]]:
    """The run id and the fingerprint of a ledger. Raises RunError `ledger_failed`, and closes the connection then."""
    try:
        with translated(path):
            meta = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        try:
            return meta["run"], json.loads(meta["fingerprint"])
        except (KeyError, ValueError) as error:
            message = f"ledger {path}: its facts cannot be read: {type(error).__name__}: {error}"
            raise RunError("ledger_failed", message) from error
    except BaseException:
        connection.close()
        raise


def _version(connection: sqlite3.Connection, path: Path) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > SCHEMA_VERSION:
        raise RunError(
            "ledger_failed",
            f"ledger {path} has schema version {version}; expected {SCHEMA_VERSION} or older: "
            "a newer hsx has written it, and only that one or a newer one can go on",
        )
    if version != SCHEMA_VERSION and version not in MIGRATIONS:
        raise RunError("ledger_failed", f"ledger {path} has schema version {version}; expected {SCHEMA_VERSION}")
    return version


def _migrate(connection: sqlite3.Connection, path: Path) -> None:
    """Brings the tables up to date, each step in one transaction with its version number."""
    while _version(connection, path) != SCHEMA_VERSION:
        connection.execute("BEGIN IMMEDIATE")
        try:
            version = _version(connection, path)  # read again under the lock: another may have done it meanwhile
            if version != SCHEMA_VERSION:
                for statement in _statements(MIGRATIONS[version]):
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {version + 1:d}")
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: `executescript` would commit what is under way."""
    statement = ""
    for piece in script.split(";"):
        statement += piece + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _show_as_current(connection: sqlite3.Connection, path: Path) -> None:
    for version in range(_version(connection, path), SCHEMA_VERSION):
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.executescript(SHOWN_AS_CURRENT[version])


def count(db: sqlite3.Connection) -> Counts:
    """A job's totals, as the ledger keeps them."""
    totals = dict.fromkeys(("pending", "committed", "quarantined"), (0,) * 6)
    query = "SELECT state, samples, tokens, nbytes, shared, shared_tokens, shared_nbytes FROM totals"
    for state, *numbers in db.execute(query):
        totals[state] = tuple(numbers)
    (rejected,) = db.execute("SELECT count(*) FROM rejected").fetchone()
    return Counts(
        pending=totals["pending"][0],
        committed=totals["committed"][0],
        quarantined=totals["quarantined"][0],
        rejected=rejected,
        tokens_total=sum(t[1] for t in totals.values()),
        tokens_committed=totals["committed"][1],
        bytes_committed=totals["committed"][2],
        shared=totals["committed"][3],
        tokens_shared=totals["committed"][4],
        bytes_shared=totals["committed"][5],
    )
