"""Reads inner chunks from the device itself, past the page cache.

Reading a file that is not in the cache costs several times the processor time of the copy out of it: pages are found, mapped
and thrown out again, and others' pages with them. A shard was written past the cache and is, as a rule, not in it.
"""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import CRC_BYTES, PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout

AT_ONCE: Final = 512
"""Chunks that one call reads, each with what follows it: two buffers, of which the kernel takes 1024."""


class DirectFile:
    """One open shard without compression. One thread at a time; whatever cannot be read is left to another way of reading.

    Args:
        path: the shard.
        layout: the store's shape.
    """

    def __init__(self, path: Path, layout: StoreLayout) -> None:
        self._layout = layout
        self._rests = np.empty((0, 0), np.uint8)
        self._fd = -1
        if layout.chunk_bytes % PAGE == 0:
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                return  # no O_DIRECT here

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, places: Sequence[int], chunks: NDArray[np.uint8]) -> list[int] | None:
        """Reads inner chunks that lie one behind the other, as hsx writes them.

        Args:
            places: where each begins.
            chunks: uint8 [len(places), chunk_bytes], contiguous and page-aligned; filled.

        Returns:
            The crc32c that is recorded behind each; None where they cannot be had this way, and `chunks` may have any content.
        """
        block = self._layout.block_bytes
        evenly = all(place == places[0] + number * block for number, place in enumerate(places))
        if self._fd < 0 or not evenly or places[0] % PAGE or chunks.ctypes.data % PAGE:
            return None
        rest = block - self._layout.chunk_bytes
        if len(self._rests) < len(places):
            memory = np.frombuffer(mmap.mmap(-1, len(places) * rest), np.uint8)
            self._rests = memory.reshape(len(places), rest)
        for first in range(0, len(places), AT_ONCE):
            some = zip(chunks[first : first + AT_ONCE], self._rests[first : first + AT_ONCE], strict=False)
            views = [view.data for pair in some for view in pair]
            try:
                got = os.preadv(self._fd, views, places[first])
            except OSError:
                self.close()  # refused, or the disk failed: the other way tells which
                return None
            if got != len(views) // 2 * block:
                return None
        return self._rests[: len(places), :CRC_BYTES].copy().view("<u4").reshape(-1).tolist()
