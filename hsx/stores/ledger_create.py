"""How the ledger of a new job is made."""

from __future__ import annotations

import json
import secrets
import sqlite3
from typing import TYPE_CHECKING

from hsx.stores.durable import sync_folder
from hsx.stores.ledger_schema import RECKONED, SCHEMA, SCHEMA_VERSION, TOTALS, TRUST, TWINS, translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from hsx.records import BadRow


def new_run() -> str:
    """A run id: 8 hex digits that no other job has, in all likelihood."""
    return secrets.token_hex(4)


def create(
    path: Path,
    run: str,
    fingerprint: Mapping[str, str],
    tokens: Iterable[int],
    rejected: Iterable[BadRow],
    same_as: Iterable[int] | None = None,
) -> None:
    """Makes the ledger of a new job; the file appears under its name only when it is whole.

    Args:
        path: where; must not exist.
        run: the job's run id, which its store carries too.
        fingerprint: the settings under which the job may be resumed.
        tokens: prompt length of each sample, in index order.
        rejected: dataset rows that are not samples.
        same_as: for each sample the first one of those with the same prompt that share a shard, itself for that one; -1 for a
            sample that has no twin. None: no sample shares anything.

    Raises:
        RunError: kind `ledger_failed`.
    """
    draft = path.with_suffix(".new")
    with translated(path):
        for suffix in ("", "-journal", "-wal", "-shm"):
            draft.with_name(draft.name + suffix).unlink(missing_ok=True)
        connection = sqlite3.connect(draft)
        try:
            connection.executescript(SCHEMA + TRUST + TOTALS + TWINS)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION:d}")
            meta = {"run": run, "fingerprint": json.dumps(dict(fingerprint), sort_keys=True)}
            connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            connection.executemany("INSERT INTO samples (idx, tokens) VALUES (?, ?)", enumerate(map(int, tokens)))
            if same_as is not None:
                twins = ((int(first), idx) for idx, first in enumerate(same_as) if first >= 0)
                connection.executemany("UPDATE samples SET same_as = ? WHERE idx = ?", twins)
            rows = ((r.line, r.sample_id, r.reason, r.message) for r in rejected)
            connection.executemany("INSERT OR REPLACE INTO rejected VALUES (?, ?, ?, ?)", rows)
            connection.executescript(RECKONED)  # commits what is under way first
            # Not left to the first use: a crash while the mode is changed leaves a file that read-only connections refuse.
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        for beside in ("-wal", "-shm"):  # of another ledger, whose file was taken away: it would be played into this one
            path.with_name(path.name + beside).unlink(missing_ok=True)
        draft.rename(path)
        sync_folder(path.parent)
