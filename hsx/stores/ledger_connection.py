"""What all parts of the ledger share: its file, the one thread that writes it, and transactions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from hsx.stores.ledger_queue import FreeSamples
from hsx.stores.ledger_schema import connect, count, facts_of, translated

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hsx.records import Counts

T = TypeVar("T")


class LedgerConnection:
    """An open ledger and its thread.

    Args:
        path: a ledger made by `create`.

    Attributes:
        run: the job's run id.
        fingerprint: the settings under which the job may be resumed.

    Raises:
        RunError: kind `ledger_failed`, from here and from every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hsx-ledger")
        self._free = FreeSamples(self._connection)
        self.run, self.fingerprint = facts_of(self._connection, path)
        with translated(path):
            self._counts = count(self._connection)

    async def counts(self) -> Counts:
        """The job's totals, as of the last transaction."""
        return self._counts

    async def remember(self, key: str, value: str) -> None:
        """Records a fact that may change; `recall` returns it."""
        await self._do(
            self._write, "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
        )

    async def recall(self, key: str) -> str | None:
        """The fact last recorded under `key`; None where there is none."""
        return await self._do(self._recall, key)

    async def fix(self, key: str, value: str) -> str:
        """Records a fact once, such as the server's version, and returns what is recorded: the first value given."""
        await self._do(self._write, "INSERT OR IGNORE INTO meta VALUES (?, ?)", (key, value))
        return await self._do(self._recall, key) or ""

    async def close(self) -> None:
        """Ends the writer thread and closes the file."""
        await self._do(self._connection.close)
        self._thread.shutdown()

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

    @contextmanager
    def _moving(self) -> Iterator[sqlite3.Connection]:
        """A transaction that changes the state of samples, and so the totals."""
        with self._transaction() as db:
            yield db
            counts = count(db)
        self._counts = counts

    def _write(self, statement: str, values: tuple[object, ...] | Mapping[str, object]) -> None:
        with self._transaction() as db:
            db.execute(statement, values)

    def _recall(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])
