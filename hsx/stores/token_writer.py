"""Writing the token index of a store; `hsx.stores.tokens` tells its form and reads it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from hsx.stores import metadata
from hsx.stores.durable import store_error, sync_folder, write_all, write_json
from hsx.stores.tokens import ARRAYS, ATTRIBUTE, CHUNK, FORMAT, SEPARATOR, crc_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from hsx.errors import RunError
    from hsx.records import Row


HELD_TOKENS: Final = 1 << 18
HELD_ROWS: Final = 4096
"""What is held before it is written: arrays of a few tokens cost a hundred times more one by one than all at once."""


class _ArrayWriter:
    """Writes one array chunk by chunk; holds at most one chunk in memory."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]) -> None:
        self._folder = folder
        self._buffer: NDArray[Any] = np.zeros(CHUNK, dtype=dtype)
        self._used = 0
        self._chunks = 0
        (folder / "c").mkdir(parents=True)

    @property
    def length(self) -> int:
        """Elements so far."""
        return self._chunks * CHUNK + self._used

    def extend(self, values: NDArray[Any]) -> None:
        """Appends values."""
        end = self._used + len(values)
        if end < CHUNK:
            self._buffer[self._used : end] = values
            self._used = end
            return
        done = 0
        while done < len(values):
            take = min(CHUNK - self._used, len(values) - done)
            self._buffer[self._used : self._used + take] = values[done : done + take]
            self._used += take
            done += take
            if self._used == CHUNK:
                self._flush(CHUNK)

    def append(self, value: int) -> None:
        """Appends one value."""
        self._buffer[self._used] = value
        self._used += 1
        if self._used == CHUNK:
            self._flush(CHUNK)

    def close(self) -> int:
        """Writes what is left and returns the chunk length: shorter than `CHUNK` where one chunk holds everything."""
        if self._chunks == 0:
            length = max(1, self._used)
            self._flush(length)
            return length
        if self._used:
            self._buffer[self._used :] = 0
            self._flush(CHUNK)
        return CHUNK

    def _flush(self, length: int) -> None:
        payload = self._buffer[:length].tobytes()
        with (self._folder / "c" / str(self._chunks)).open("xb", buffering=0) as file:
            write_all(file.fileno(), [payload, crc_bytes(payload)], 0)
            os.fsync(file.fileno())
        self._chunks += 1
        self._used = 0


class TokenTableWriter:
    """Streams rows into the token index of a group, in bounded memory. A context manager: leaving without `finish` removes what
    was written.

    Args:
        group: folder of the Zarr group; need not exist yet.
    """

    def __init__(self, group: Path) -> None:
        self._group = group
        self._partial = _partial(group)
        try:
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir(parents=True)
            self._arrays = {name: _ArrayWriter(self._partial / name, dtype) for name, dtype in ARRAYS.items()}
        except OSError as error:
            raise self._fault(error) from error
        self._arrays["offsets"].append(0)
        self._arrays["sample_id_offsets"].append(0)
        self._samples = 0
        self._longest = 0
        self._ids: list[NDArray[np.int32]] = []
        self._masks: list[NDArray[np.uint8]] = []
        self._names: list[bytes] = []
        self._tokens_held = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, row: Row) -> int:
        """Appends a row, and returns its sample index.

        Raises RunError `store_unwritable`, also for rows before it: some are held and written together.
        """
        length = len(row.input_ids)
        # Copies: a row of a table is a slice, which would keep its whole batch in memory, of which it may be the only good row.
        self._ids.append(row.input_ids.copy())
        self._masks.append(row.loss_mask.copy())
        self._names.append(row.sample_id.encode())
        self._tokens_held += length
        self._samples += 1
        self._longest = max(self._longest, length)
        if self._tokens_held >= HELD_TOKENS or len(self._ids) >= HELD_ROWS:
            try:
                self._write_held()
            except OSError as error:
                raise self._fault(error) from error
        return self._samples - 1

    def _write_held(self) -> None:
        if not self._ids:
            return
        arrays = self._arrays
        for name, places, held, content in (
            ("input_ids", "offsets", self._ids, np.concatenate(self._ids)),
            ("sample_ids", "sample_id_offsets", self._names, np.frombuffer(b"".join(self._names), dtype=np.uint8)),
        ):
            ends = np.cumsum(np.fromiter(map(len, held), dtype=np.int64, count=len(held)))
            arrays[places].extend(arrays[name].length + ends)
            arrays[name].extend(content)
        arrays["loss_mask"].extend(np.concatenate(self._masks))
        self._ids, self._masks, self._names, self._tokens_held = [], [], [], 0

    def finish(self, dataset: dict[str, str], extra: dict[str, Any]) -> None:
        """Makes the index complete and durable, in place of an earlier one.

        Args:
            dataset: the dataset's fingerprint, recorded in the attributes.
            extra: further JSON values for the attributes.

        Raises:
            RunError: `store_unwritable`.
        """
        try:
            self._write_held()
        except OSError as error:
            raise self._fault(error) from error
        record = {
            **extra,
            "format": FORMAT,
            "samples": self._samples,
            "tokens": self._arrays["input_ids"].length,
            "longest": self._longest,
            "dataset": dataset,
        }
        try:
            for name, array in self._arrays.items():
                length = array.length
                attributes = {ATTRIBUTE: record} if name == "offsets" else {}
                document = metadata.vector(length, ARRAYS[name].name, attributes, chunk=array.close(), separator=SEPARATOR)
                write_json(self._partial / name / metadata.METADATA, document)
                sync_folder(self._partial / name / "c")
                sync_folder(self._partial / name)
            self._publish()
        except OSError as error:
            raise self._fault(error) from error

    def _publish(self) -> None:
        self._group.mkdir(parents=True, exist_ok=True)
        if not (self._group / metadata.METADATA).exists():
            write_json(self._group / metadata.METADATA, metadata.group({}))
        for name in reversed(ARRAYS):  # `offsets` first: from here on there is no index
            shutil.rmtree(self._group / name, ignore_errors=True)
        sync_folder(self._group)
        *others, marker = ARRAYS
        for name in others:
            (self._partial / name).rename(self._group / name)
        sync_folder(self._group)
        (self._partial / marker).rename(self._group / marker)
        sync_folder(self._group)
        sync_folder(self._group.parent)

    def _fault(self, error: OSError) -> RunError:
        return store_error(error, self._group)


def _partial(group: Path) -> Path:
    return group.with_name(group.name + ".index.partial")
