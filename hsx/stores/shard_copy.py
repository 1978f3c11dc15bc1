"""Copies a shard from one root to another and proves the copy, byte by byte, before anything is said of it."""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import PAGE, shard_key
from hsx.errors import RunError
from hsx.stores.durable import root_error, write_all
from hsx.stores.root import MOVING
from hsx.stores.shard_reader import ShardError, ShardFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.records import CommittedRow
    from hsx.stores.group import StoreInfo

PIECE: Final = 2048 * PAGE


def copy_name(row: CommittedRow) -> str:
    """Name of a copy while it is made."""
    return f"{shard_key(row.index)}.{row.marker}{MOVING}"


class CopyStoppedError(Exception):
    """The copy was given up because it was asked to be."""


class ShardCopier:
    """Copies shards between the roots of one store. One thread at a time; its buffers are used again.

    Args:
        info: the store, with all its roots.
        stopped: asked between two pieces of a copy; True gives it up.
    """

    def __init__(self, info: StoreInfo, stopped: Callable[[], bool]) -> None:
        self._info = info
        self._stopped = stopped
        self._piece = np.frombuffer(mmap.mmap(-1, PIECE), np.uint8)
        self._states = np.empty(0, np.uint16)

    def copy(self, row: CommittedRow, target: str) -> Path:
        """Makes a copy of a committed shard on another root; returns its place, under a name that no reader looks at.

        Its data is on the disk, and was read again from there: size, every checksum, the shard's own record and the payload's
        crc32c are those of `row`. Where the copy proves wrong, the original is proved, to tell which of the two disks it is.

        Raises:
            ShardError: the original is missing or damaged.
            RunError: `roots_full` or `root_unusable`, of the target.
            CopyStoppedError: it was asked to stop.
        """
        source = self._info.folder(row.root) / shard_key(row.index)
        copy = self._info.folder(target) / copy_name(row)
        try:
            self._copy(source, row, copy, target)
            try:
                self.prove(copy, row)
            except ShardError as error:
                self.prove(source, row)
                raise RunError(
                    "root_unusable", f"root {target}: what was written is not what is read: {error.message}"
                ) from error
        except BaseException:
            with suppress(OSError):
                copy.unlink()
            raise
        return copy

    def prove(self, path: Path, row: CommittedRow) -> None:
        """Reads a whole shard and holds it against the ledger. Raises ShardError."""
        layout = self._info.layout
        # Of a selection of tokens the record says how many they are; the ledger's checksum proves that it is the right one.
        tokens = None if layout.selects else row.tokens
        with ShardFile(path, layout, tokens, owner=(self._info.store_id, row.captured_as)) as shard:
            if shard.nbytes != row.nbytes:
                raise ShardError("truncated", path, f"has {shard.nbytes} bytes; expected {row.nbytes}")
            if layout.records and shard.record().marker != row.marker:
                raise ShardError("record", path, f"is of attempt {shard.record().marker}; expected {row.marker}")
            _, crc = shard.read_all(self._buffer(shard.rows))
        if crc != row.crc32c:
            raise ShardError("chunk", path, f"holds payload {crc:08x}; expected {row.crc32c:08x}")

    def _copy(self, source: Path, row: CommittedRow, copy: Path, target: str) -> None:
        try:
            reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error, source) from error
        try:
            try:
                writing = _create(copy)
                try:
                    os.posix_fallocate(writing, 0, row.nbytes)
                    self._pump(reading, source, writing, row.nbytes)
                    os.fdatasync(writing)
                    # The proof is to read the disk, and not what the kernel remembers of it.
                    os.posix_fadvise(writing, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(writing)
            except OSError as error:
                raise root_error(error, target, copy) from error
        finally:
            with suppress(OSError):
                os.posix_fadvise(reading, 0, 0, os.POSIX_FADV_DONTNEED)  # it is about to go
            os.close(reading)

    def _pump(self, reading: int, source: Path, writing: int, nbytes: int) -> None:
        """Raises ShardError for the source, OSError for the copy."""
        offset = 0
        while offset < nbytes:
            if self._stopped():
                raise CopyStoppedError
            piece = self._piece[: min(PIECE, nbytes - offset)]
            filled = 0
            while filled < piece.size:
                try:
                    got = os.preadv(reading, [piece[filled:].data], offset + filled)
                except OSError as error:
                    raise _unreadable(error, source) from error
                if got == 0:
                    raise ShardError("truncated", source, f"ends at byte {offset + filled}; expected {nbytes}")
                filled += got
            offset = write_all(writing, [piece.data], offset)

    def _buffer(self, tokens: int) -> NDArray[np.uint16]:
        layout = self._info.layout
        size = tokens * layout.states * layout.row_words
        if self._states.size < size:
            self._states = np.empty(size, np.uint16)
        return self._states[:size].reshape(tokens, layout.states, layout.row_words)


def _create(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(path, flags, 0o644)


def _unreadable(error: OSError, source: Path) -> ShardError:
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return ShardError("missing" if missing else "unreadable", source, f"cannot be read: {error.strerror}")
