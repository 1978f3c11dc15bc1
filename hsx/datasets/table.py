"""Rows of Parquet files and of Arrow files (`datasets` writes those), batch by batch: memory does not grow with the file.

Needs pyarrow, the extra `parquet`. `hsx.datasets.batch` has the rows of a batch.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from hsx.datasets.batch import Batch, TableFields
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.datasets.fields import Bad

PARQUET_MAGIC: Final = b"PAR1"
ARROW_FILE_MAGIC: Final = b"ARROW1"
END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
BLOCK: Final = 1 << 20
BATCH_BYTES: Final = 16 << 20
BATCH_ROWS: Final = 4096
WIDEST: Final = 8  # bytes of a decoded number


class TableFile:
    """One Parquet or Arrow file.

    Args:
        path: the file.
        kind: how it is written: `parquet`, or `arrow` (a stream or a file, told by the content).
    """

    unit: Final = "row"

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        self.kind = kind
        self._digest: str | None = None
        self._stamp: tuple[int, ...] = ()

    def records(self) -> Iterator[tuple[int, TableFields | Bad]]:
        """Each row with its number, from 1.

        Raises RunError `dataset_unreadable` where the file cannot be read or is damaged, `dependency_missing` without pyarrow.
        """
        pyarrow = _pyarrow(self.path)
        number = 0
        self._require_same()
        try:
            for batch in self._batches(pyarrow):
                columns = Batch(batch)
                for row in range(batch.num_rows):
                    number += 1
                    yield number, TableFields(columns, row)
        except (pyarrow.ArrowException, OSError) as error:
            raise self._fault(f"after row {number}: {str(error).splitlines()[0] if str(error) else error!r}") from error
        self._require_same()

    def sha256(self) -> str:
        """SHA-256 of the file's bytes on the disk, in hex. Reads the file, once."""
        if self._digest is None:
            self._require_same()
            hasher = hashlib.sha256()
            try:
                with self.path.open("rb") as file:
                    while block := file.read(BLOCK):
                        hasher.update(block)
            except OSError as error:
                raise self._fault(str(error.strerror or error)) from error
            self._require_same()
            self._digest = hasher.hexdigest()
        return self._digest

    def _require_same(self) -> None:
        """Before and after each pass the file is the one that the first pass found: rows and hash belong together."""
        found = self._look()
        if self._stamp not in ((), found):
            raise self._fault("it changed since it was first read; a job needs a file that stays as it is")
        self._stamp = found

    def _look(self) -> tuple[int, ...]:
        try:
            found = self.path.stat()
        except OSError as error:
            raise self._fault(str(error.strerror or error)) from error
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _batches(self, pyarrow: Any) -> Iterator[Any]:  # noqa: ANN401 - pyarrow has no types
        if self.kind == "parquet":
            from pyarrow.parquet import ParquetFile

            # Buffered: otherwise whole column chunks, and with them whole row groups, are read into memory.
            with ParquetFile(self.path, buffer_size=BLOCK, pre_buffer=False) as file:
                yield from file.iter_batches(batch_size=_batch_rows(file.metadata), use_threads=False)
            return
        # Read, not mapped: pages of a mapping stay in the process's memory as long as there is room.
        with pyarrow.OSFile(str(self.path)) as source:
            if source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC:
                reader = pyarrow.ipc.open_file(source)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
                return
            self._require_end()
            source.seek(0)
            yield from pyarrow.ipc.open_stream(source)

    def _require_end(self) -> None:
        """A stream that was cut between two batches reads like a shorter one; only the marker at its end tells."""
        with self.path.open("rb") as file:
            file.seek(-min(len(END_OF_STREAM), self._look()[2]), 2)
            if not file.read().endswith(END_OF_STREAM):
                raise self._fault("it has no mark at its end; expected a whole Arrow stream: it may have been cut short")

    def _fault(self, what: str) -> RunError:
        return RunError("dataset_unreadable", f"{self.path}: {what}")


def _batch_rows(metadata: Any) -> int:  # noqa: ANN401 - pyarrow has no types
    """Rows a batch, so that a batch of the file's widest row group takes about `BATCH_BYTES` when it is decoded."""
    rows = BATCH_ROWS
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if not group.num_rows:
            continue
        # Encoded sizes say little: a list of equal numbers takes next to nothing. The number of values says it.
        columns = [group.column(column) for column in range(group.num_columns)]
        nbytes = sum(max(column.num_values * WIDEST, column.total_uncompressed_size) for column in columns)
        rows = min(rows, max(1, BATCH_BYTES * group.num_rows // max(1, nbytes)))
    return rows


def _pyarrow(path: Path) -> Any:  # noqa: ANN401 - pyarrow has no types
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        message = f"{path}: {error}; Parquet and Arrow files need hsx with its extra 'parquet'"
        raise RunError("dependency_missing", message) from error
    return pa
