"""Copies of the ledger on the roots, so that its disk is no single point of loss.

A copy is taken with SQLite's online backup while the run goes on: one consistent state, which the writer's thread does not
wait for. It is one file without a write-ahead log, and it appears under its name only when it is whole and on the disk.
"""

from __future__ import annotations

import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError
from hsx.stores.durable import root_error, sync_folder
from hsx.stores.ledger_schema import connect, translated

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

BACKUP_NAME: Final = "hsx-ledger.sqlite"
"""Name of a copy, in the folder of the store on a root."""
BACKED_UP: Final = "backed_up"
"""Key of the fact, in a copy, that tells when it was taken, in Unix seconds."""
_DRAFT: Final = f".{BACKUP_NAME}.tmp"


def backup(ledger: Path, folders: Mapping[str, Path]) -> dict[str, RunError | None]:
    """Copies a ledger to `BACKUP_NAME` in each folder, all at once. Blocks; one caller at a time.

    Args:
        ledger: the ledger; it may be written meanwhile.
        folders: by root name, the store's folder on that root.

    Returns:
        By root name: None, or why there is no new copy there; the one from before is still whole then. `roots_full` for want of
        space, `root_unusable` where the root failed, `ledger_failed` where the ledger cannot be read.
    """
    if not folders:
        return {}
    with ThreadPoolExecutor(len(folders), thread_name_prefix="hsx-backup") as pool:
        copies = {name: pool.submit(_copy, ledger, name, folder) for name, folder in folders.items()}
        return {name: copy.result() for name, copy in copies.items()}


def _copy(ledger: Path, root: str, folder: Path) -> RunError | None:
    draft = folder / _DRAFT
    try:
        _discard(draft)
        with closing(connect(ledger, read_only=True)) as source:
            _fill(source, draft)
        draft.rename(folder / BACKUP_NAME)
        sync_folder(folder)
    except RunError as error:
        return error  # of the ledger; nothing has been written yet
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            _discard(draft)
        if isinstance(error, OSError):
            return root_error(error, root, draft)
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        message = f"root {root}: {draft} cannot take a copy of the ledger: {type(error).__name__}: {error}"
        return RunError("roots_full" if full else "root_unusable", message)
    return None


def _discard(draft: Path) -> None:
    """Removes what a killed or failed copy left. Its journal must not meet the next one: it would be rolled back into it."""
    for name in (draft.name, f"{draft.name}-journal"):
        draft.with_name(name).unlink(missing_ok=True)


def _fill(source: sqlite3.Connection, draft: Path) -> None:
    """Writes the copy and brings it to the disk."""
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        with closing(sqlite3.connect(draft)) as copy:
            copy.isolation_level = None
            copy.execute("PRAGMA synchronous = OFF")  # one fsync at the end does for all
            source.backup(copy)
            copy.execute(
                "PRAGMA journal_mode = DELETE"
            )  # no log beside it, so that it can be read where nothing can be written
            copy.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (BACKED_UP, str(time.time())))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def backed_up(path: Path) -> float:
    """When a copy was taken, in Unix seconds; 0 for a ledger that is none. Raises RunError `ledger_failed`."""
    with closing(connect(path, read_only=True)) as db, translated(path):
        row = db.execute("SELECT value FROM meta WHERE key = ?", (BACKED_UP,)).fetchone()
    return 0.0 if row is None else float(row[0])


def refuse_copy(ledger: Path) -> None:
    """Refuses a ledger that is a copy, put in its place by hand: it does not know what was done since.

    Attempts would be counted again from where it stands, and markers used twice; shards would be missing that were moved.

    Raises RunError `ledger_failed`.
    """
    at = backed_up(ledger)
    if at:
        when = datetime.fromtimestamp(at, tz=UTC).isoformat(timespec="seconds")
        raise RunError(
            "ledger_failed",
            f"ledger {ledger} is a copy of how it was at {when}; expected the ledger itself, which knows what was done since: "
            "leave copies on the roots, and have it built again with hsx repair JOB --rebuild-ledger",
        )
