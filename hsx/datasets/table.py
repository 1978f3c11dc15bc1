"""Rows of Parquet files and of Arrow files (`datasets` writes those), batch by batch: memory does not grow with the file.

Needs pyarrow, the extra `parquet`. Lists of numbers are taken as slices of the batch's own buffers, without a Python object a
token; so `list`, `large_list` and fixed-size lists of any integer type cost the same.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.datasets.fields import Bad
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

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
                columns = _Columns(batch)
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


class _Columns:
    """One batch; list columns as numbers, made when they are first asked for."""

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        self.batch = batch
        self.index = {name: number for number, name in enumerate(batch.schema.names)}
        self._lists: dict[str, _Numbers] = {}

    def numbers(self, name: str) -> _Numbers:
        """Raises Bad `bad_type` where the column is no list of integers or booleans."""
        if name not in self._lists:
            self._lists[name] = _Numbers(name, self.batch.column(self.index[name]))
        return self._lists[name]


class _Numbers:
    """A column of lists of integers or booleans as two arrays of numpy: all values, and where each row begins."""

    def __init__(self, name: str, column: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        from pyarrow import types

        kind = column.type
        listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not listed or not (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)):
            raise Bad("bad_type", f"field {name!r} is of type {kind}; expected a list of integers")
        self.flags = types.is_boolean(kind.value_type)
        if types.is_fixed_size_list(kind):
            self._offsets = (np.arange(len(column) + 1, dtype=np.int64) + column.offset) * kind.list_size
        else:
            self._offsets = column.offsets.to_numpy()
        self._values = column.values
        self._whole = self._values.null_count == 0
        self._flat = self._values.to_numpy(zero_copy_only=False) if self._whole else None

    def row(self, name: str, number: int) -> NDArray[np.int64]:
        """int64 [tokens] of one row. Raises Bad `bad_type` for a null in it, `out_of_vocabulary` from 2^63."""
        start, stop = int(self._offsets[number]), int(self._offsets[number + 1])
        if self._flat is not None:
            values = self._flat[start:stop]
        else:
            part = self._values.slice(start, stop - start)
            if part.null_count:
                raise Bad("bad_type", f"field {name!r} has a null in it; expected a list of integers")
            values = part.to_numpy(zero_copy_only=False)
        if values.dtype == np.uint64 and len(values) and int(values.max()) >> 63:
            raise Bad("out_of_vocabulary", f"field {name!r} has the value {int(values.max())}")
        return np.asarray(values, dtype=np.int64)


class TableFields:
    """One row of a batch; see `fields.Fields`."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: _Columns, row: int) -> None:
        self._columns = columns
        self._row = row

    def types(self) -> dict[str, str]:
        """See `Fields`."""
        return {field.name: str(field.type) for field in self._columns.batch.schema}

    def has(self, name: str) -> bool:
        """See `Fields`."""
        return name in self._columns.index and bool(self._scalar(name).is_valid)

    def value(self, name: str) -> Any:  # noqa: ANN401 - any of several types
        """See `Fields`."""
        self._require(name)
        try:
            return _without_nulls(self._scalar(name).as_py())
        except UnicodeDecodeError as error:
            raise Bad("bad_type", f"field {name!r} is not UTF-8 text: {error}") from error

    def integers(self, name: str, *, flags: bool = False) -> NDArray[np.int64]:
        """See `Fields`."""
        self._require(name)
        numbers = self._columns.numbers(name)
        if numbers.flags and not flags:
            raise Bad("bad_type", f"field {name!r} is a list of booleans; expected a list of integers")
        return numbers.row(name, self._row)

    def _scalar(self, name: str) -> Any:  # noqa: ANN401 - pyarrow has no types
        return self._columns.batch.column(self._columns.index[name])[self._row]

    def _require(self, name: str) -> None:
        if not self.has(name):
            raise Bad("missing_field", f"field {name!r} is {'null' if name in self._columns.index else 'missing'}")


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any of several types
    """A column of objects gives each row the fields of all rows, null where it has none of its own: those are left out."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


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
