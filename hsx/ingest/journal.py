"""What an import knows so far, in one SQLite file beside the store that it makes: from it a killed import goes on.

It has the files that were found, in order; then, file by file, ids and mask of each sample that can be taken, with the size
and the time of change of its file; and what was rejected. What is committed, the union view of the store says.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

FORMAT: Final = "hsx-import-1"
Stage = Literal["listing", "heads", "creating", "states"]
"""What an import is about: to list the files, to read their ids and masks, to make the store, or to bring the states."""
_BATCH: Final = 256
_SCHEMA: Final = (
    "CREATE TABLE fact (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE named (path BLOB PRIMARY KEY, id TEXT NOT NULL) WITHOUT ROWID",
    "CREATE TABLE file (at INTEGER PRIMARY KEY, row INTEGER NOT NULL, path BLOB NOT NULL)",
    "CREATE TABLE sample (at INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, size INTEGER NOT NULL, changed INTEGER NOT NULL,"
    " width INTEGER NOT NULL, ids BLOB NOT NULL, mask BLOB NOT NULL)",
    "CREATE TABLE rejected (at INTEGER PRIMARY KEY, id TEXT NOT NULL, reason TEXT NOT NULL, message TEXT NOT NULL)",
)


@dataclass(frozen=True, slots=True)
class Listed:
    """A file that was found.

    Attributes:
        at: its place in the order, from 1.
        row: its row by its name; -1 where it says none.
        path: below the folder, as the file system has it.
        name: the sample's id by a manifest; None where there is none.
    """

    at: int
    row: int
    path: bytes
    name: str | None


@dataclass(frozen=True, slots=True)
class Known:
    """A sample that can be taken by its ids and mask: int32 [S] and uint8 [S].

    Attributes:
        at, row, path: of its file.
        id: its id.
        stamp: size, and time of change in ns, of its file before that was read.
        width: H.
        input_ids, loss_mask: its ids and mask.
    """

    at: int
    row: int
    path: bytes
    id: str
    stamp: tuple[int, int]
    width: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rejection:
    """A sample that cannot be taken, and why."""

    at: int
    row: int
    path: bytes
    id: str
    reason: str
    message: str


class Journal:
    """An open journal; a context manager. One thread at a time.

    Args:
        path: the file; made where it is missing.

    Raises:
        RunError: `store_unwritable`, from here and from every method; `import_refused` for a file that is no journal.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._translated():
            self._db = sqlite3.connect(path, isolation_level=None)
            try:
                self._db.execute("PRAGMA synchronous = FULL")
                with self.transaction():
                    if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                        for table in _SCHEMA:
                            self._db.execute(table)
                        self._set("format", FORMAT)
                        self._set("stage", "listing")
                if self._fact("format") != FORMAT:
                    raise sqlite3.DatabaseError(f"it is of format {self._fact('format')}")
            except BaseException:
                self._db.close()
                raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def remove(self) -> None:
        """Closes and removes the file."""
        self.close()
        try:
            self._path.unlink()
        except OSError as error:
            raise RunError("store_unwritable", f"{self._path} cannot be removed: {error.strerror}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that the block writes is durable after it, or none of it is."""
        with self._translated():
            self._db.execute("BEGIN")
            try:
                yield
            except BaseException:
                with suppress(sqlite3.Error):
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @property
    def stage(self) -> Stage:
        """How far the import is."""
        with self._translated():
            return self._fact("stage")  # type: ignore[return-value]  # written by `reach` alone

    def reach(self, stage: Stage) -> None:
        """Notes that the import is at `stage`."""
        with self._translated():
            self._set("stage", stage)

    def fix(self, key: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
        """The JSON value of a fact, which is `value` unless another one was fixed before."""
        with self._translated():
            self._db.execute("INSERT OR IGNORE INTO fact VALUES (?, ?)", (f"fixed.{key}", json.dumps(value)))
            return json.loads(self._fact(f"fixed.{key}"))

    def list_files(self, found: Iterable[tuple[int, bytes]], names: Iterable[tuple[bytes, str]]) -> None:
        """Takes down the files, as row and path, in the order of these; and ids by path. Ends the stage `listing`."""
        with self.transaction():
            self._db.execute("CREATE TABLE found (row INTEGER NOT NULL, path BLOB NOT NULL)")
            self._db.executemany("INSERT INTO found VALUES (?, ?)", found)
            self._db.execute("INSERT INTO file (row, path) SELECT row, path FROM found ORDER BY row, path")
            self._db.execute("DROP TABLE found")
            self._db.executemany("INSERT OR REPLACE INTO named VALUES (?, ?)", names)
            self._set("stage", "heads")

    def count_files(self) -> int:
        """How many files were found."""
        with self._translated():
            return int(self._db.execute("SELECT count(*) FROM file").fetchone()[0])

    def unread(self) -> list[Listed]:
        """The next files of which nothing is known; none once all have been looked at."""
        query = (
            "SELECT file.at, row, file.path, named.id FROM file LEFT JOIN named ON named.path = file.path WHERE file.at > max("
            "(SELECT coalesce(max(at), 0) FROM sample), (SELECT coalesce(max(at), 0) FROM rejected)) ORDER BY file.at LIMIT ?"
        )
        with self._translated():
            return [Listed(*row) for row in self._db.execute(query, (_BATCH,))]

    def has_id(self, name: str) -> bool:
        """Whether a sample of that id is known."""
        with self._translated():
            return bool(self._db.execute("SELECT EXISTS (SELECT 1 FROM sample WHERE id = ?)", (name,)).fetchone()[0])

    def add(self, known: Known) -> None:
        """Takes down a sample; its id is known of no other."""
        values = (known.at, known.id, *known.stamp, known.width, known.input_ids.tobytes(), known.loss_mask.tobytes())
        with self._translated():
            self._db.execute("INSERT INTO sample VALUES (?, ?, ?, ?, ?, ?, ?)", values)

    def reject(self, rejection: Rejection) -> None:
        """Takes down what cannot be taken."""
        values = (rejection.at, rejection.id, rejection.reason, rejection.message)
        with self._translated():
            self._db.execute("INSERT INTO rejected VALUES (?, ?, ?, ?)", values)

    def places(self) -> NDArray[np.int64]:
        """`at` of all samples, in order: int64 [samples]. A sample's index in the store is its place in this."""
        return self._column("SELECT at FROM sample ORDER BY at")

    def lengths(self) -> NDArray[np.int64]:
        """S of all samples, in the same order: int64 [samples]."""
        return self._column("SELECT length(mask) FROM sample ORDER BY at")

    def rejected_places(self) -> NDArray[np.int64]:
        """`at` of all that is rejected: int64."""
        return self._column("SELECT at FROM rejected ORDER BY at")

    def samples(self) -> Iterator[Known]:
        """All samples, in order, some in memory at a time."""
        last = 0
        while batch := self._samples("sample.at > ? ORDER BY sample.at LIMIT ?", (last, _BATCH)):
            yield from batch
            last = batch[-1].at

    def sample(self, at: int) -> Known:
        """The sample of that place."""
        return self._samples("sample.at = ?", (at,))[0]

    def rejections(self) -> Iterator[Rejection]:
        """All rejections, in order of their files. Nothing may be written meanwhile."""
        query = (
            "SELECT rejected.at, row, path, id, reason, message FROM rejected JOIN file ON file.at = rejected.at"
            " ORDER BY rejected.at"
        )
        with self._translated():
            for row in self._db.execute(query):
                yield Rejection(*row)

    def reasons(self) -> dict[str, int]:
        """How many were rejected for which reason, in the order in which the reasons came up."""
        with self._translated():
            return dict(self._db.execute("SELECT reason, count(*) FROM rejected GROUP BY reason ORDER BY min(at)").fetchall())

    def _samples(self, where: str, values: tuple[int, ...]) -> list[Known]:
        query = "SELECT sample.at, row, path, id, size, changed, width, ids, mask FROM sample JOIN file ON file.at = sample.at"
        with self._translated():
            return [
                Known(at, row, path, name, (size, changed), width, np.frombuffer(ids, np.int32), np.frombuffer(mask, np.uint8))
                for at, row, path, name, size, changed, width, ids, mask in self._db.execute(f"{query} WHERE {where}", values)
            ]

    def _column(self, query: str) -> NDArray[np.int64]:
        with self._translated():
            return np.fromiter((value for (value,) in self._db.execute(query)), np.int64)

    def _fact(self, key: str) -> str:
        found = self._db.execute("SELECT value FROM fact WHERE key = ?", (key,)).fetchone()
        if found is None:
            raise sqlite3.DatabaseError(f"it has no {key}")
        return str(found[0])

    def _set(self, key: str, value: str) -> None:
        self._db.execute("INSERT INTO fact VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise RunError("store_unwritable", f"{self._path} cannot be written: {error}") from error
        except sqlite3.DatabaseError as error:
            raise RunError(
                "import_refused",
                f"{self._path} is no journal of an import: {error}; expected one, or none: remove it, and what there is of the "
                "store, and the import begins anew",
            ) from error
