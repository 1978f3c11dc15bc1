"""Reads shards, whole or in part, and proves each inner chunk by its crc32c.

Faster than a general Zarr reader because it reads straight into the result. It takes any uncompressed `sharding_indexed` shard
of the store's shape, whoever wrote it.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from hsx.core.crc import combine
from hsx.core.layout import CRC_BYTES, MISSING, NAN_BITS, StoreLayout
from hsx.errors import RunError
from hsx.stores.checksum import crc32c

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

Problem = Literal["missing", "unreadable", "truncated", "index", "chunk", "tokens"]
PROBLEMS: Final[dict[Problem, str]] = {
    "missing": "the file does not exist",
    "unreadable": "the disk or its permissions do not let it be read",
    "truncated": "the file ends before what its index promises",
    "index": "the index does not match its crc32c or names impossible places",
    "chunk": "an inner chunk does not match its crc32c",
    "tokens": "it holds another number of tokens than the sample has",
}


class ShardError(RunError):
    """A shard cannot be read; kind `store_invalid`, with `problem` out of `PROBLEMS`."""

    def __init__(self, problem: Problem, path: Path, message: str) -> None:
        super().__init__("store_invalid", f"shard {path}: {message}")
        self.problem: Problem = problem


class ShardFile:
    """One open shard; a context manager. One thread at a time.

    Args:
        path: the shard, or a link to it.
        layout: the store's shape.
        tokens: tokens of the sample.
        check: compare checksums and padding; without it only the places in the index are checked.

    Raises:
        ShardError: the file is missing or unreadable, or its index is wrong.
    """

    def __init__(self, path: Path, layout: StoreLayout, tokens: int, *, check: bool = True) -> None:
        layout.check_tokens(tokens)
        self._path = path
        self._layout = layout
        self._tokens = tokens
        self._check = check
        self._scratch = np.empty(0, np.uint8)
        self._crc = np.empty(CRC_BYTES, np.uint8)
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            raise ShardError("missing" if missing else "unreadable", path, f"cannot be opened: {error.strerror}") from error
        try:
            self._entries = self._read_index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._size

    def read(self, start: int = 0, stop: int | None = None, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
        """bf16 bits [stop - start, L, H] of the tokens from `start` up to `stop` (default: all).

        Only the inner chunks of these tokens are read. `out`, if given, is C-contiguous uint16 of that shape and is filled and
        returned. Raises ShardError.
        """
        return self._read(start, self._tokens if stop is None else stop, out)[0]

    def read_all(self, out: NDArray[np.uint16] | None = None) -> tuple[NDArray[np.uint16], int]:
        """All tokens, as `read`, and the crc32c of the payload, as in the writer's receipt. Needs `check`."""
        return self._read(0, self._tokens, out)

    def _read(self, start: int, stop: int, out: NDArray[np.uint16] | None) -> tuple[NDArray[np.uint16], int]:
        layout = self._layout
        if not 0 <= start <= stop <= self._tokens:
            raise ValueError(f"tokens {start} to {stop} are asked for; the sample has {self._tokens}")
        shape = (stop - start, layout.states, layout.hidden_size)
        if out is None:
            out = np.empty(shape, np.uint16)
        elif out.shape != shape or out.dtype != np.uint16 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}; expected C-contiguous uint16 {shape}")
        flat = out.reshape(-1).view(np.uint8)
        payload = 0
        for chunk in range(start // layout.chunk_tokens, layout.chunks(stop) if stop > start else 0):
            first = chunk * layout.chunk_tokens
            low, high = max(start - first, 0), min(stop - first, layout.chunk_tokens)
            at = (first + low - start) * layout.token_bytes
            payload = self._read_chunk(chunk, low, high, flat[at : at + (high - low) * layout.token_bytes], payload)
        if self._check and stop == self._tokens > start and bool((out[-1] == NAN_BITS).all()):
            raise self._error("tokens", f"row {stop - 1} is fill; expected {self._tokens} tokens")
        return out, payload

    def _read_chunk(self, chunk: int, low: int, high: int, rows: NDArray[np.uint8], payload: int) -> int:
        """Reads rows `low` to `high` of an inner chunk into `rows`; returns `payload` continued with the chunk's real rows."""
        layout = self._layout
        offset = int(self._entries[chunk, 0])
        before, after = low * layout.token_bytes, (layout.chunk_tokens - high) * layout.token_bytes
        if not self._check:
            self._fill([rows], offset + before)
            return 0
        if self._scratch.size < before + after:
            self._scratch = np.empty(layout.chunk_bytes, np.uint8)
        head, tail = self._scratch[:before], self._scratch[before : before + after]
        self._fill([part for part in (head, rows, tail, self._crc) if part.size], offset)
        crc_rows = crc32c(rows, crc32c(head))
        crc = crc32c(tail, crc_rows)
        recorded = int(self._crc.view("<u4")[0])
        if crc != recorded:
            raise self._error("chunk", f"chunk {chunk} has crc32c {crc:08x}; expected {recorded:08x}")
        used = min(self._tokens - chunk * layout.chunk_tokens, layout.chunk_tokens)
        padding = tail[(used - high) * layout.token_bytes :]
        if used < layout.chunk_tokens and not bool((padding.view(np.uint16) == NAN_BITS).all()):
            raise self._error("tokens", f"there is data after row {self._tokens - 1}; expected {self._tokens} tokens")
        return combine(payload, crc, rows.size) if not after else crc32c(rows, payload)

    def _read_index(self) -> NDArray[np.uint64]:
        layout = self._layout
        try:
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._error("unreadable", f"cannot be read: {error.strerror}") from error
        start = self._size - layout.index_bytes
        if start < 0:
            raise self._error("truncated", f"has {self._size} bytes; expected an index of {layout.index_bytes} at its end")
        raw = np.empty(layout.index_bytes, np.uint8)
        self._fill([raw], start)
        recorded, crc = int(raw[-CRC_BYTES:].view("<u4")[0]), crc32c(raw[:-CRC_BYTES])
        if crc != recorded:
            raise self._error("index", f"index has crc32c {crc:08x}; expected {recorded:08x}")
        entries = raw[:-CRC_BYTES].view("<u8").reshape(-1, 2)
        wanted = layout.chunks(self._tokens)
        present = int((entries != np.uint64(MISSING)).all(axis=1).sum())
        if present != wanted or bool((entries[wanted:] != np.uint64(MISSING)).any()):
            raise self._error("tokens", f"has {present} inner chunks; expected {wanted} for {self._tokens} tokens")
        nbytes = layout.chunk_bytes + CRC_BYTES
        used = entries[:wanted]
        if bool((used[:, 1] != np.uint64(nbytes)).any() or (used[:, 0] > np.uint64(max(start - nbytes, 0))).any()):
            raise self._error("index", f"index has entries {used.tolist()}; expected {nbytes} bytes each, before byte {start}")
        return used

    def _fill(self, buffers: list[NDArray[np.uint8]], offset: int) -> None:
        views = [buffer.data for buffer in buffers]
        while views:
            try:
                got = os.preadv(self._fd, views, offset)
            except OSError as error:
                raise self._error("unreadable", f"cannot be read at byte {offset}: {error.strerror}") from error
            if got == 0:
                raise self._error("truncated", f"ends at byte {offset}; expected more")
            offset += got
            while views and got >= len(views[0]):
                got -= len(views.pop(0))
            if got:
                views[0] = views[0][got:]

    def _error(self, problem: Problem, message: str) -> ShardError:
        return ShardError(problem, self._path, message)
