"""The page-aligned memory of a writer thread: what surrounds the bytes that are written from where they lie."""

from __future__ import annotations

import mmap
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import CRC_BYTES, NAN_BITS, PAGE
from hsx.stores.checksum import combine, crc32c

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout

BATCH_BYTES: Final = 64 << 20
"""What one call writes: the disk is kept busy as long as one call lasts, also while the processor is wanted elsewhere."""
COPIED_BYTES: Final = 8 << 20
"""The same where every byte passes through scratch memory."""
BATCH_BLOCKS: Final = 256  # a few buffers a block; the kernel takes 1024 in one call
_FILL_BYTES: Final = 1 << 20


class Scratch:
    """Buffers used again for every shard.

    A block is its `head`, written from where it is, and the rest, which lies here: rows that fill no page, fill, checksum, and
    zeros up to the next page. Of the fill, whole pages are written from memory that all threads share.

    Args:
        layout: the store's shape.
        straight: heads are written from where they are; otherwise every byte passes through here.

    Attributes:
        straight: see above.
        blocks: how many blocks may be in use at once.
        tail: uint8 [tail_bytes], the shard's tail.
    """

    def __init__(self, layout: StoreLayout, *, straight: bool) -> None:
        self.straight = straight
        self._chunk_bytes = layout.chunk_bytes
        # Beside the end of the block, a page for the rows of the last chunk that fill none.
        self._end = self._chunk_bytes // PAGE * PAGE if straight else 0
        rest = layout.block_bytes - self._end
        self.blocks = min(max((BATCH_BYTES if straight else COPIED_BYTES) // layout.block_bytes, 1), BATCH_BLOCKS)
        memory = np.frombuffer(mmap.mmap(-1, self.blocks * rest + PAGE + layout.tail_bytes), np.uint8)
        self._rests = memory[: self.blocks * rest].reshape(self.blocks, rest)
        self._edge = memory[self.blocks * rest : self.blocks * rest + PAGE]
        self.tail = memory[self.blocks * rest + PAGE :]

    def block(self, slot: int, rows: NDArray[np.uint8], crc: int) -> tuple[NDArray[np.uint8], list[memoryview]]:
        """A block as what is written from where it is, and what follows that.

        Args:
            slot: below `blocks`; the result is valid until the slot is used again.
            rows: bytes of the rows of an inner chunk; less than a whole one is filled up. At most one such block is in use.
            crc: crc32c of `rows`.
        """
        rest = self._rests[slot]
        end = self._end
        head = min(rows.size // PAGE * PAGE, end) if self.straight else 0
        views: list[memoryview] = []
        crc = extend_with_fill(crc, self._chunk_bytes - rows.size)
        at = head
        if at < end:  # the rows end before the last page of the block: an edge, and pages of fill
            copied = rows.size - at
            self._edge[:copied] = rows[at:]
            fill(self._edge[copied:], NAN_BITS)
            views += [self._edge.data, *_fill_views(end - at - PAGE)]
            at = end
        else:
            rest[: rows.size - at] = rows[at:]
        used = max(rows.size - at, 0)
        stop = self._chunk_bytes - end
        fill(rest[used:stop], NAN_BITS)
        rest[stop : stop + CRC_BYTES].view("<u4")[0] = crc
        return rows[:head], [*views, rest.data]

    def encoded_block(self) -> NDArray[np.uint8]:
        """The memory of one block, `block_bytes`, of any content; only where not `straight`. Valid until the next call."""
        block: NDArray[np.uint8] = self._rests[0]
        return block

    def encoded(self, data: NDArray[np.uint8], crc: int) -> NDArray[np.uint8]:
        """A block of compressed bytes: with their checksum, and zeros up to the next page. Valid until the next call."""
        block = self._rests.reshape(-1)
        size = -(-(data.size + CRC_BYTES) // PAGE) * PAGE
        block[: data.size] = data
        block[data.size : size] = 0
        block[data.size : data.size + CRC_BYTES] = np.frombuffer(crc.to_bytes(CRC_BYTES, "little"), np.uint8)
        return block[:size]


def fill(memory: NDArray[np.uint8], value: int) -> None:
    """Sets all of `memory` to a 16-bit or 64-bit `value`, little endian."""
    if memory.size:
        memory.view("<u8" if value >> 16 else "<u2")[:] = value


def extend_with_fill(crc: int, nbytes: int, bits: int = NAN_BITS) -> int:
    """The checksum `crc`, continued with `nbytes` of fill, whose 16-bit value is `bits`."""
    return combine(crc, _fill_crc(nbytes, bits), nbytes) if nbytes else crc


@lru_cache(maxsize=256)  # a chunk has no more lengths
def _fill_crc(nbytes: int, bits: int) -> int:
    crc = 0
    for view in _fill_views(nbytes, bits):
        crc = crc32c(np.frombuffer(view, np.uint8), crc)
    return crc


def _fill_views(nbytes: int, bits: int = NAN_BITS) -> list[memoryview]:
    """`nbytes` of fill, as views of one piece of memory."""
    piece = _fill_memory(bits)
    whole, rest = divmod(nbytes, _FILL_BYTES)
    return [piece] * whole + ([piece[:rest]] if rest else [])


@cache
def _fill_memory(bits: int) -> memoryview:
    memory = np.frombuffer(mmap.mmap(-1, _FILL_BYTES), np.uint8)
    fill(memory, bits)
    return memory.data
