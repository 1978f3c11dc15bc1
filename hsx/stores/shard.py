"""Writes shards: the one place where hidden states reach a disk.

The bytes go straight from the dump's mapping to the device where the file system has O_DIRECT, and within the kernel, by
sendfile, where it has not: a sample costs no copy, and no checksum pass either where its checksums were taken when it was
judged. A store that keeps less than was captured is another matter: its rows pass through memory, an inner chunk at a time
(`hsx.stores.reduced`). A shard appears under its name only when it is whole and its data is on the disk; the name itself is
durable after `ShardRoot.sync`.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import CRC_BYTES, MISSING, PAGE, StoreLayout, shard_key
from hsx.core.shard_record import ShardRecord, encode
from hsx.records import Receipt
from hsx.stores.checksum import combine, crc32c, crc32c_bytes, ids_digest
from hsx.stores.codec import make_codec
from hsx.stores.durable import root_error, send_all, write_all
from hsx.stores.reduced import reduced_chunks
from hsx.stores.scratch import Scratch, extend_with_fill, fill
from hsx.stores.selection import digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import CaptureSpec
    from hsx.records import Payload

PARTIAL: Final = ".partial"


class ShardWriter:
    """Writes the shards of one root into its folder. Threads may write different samples at once.

    Args:
        folder: the root's folder of this store, where the shards lie.
        root: the root's name, for messages.
        layout: the store's shape; its shards have records.
        store: the store's uuid, for the records.
        spec: the store's capture spec, for the records.
        direct: use O_DIRECT where the file system has it.
        durable: sync the data of each shard before it gets its name.
    """

    def __init__(
        self,
        folder: Path,
        root: str,
        layout: StoreLayout,
        *,
        store: str,
        spec: CaptureSpec,
        direct: bool = True,
        durable: bool = True,
    ) -> None:
        self._folder = folder
        self._root = root
        self._layout = layout
        self._store = store
        self._spec = spec
        self._direct = direct
        self._durable = durable
        self._codec = make_codec(layout.codec)
        self._local = threading.local()

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is (still) used: turned off by the first refusal of the file system."""
        return self._direct

    def write(self, payload: Payload) -> Receipt:
        """Writes the shard of a sample; its shard of an earlier, uncommitted attempt is replaced.

        Args:
            payload: see there. `crcs` are taken as they are, where they are of this layout's chunks: a shard whose bytes
                changed since they were judged then contradicts its own checksums.

        Raises:
            RunError: `roots_full` (ENOSPC, EDQUOT; found by preallocation, before the first byte), `root_unusable` (any other
                failure). The partial file is removed. A failed fdatasync is not tried again: the kernel tells of a loss once.
            SampleError: `dump_invalid` where less is stored than was captured, and the dump is not what was judged any more.
            ValueError: the payload does not fit the layout, or contradicts itself.
        """
        check_payload(payload, self._layout)
        final = self._folder / shard_key(payload.marker.index)
        partial = self._folder / f"{final.name}.{payload.marker}{PARTIAL}"
        allocated = self._layout.file_bytes(rows_of(payload))
        try:
            try:
                fd = self._create(partial)
                try:
                    os.posix_fallocate(fd, 0, allocated)
                    crc, size = self._fill(fd, payload)
                    if size < allocated:
                        os.ftruncate(fd, size)
                    if self._durable:
                        os.fdatasync(fd)
                finally:
                    os.close(fd)
                partial.rename(final)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
        except OSError as error:
            raise root_error(error, self._root, partial) from error
        return Receipt(root=self._root, nbytes=size, crc32c=crc)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
        return os.open(path, flags, 0o644)

    def _fill(self, fd: int, payload: Payload) -> tuple[int, int]:
        """Writes blocks and tail; returns the crc32c of the payload and the size of the file."""
        layout = self._layout
        if layout.reduced:
            return self._fill_reduced(fd, payload)
        rows = payload.states.reshape(-1).view(np.uint8)
        crcs, crc = judged_crcs(payload, layout)
        if self._codec is None:
            # O_DIRECT needs pages on both sides; without it, what is not copied can begin anywhere.
            straight = not self._direct or (rows.ctypes.data % PAGE == 0 and layout.chunk_bytes % PAGE == 0)
            scratch = self._scratch(straight=straight)
            source = payload.source if straight and not self._direct else None
            entries, last, end = self._plain(fd, rows, crcs, scratch, source)
        else:
            scratch = self._scratch(straight=False)
            chunks = (rows[at : at + layout.chunk_bytes] for at in range(0, rows.size, layout.chunk_bytes))
            entries, last, end = self._compressed(fd, chunks, scratch)
        tail = scratch.tail
        write_tail(tail, layout, self._record(payload, crc), entries)
        return crc, write_all(fd, [*last, tail.data], end)

    def _plain(
        self, fd: int, rows: NDArray[np.uint8], crcs: list[int], scratch: Scratch, source: tuple[int, int] | None
    ) -> tuple[list[tuple[int, int]], list[memoryview], int]:
        """Writes uncompressed blocks but for the last ones, which go in one call with the tail.

        Returns the index's entries, the buffers that are still to be written, and the offset at which.
        """
        layout = self._layout
        size = layout.chunk_bytes
        offset = 0
        buffers: list[memoryview] = []
        for first in range(0, len(crcs), scratch.blocks):
            offset = write_all(fd, buffers, offset)
            buffers = []
            for slot, chunk in enumerate(range(first, min(first + scratch.blocks, len(crcs)))):
                at = chunk * size
                head, rest = scratch.block(slot, rows[at : at + size], crcs[chunk])
                if source is not None and head.size:
                    # Sent at once: what lies between the heads is written by the next call of write_all.
                    offset = write_all(fd, buffers, offset)
                    offset = send_all(fd, source[0], source[1] + at, head.size, offset)
                    buffers = rest
                else:
                    buffers += [head.data, *rest] if head.size else rest
        return [(chunk * layout.block_bytes, size + CRC_BYTES) for chunk in range(len(crcs))], buffers, offset

    def _fill_reduced(self, fd: int, payload: Payload) -> tuple[int, int]:
        """As `_fill`, for a store that keeps less: the checksums are those of what is stored."""
        layout = self._layout
        scratch = self._scratch(straight=False)
        crcs: list[tuple[int, int]] = []

        def chunks() -> Iterator[NDArray[np.uint8]]:
            for rows in reduced_chunks(payload, layout):
                crcs.append((crc32c(rows), rows.size))
                yield rows

        if self._codec is None:
            entries, last, end = self._copied(fd, chunks(), crcs, scratch)
        else:
            entries, last, end = self._compressed(fd, chunks(), scratch)
        crc = joined(crcs)
        write_tail(scratch.tail, layout, self._record(payload, crc), entries)
        return crc, write_all(fd, [*last, scratch.tail.data], end)

    def _copied(
        self, fd: int, chunks: Iterator[NDArray[np.uint8]], crcs: list[tuple[int, int]], scratch: Scratch
    ) -> tuple[list[tuple[int, int]], list[memoryview], int]:
        """Writes uncompressed blocks one by one out of scratch memory; `crcs` has that of the chunk that came last. As
        `_plain`."""
        layout = self._layout
        size = layout.chunk_bytes
        entries = []
        offset = 0
        for rows in chunks:
            block = scratch.encoded_block()
            block[: rows.size] = rows
            fill(block[rows.size : size], layout.fill_bits)
            crc = extend_with_fill(crcs[-1][0], size - rows.size, layout.fill_bits)
            block[size:] = 0
            block[size : size + CRC_BYTES] = np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)
            entries.append((offset, size + CRC_BYTES))
            offset = write_all(fd, [block.data], offset)
        return entries, [], offset

    def _compressed(
        self, fd: int, chunks: Iterator[NDArray[np.uint8]], scratch: Scratch
    ) -> tuple[list[tuple[int, int]], list[memoryview], int]:
        """Writes compressed blocks; returns as `_plain`."""
        assert self._codec is not None
        size = self._layout.chunk_bytes
        entries = []
        offset = 0
        block: list[memoryview] = []
        for rows in chunks:
            chunk = rows
            if chunk.size < size:
                whole = np.empty(size, np.uint8)
                whole[: chunk.size] = chunk
                whole[chunk.size :].view(np.uint16)[:] = self._layout.fill_bits
                chunk = whole
            encoded = np.frombuffer(self._codec.encode(chunk), np.uint8)
            offset = write_all(fd, block, offset)
            entries.append((offset, encoded.size + CRC_BYTES))
            block = [scratch.encoded(encoded, crc32c(encoded)).data]
        return entries, block, offset

    def _record(self, payload: Payload, crc: int) -> ShardRecord:
        return make_record(payload, self._store, self._spec, self._layout, crc)

    def _scratch(self, *, straight: bool) -> Scratch:
        """This thread's scratch; made anew when the way of writing changes, so that padding stays zero."""
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.straight != straight:
            scratch = self._local.scratch = Scratch(self._layout, straight=straight)
        return scratch


def check_payload(payload: Payload, layout: StoreLayout) -> None:
    """Raises ValueError for a payload that does not fit the layout, or contradicts itself."""
    states, marker = payload.states, payload.marker
    if states.dtype != np.uint16 or states.ndim != 3 or not states.flags.c_contiguous:
        raise ValueError(f"states are {states.dtype} {states.shape}; expected C-contiguous uint16 [tokens, L, H]")
    if states.shape[1:] != (layout.states, layout.hidden_size) or not 0 <= marker.index < layout.samples:
        raise ValueError(f"sample {marker.index} has states {states.shape}; the store is {layout.shape}")
    layout.check_tokens(states.shape[0])
    if len(payload.crcs) not in {0, layout.chunks(states.shape[0])}:
        raise ValueError(
            f"sample {marker.index} has {len(payload.crcs)} checksums; its {states.shape[0]} tokens are "
            f"{layout.chunks(states.shape[0])} inner chunks of {layout.chunk_tokens}"
        )
    kept = payload.kept
    if (kept is not None) != layout.selects:
        raise ValueError(
            f"sample {marker.index} {'has' if kept is not None else 'lacks'} kept tokens; the store keeps {layout.kept}"
        )
    if kept is not None and not (kept.size and kept[0] >= 0 and kept[-1] < states.shape[0] and bool((np.diff(kept) > 0).all())):
        raise ValueError(
            f"sample {marker.index} keeps {kept.size} tokens; expected rising ones, from 0 to {states.shape[0] - 1}"
        )
    if not marker.tokens == states.shape[0] == payload.input_ids.size:
        raise ValueError(
            f"marker {marker} is of {marker.tokens} tokens; its payload has {states.shape[0]} rows and "
            f"{payload.input_ids.size} ids"
        )


def rows_of(payload: Payload) -> int:
    """How many rows the shard of a payload has."""
    return payload.marker.tokens if payload.kept is None else payload.kept.size


def joined(crcs: list[tuple[int, int]]) -> int:
    """The crc32c of pieces one after the other, of which each one's and its size are given."""
    crc = crcs[0][0]
    for other, size in crcs[1:]:
        crc = combine(crc, other, size)
    return crc


def make_record(payload: Payload, store: str, spec: CaptureSpec, layout: StoreLayout, crc: int) -> ShardRecord:
    """The record of a payload whose crc32c is `crc`."""
    return ShardRecord(
        store=store,
        index=payload.marker.index,
        marker=str(payload.marker),
        epoch=payload.epoch,
        sequence=payload.sequence,
        tokens=payload.marker.tokens,
        ids=ids_digest(payload.input_ids),
        layers=spec.layers,
        final=spec.final,
        hidden_size=layout.hidden_size,
        crc32c=crc,
        rows=0 if payload.kept is None else payload.kept.size,
        kept="" if payload.kept is None else digest(payload.kept),
        dtype=layout.dtype,
    )


def judged_crcs(payload: Payload, layout: StoreLayout) -> tuple[list[int], int]:
    """The crc32c of each inner chunk's rows, and of all: those of the bytes that were judged, where they are known."""
    chunks = layout.chunks(payload.marker.tokens)
    rows = payload.states.reshape(-1).view(np.uint8)
    crcs = list(payload.crcs) or [crc32c(rows[at : at + layout.chunk_bytes]) for at in range(0, rows.size, layout.chunk_bytes)]
    crc = crcs[0]
    for chunk in range(1, chunks):
        crc = combine(crc, crcs[chunk], min(layout.chunk_bytes, rows.size - chunk * layout.chunk_bytes))
    return crcs, crc


def write_tail(tail: NDArray[np.uint8], layout: StoreLayout, record: ShardRecord, entries: list[tuple[int, int]]) -> None:
    """Fills the tail of a shard.

    Args:
        tail: uint8 [tail_bytes].
        layout: the store's shape.
        record: what the shard says of itself.
        entries: (offset, nbytes) of each inner chunk that is there, in order.
    """
    tail[:] = 0
    tail[: layout.record_bytes] = np.frombuffer(encode(record, layout.record_bytes, crc32c_bytes), np.uint8)
    index = tail[-layout.index_bytes :]
    fill(index[:-CRC_BYTES], MISSING)
    index[: 16 * len(entries)].view("<u8")[:] = np.array(entries, "<u8").reshape(-1)
    index[-CRC_BYTES:].view("<u4")[0] = crc32c(index[:-CRC_BYTES])
