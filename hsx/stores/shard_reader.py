"""Reads shards, whole or in part, and proves each inner chunk by its crc32c.

Faster than a general Zarr reader because it reads straight into the result. It takes any `sharding_indexed` shard of the
store's shape and codec, whoever wrote it; only its record, which tells whose states these are, is hsx's own.
"""

from __future__ import annotations

import errno
import os
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from hsx.core.layout import CRC_BYTES, ENTRY_BYTES, MISSING, StoreLayout
from hsx.core.shard_record import decode, is_plainly_of
from hsx.errors import RunError
from hsx.stores.checksum import combine, crc32c, crc32c_bytes
from hsx.stores.codec import make_codec
from hsx.stores.direct_file import DirectFile
from hsx.stores.page_cache import SMALL, WORTH_WHILE, CachedFile, is_missing
from hsx.stores.scratch import extend_with_fill

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.shard_record import ShardRecord
    from hsx.stores.codec import Codec

Problem = Literal["missing", "unreadable", "truncated", "index", "record", "chunk", "tokens"]
_MISSING: Final = np.uint64(MISSING)
PROBLEMS: Final[dict[Problem, str]] = {
    "missing": "the file does not exist",
    "unreadable": "the disk or its permissions do not let it be read",
    "truncated": "the file ends before what its index promises",
    "index": "the index does not match its crc32c or names impossible places",
    "record": "it says that it is another sample's or another store's, or does not say whose it is",
    "chunk": "an inner chunk does not match its crc32c or cannot be decompressed",
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
        tokens: rows of the shard: the sample's tokens, or those of them that the store keeps; None: as many as its record
            says, for
            callers who know by the payload's checksum that it is the right shard.
        check: compare checksums and padding; without it only the places in the index are checked.
        owner: the store's uuid and the sample that the shard has to belong to by its own record; None: whoever's it is. Stores
            whose shards have no records (`layout.records`) are not asked.
        ids: asked for the digest of the sample's ids where the shard is another sample's by its record: it is taken if it was
            made of the very same ids. None: it is not.
        kept: asked, in a store that keeps a selection of tokens, for the digest of the positions that the shard has to be made
            of (`hsx.stores.selection.digest`). None: whichever they are.
        cached: read through the page cache's own memory, which is faster where the shard is there already; otherwise with
            `preadv`. The fill behind the last row is then not read where the checksum is that of the rows and of fill: it
            proves the rows, and says nothing of fill that changed on the disk.

    Raises:
        ShardError: the file is missing or unreadable, its index is wrong, or it is somebody else's.
    """

    def __init__(
        self,
        path: Path,
        layout: StoreLayout,
        tokens: int | None,
        *,
        check: bool = True,
        owner: tuple[str, int] | None = None,
        ids: Callable[[], str] | None = None,
        kept: Callable[[], str] | None = None,
        cached: bool = False,
    ) -> None:
        if tokens is not None:
            layout.check_tokens(tokens)
        self._ids = ids
        self._kept = kept if layout.selects else None
        self._owner = owner if layout.records else None
        self._codec = make_codec(layout.codec)
        self._path = path
        self._layout = layout
        self._tokens = tokens or 0
        self._check = check
        self._skips_fill = self._bringing = cached
        self._scratch = np.empty(0, np.uint8)
        self._crc = np.empty(CRC_BYTES, np.uint8)
        self._cached: CachedFile | None = None
        self._direct: DirectFile | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
            raise ShardError("missing" if missing else "unreadable", path, f"cannot be opened: {error.strerror}") from error
        try:
            self._entries = self._read_tail(by_record=tokens is None)
            if cached and self._size >= WORTH_WHILE:
                with suppress(OSError):
                    self._cached = CachedFile(self._fd, self._size)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._cached is not None:
            self._cached.close()
            self._cached = None
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._size

    @property
    def rows(self) -> int:
        """Rows of the shard."""
        return self._tokens

    def record(self) -> ShardRecord:
        """What the shard says of itself. Raises ShardError `record` where it has no sound record."""
        try:
            return decode(self._record_bytes(), crc32c_bytes)
        except ValueError as error:
            raise self._error("record", f"has no sound record: it {error}") from error

    def _record_bytes(self) -> bytes:
        place = len(self._tail) - self._layout.tail_bytes
        if not self._layout.records or place < 0:
            raise self._error("record", "has no record")
        return self._tail[place : place + self._layout.record_bytes].tobytes()

    def read(self, start: int = 0, stop: int | None = None, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
        """The rows from `start` up to `stop` (default: all), as they are stored: uint16 [stop - start, L, row_words].

        Those are bf16 bits [stop - start, L, H], but in an fp8 store, whose rows `hsx.stores.reduced.decode` converts.
        Only the inner chunks of these rows are read. `out`, if given, is C-contiguous uint16 of that shape and is filled and
        returned. Raises ShardError.
        """
        out, _ = self._read(start, self._tokens if stop is None else stop, out, summed=False)
        return out

    def read_all(self, out: NDArray[np.uint16] | None = None) -> tuple[NDArray[np.uint16], int]:
        """All tokens, as `read`, and the crc32c of the payload, as in the writer's receipt; 0 without `check`."""
        out, crcs = self._read(0, self._tokens, out, summed=self._check)
        layout = self._layout
        payload = crcs[0]
        for chunk in range(1, len(crcs)):
            rows = min(layout.chunk_tokens, self._tokens - chunk * layout.chunk_tokens)
            payload = combine(payload, crcs[chunk], rows * layout.token_bytes)
        return out, payload

    def read_unproved(self, start: int, out: NDArray[np.uint16], *, direct: bool = False) -> list[int]:
        """Reads whole inner chunks from token `start` on, for a caller who takes the checksums of what it looks at anyhow.

        Args:
            start: a multiple of `chunk_tokens`.
            out: C-contiguous uint16 [tokens, L, row_words], tokens being a multiple of `chunk_tokens`; filled.
            direct: from the device, past the page cache, where shard, file system and `out` (page-aligned) allow it.

        Returns:
            The recorded crc32c of each chunk, for `prove`. Raises ShardError, and ValueError for a store with a codec.
        """
        layout = self._layout
        if self._codec is not None or start % layout.chunk_tokens or len(out) % layout.chunk_tokens:
            raise ValueError(
                f"{len(out)} tokens from {start} are asked for, codec {layout.codec}; expected whole chunks of "
                f"{layout.chunk_tokens} tokens without a codec"
            )
        places = self._entries[start // layout.chunk_tokens :][: len(out) // layout.chunk_tokens, 0].tolist()
        chunks = out.reshape(len(places), -1).view(np.uint8)
        if direct:
            if self._direct is None:
                self._direct = DirectFile(self._path, layout)
            if (recorded := self._direct.read(places, chunks)) is not None:
                return recorded
        recorded = []
        for place, rows in zip(places, chunks, strict=True):
            self._fill([rows, self._crc], place)
            recorded.append(self._recorded())
        return recorded

    def prove(self, chunk: int, crc: int, recorded: int) -> None:
        """Raises ShardError `chunk` where the crc32c of an inner chunk is not the recorded one."""
        if crc != recorded:
            raise self._error("chunk", f"chunk {chunk} has crc32c {crc:08x}; expected {recorded:08x}")

    def prove_last(self, crc: int, recorded: int, row: NDArray[np.uint16], filled: NDArray[np.uint16]) -> None:
        """Proves the last inner chunk, whose real rows are followed by fill, as `read` does.

        Args:
            crc: crc32c of its real rows.
            recorded: what is recorded behind the chunk.
            row: the last of the rows, [L, H].
            filled: what follows it in the chunk, [tokens, L, H], C-contiguous.

        Raises ShardError: `chunk`; `tokens` where there is data after that row, or it is itself fill.
        """
        chunk = self._layout.chunks(self._tokens) - 1
        self.prove(chunk, crc32c(filled.reshape(-1).view(np.uint8), crc), recorded)
        self._check_padding(chunk, self._tokens - chunk * self._layout.chunk_tokens, filled.reshape(-1).view(np.uint8))
        if bool((row == self._layout.fill_bits).all()):
            raise self._row_is_fill(self._tokens - 1)

    def _row_is_fill(self, row: int) -> ShardError:
        return self._error("tokens", f"row {row} is fill; expected {self._tokens} tokens")

    def _read(
        self, start: int, stop: int, out: NDArray[np.uint16] | None, *, summed: bool
    ) -> tuple[NDArray[np.uint16], list[int]]:
        """As `read`; with `summed`, the crc32c of the rows of each inner chunk, too, of a whole sample."""
        layout = self._layout
        if not 0 <= start <= stop <= self._tokens:
            raise ValueError(f"tokens {start} to {stop} are asked for; the sample has {self._tokens}")
        shape = (stop - start, layout.states, layout.row_words)
        if out is None:
            out = np.empty(shape, np.uint16)
        elif out.shape != shape or out.dtype != np.uint16 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}; expected C-contiguous uint16 {shape}")
        flat = out.reshape(-1).view(np.uint8)
        crcs = []
        for chunk in range(start // layout.chunk_tokens, layout.chunks(stop) if stop > start else 0):
            first = chunk * layout.chunk_tokens
            low, high = max(start - first, 0), min(stop - first, layout.chunk_tokens)
            at = (first + low - start) * layout.token_bytes
            rows = flat[at : at + (high - low) * layout.token_bytes]
            crcs.append(self._read_chunk(chunk, low, high, rows, summed=summed))
        if self._check and stop == self._tokens > start and bool((out[-1] == layout.fill_bits).all()):
            raise self._row_is_fill(stop - 1)
        return out, crcs

    def _read_chunk(self, chunk: int, low: int, high: int, rows: NDArray[np.uint8], *, summed: bool) -> int:
        """Reads rows `low` to `high` of an inner chunk into `rows`; returns their crc32c, at least where `summed`."""
        if self._codec is not None:
            return self._read_compressed(self._codec, chunk, low, high, rows, summed=summed)
        layout = self._layout
        offset = int(self._entries[chunk, 0])
        before, after = low * layout.token_bytes, (layout.chunk_tokens - high) * layout.token_bytes
        first_fill = self._tokens - chunk * layout.chunk_tokens
        if not self._check:
            self._fill([rows], offset + before)
            return 0
        if (
            self._skips_fill
            and high == first_fill < layout.chunk_tokens
            and (found := self._rows_before_fill(chunk, before, after, rows)) is not None
        ):
            return found
        scratch = self._memory(before + after)
        head, tail = scratch[:before], scratch[before : before + after]
        self._fill([part for part in (head, rows, tail, self._crc) if part.size], offset)
        crc = crc32c(rows, crc32c(head))
        self.prove(chunk, crc32c(tail, crc), self._recorded())
        self._check_padding(chunk, high, tail)
        return crc

    def _rows_before_fill(self, chunk: int, before: int, after: int, rows: NDArray[np.uint8]) -> int | None:
        """Reads the rows of the last chunk, and proves them without reading the fill behind them.

        Returns the crc32c of the chunk up to there; None where the recorded one is not that with fill, for whatever reason.
        """
        head = self._memory(before)[:before]
        offset = int(self._entries[chunk, 0])
        self._fill([part for part in (head, rows) if part.size], offset)
        self._fill([self._crc], offset + self._layout.chunk_bytes)
        crc = crc32c(rows, crc32c(head))
        return crc if extend_with_fill(crc, after, self._layout.fill_bits) == self._recorded() else None

    def _read_compressed(self, codec: Codec, chunk: int, low: int, high: int, rows: NDArray[np.uint8], *, summed: bool) -> int:
        layout = self._layout
        whole = high - low == layout.chunk_tokens
        nbytes = int(self._entries[chunk, 1]) - CRC_BYTES
        scratch = self._memory(nbytes + (0 if whole else layout.chunk_bytes))
        encoded = scratch[:nbytes]
        decoded = rows if whole else scratch[nbytes : nbytes + layout.chunk_bytes]
        self._fill([encoded, self._crc], int(self._entries[chunk, 0]))
        if self._check:
            self.prove(chunk, crc32c(encoded), self._recorded())
        try:
            codec.decode(encoded, decoded)
        except (ValueError, RuntimeError) as error:
            raise self._error("chunk", f"chunk {chunk} cannot be decompressed: {error}") from error
        if not whole:
            rows[:] = decoded[low * layout.token_bytes : high * layout.token_bytes]
        if self._check:
            self._check_padding(chunk, high, decoded[high * layout.token_bytes :])
        return crc32c(rows) if summed else 0

    def _check_padding(self, chunk: int, high: int, tail: NDArray[np.uint8]) -> None:
        """Checks the fill in `tail`, what follows row `high` of a chunk."""
        layout = self._layout
        used = min(self._tokens - chunk * layout.chunk_tokens, layout.chunk_tokens)
        padding = tail[(used - high) * layout.token_bytes :]
        if used < layout.chunk_tokens and not bool((padding.view(np.uint16) == layout.fill_bits).all()):
            raise self._error("tokens", f"there is data after row {self._tokens - 1}; expected {self._tokens} tokens")

    def _recorded(self) -> int:
        return int(self._crc.view("<u4")[0])

    def _memory(self, nbytes: int) -> NDArray[np.uint8]:
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes, np.uint8)
        return self._scratch

    def _read_tail(self, *, by_record: bool) -> NDArray[np.uint64]:
        """Reads the tail, proves index and owner, and returns the entries of the sample's inner chunks."""
        layout = self._layout
        try:
            self._size = os.fstat(self._fd).st_size
        except OSError as error:
            raise self._error("unreadable", f"cannot be read: {error.strerror}") from error
        start = self._size - layout.index_bytes
        if start < 0:
            raise self._error("truncated", f"has {self._size} bytes; expected an index of {layout.index_bytes} at its end")
        self._tail = np.empty(min(layout.tail_bytes, self._size), np.uint8)
        self._fill([self._tail], self._size - len(self._tail))
        raw = self._tail[-layout.index_bytes :]
        recorded, crc = int.from_bytes(raw[-CRC_BYTES:].tobytes(), "little"), crc32c(raw[:-CRC_BYTES])
        if crc != recorded:
            raise self._error("index", f"index has crc32c {crc:08x}; expected {recorded:08x}")
        if self._owner is not None:
            self._prove_owner(*self._owner)
        if by_record:
            self._tokens = self.record().stored_rows
            if not 1 <= self._tokens <= layout.max_tokens:
                raise self._error("record", f"says that it has {self._tokens} rows; expected 1 to {layout.max_tokens}")
        entries = raw[:-CRC_BYTES].tobytes()
        wanted = layout.chunks(self._tokens)
        used = np.frombuffer(entries, "<u8", count=2 * wanted).reshape(-1, 2)
        if bool((used == _MISSING).any()) or entries[ENTRY_BYTES * wanted :].strip(b"\xff"):
            present = int((np.frombuffer(entries, "<u8").reshape(-1, 2) != _MISSING).all(axis=1).sum())
            raise self._error("tokens", f"has {present} inner chunks; expected {wanted} for {self._tokens} tokens")
        offsets, sizes = used[:, 0], used[:, 1]
        most = layout.encoded_bytes + CRC_BYTES
        least = most if self._codec is None else CRC_BYTES + 1
        if bool((sizes < least).any() or (sizes > most).any() or (offsets > start).any() or (sizes > start - offsets).any()):
            sized = f"{most} bytes" if least == most else f"{least} to {most} bytes"
            raise self._error("index", f"index has entries {used.tolist()}; expected {sized} each, before byte {start}")
        return used

    def _prove_owner(self, store: str, index: int) -> None:
        if not self._layout.reduced and is_plainly_of(self._record_bytes(), store, index, crc32c_bytes):
            return
        record = self.record()
        same = record.store == store and self._ids is not None and record.index != index and record.ids == self._ids()
        if (record.store, record.index) != (store, index) and not same:
            raise self._error(
                "record",
                f"says that it is sample {record.index} of store {record.store}; expected sample {index} of store {store}",
            )
        if (record.dtype, bool(record.kept)) != (self._layout.dtype, self._layout.selects):
            raise self._error(
                "record", f"says that it holds {record.dtype}, kept {record.kept!r}; expected {self._layout.dtype}"
            )
        if self._kept is not None and record.kept != (kept := self._kept()):
            raise self._error("record", f"says that it holds the tokens {record.kept}; expected {kept}, by the loss mask")

    def _fill(self, buffers: list[NDArray[np.uint8]], offset: int) -> None:
        if self._cached is not None and self._cached.fill(buffers, offset):
            return
        views = [buffer.data for buffer in buffers]
        if self._bringing and (nbytes := sum(map(len, views))) >= SMALL:
            self._bring(offset, nbytes)
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

    def _bring(self, offset: int, nbytes: int) -> None:
        """Has what lies at `offset` read into the page cache in large pages, unless it is there already."""
        self._bringing = is_missing(self._fd, offset)  # what is there is, as a rule, there to its end
        if self._bringing:
            with suppress(OSError), closing(CachedFile(self._fd, self._size)) as file:
                file.bring(offset, nbytes)

    def _error(self, problem: Problem, message: str) -> ShardError:
        return ShardError(problem, self._path, message)


def read_record(path: Path, layout: StoreLayout) -> ShardRecord:
    """What the shard at `path` says of itself; nothing else of it is looked at.

    Raises ShardError: `missing`, `unreadable`; `truncated` where the file is shorter than a tail; `record` where there is no
    sound record in it.
    """
    if not layout.records:
        raise ShardError("record", path, "has no record: stores of its format have none")
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            place = size - layout.tail_bytes
            data = os.pread(fd, layout.record_bytes, place) if place >= 0 else b""
        finally:
            os.close(fd)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        raise ShardError("missing" if missing else "unreadable", path, f"cannot be read: {error.strerror}") from error
    if place < 0:
        raise ShardError("truncated", path, f"has {size} bytes; expected a tail of {layout.tail_bytes} at its end")
    try:
        return decode(data, crc32c_bytes)
    except ValueError as error:
        raise ShardError("record", path, f"has no sound record: it {error}") from error
