"""Memory that samples are read into, used again when nobody holds what was read into it.

A trainer takes a sample, copies it to its device and lets go of it. New memory for each of them would be cleared and mapped
page by page by the kernel, which can take longer than reading the sample.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import PAGE

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEPT_BYTES: Final = 512 << 20
"""At most so much memory is kept, used or not."""
KEPT_BUFFERS: Final = 64
"""At most so many pieces: whoever asks for memory looks at each of them where none is free."""
SMALL: Final = 1 << 16
"""Smaller pieces come from the C library, which does the same for them."""
_WASTE: Final = 4  # so many times the memory that it needs an array may hold
_UNUSED: Final = 2  # references to a buffer that is in no array: the local name, and getrefcount's own argument


class BufferPool:
    """Gives out memory for bf16 bits. Safe to use from several threads and across a fork: it has no lock that could be held.

    Every array, view or tensor made of a buffer holds a reference to it, so one that has no references but the pool's is free.

    Args:
        kept_bytes: memory that is kept at most.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._buffers: deque[NDArray[np.uint8]] = deque()  # whoever has popped one has it alone

    def empty(self, shape: tuple[int, ...]) -> NDArray[np.uint16]:
        """An array of `shape` with any content, C-contiguous and uint16."""
        nbytes = 2 * math.prod(shape)
        if nbytes < SMALL:
            return np.empty(shape, np.uint16)
        buffer = self._take(nbytes + PAGE, _WASTE * nbytes)
        if buffer is None:
            buffer = np.empty(_size_class(nbytes + PAGE), np.uint8)
            while not self._has_room(buffer.size) and self._take(0, self._kept_bytes) is not None:
                pass  # free ones that fitted nothing lately make room
        # numpy's large arrays begin 16 bytes behind a page, and the kernel copies to pages in a third of the time.
        start = -buffer.__array_interface__["data"][0] % PAGE
        made = buffer[start : start + nbytes].view(np.uint16).reshape(shape)
        if self._has_room(buffer.size):
            self._buffers.append(buffer)
        return made

    def _has_room(self, nbytes: int) -> bool:
        return len(self._buffers) < KEPT_BUFFERS and self._kept() + nbytes <= self._kept_bytes

    def _kept(self) -> int:
        return sum(buffer.size for buffer in list(self._buffers))

    def _take(self, least: int, most: int) -> NDArray[np.uint8] | None:
        """Takes the free buffer of `least` to `most` bytes out that has been there for longest."""
        for _ in range(len(self._buffers)):
            try:
                buffer = self._buffers.popleft()
            except IndexError:  # another thread has it
                return None
            if sys.getrefcount(buffer) <= _UNUSED and least <= buffer.size <= most:
                return buffer
            self._buffers.append(buffer)
        return None


def _size_class(nbytes: int) -> int:
    """`nbytes`, rounded up by an eighth at most, so that samples of like lengths use each other's memory."""
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step
