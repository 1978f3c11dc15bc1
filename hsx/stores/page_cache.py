"""Reads a file that is in the page cache at the speed of memory.

`preadv` copies inside the kernel, page by page; through a mapping the same bytes are copied by the C library, on some
machines at three times the speed. What makes mappings dangerous is that a disk's error is SIGBUS, which ends the process. So
every piece is first brought in with MADV_POPULATE_READ, which fails with an errno instead; the caller then reads it with
`preadv`, and gets the error by its name.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

WORTH_WHILE: Final = 16 << 20
"""Bytes of a file below which `preadv` is as fast: what it copies stays in the processor's caches."""
SMALL: Final = 256 << 10
"""Bytes that are read quickly out of pages of any size."""
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, Linux 5.14; older kernels answer EINVAL, and everything is read with preadv
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_CACHESTAT: Final = 451  # Linux 6.5, the same number on all machines; older kernels answer ENOSYS
_LIBC.syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CachedFile:
    """A mapping of an open file. The file must not be truncated meanwhile. One thread at a time.

    Args:
        fd: the file, open for reading; it may be closed while this is in use.
        size: its bytes, at least 1.

    Raises:
        OSError: the file system has no mappings.
    """

    def __init__(self, fd: int, size: int) -> None:
        self._map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        with suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._address = int(self._bytes.ctypes.data)

    def close(self) -> None:
        """Removes the mapping. Idempotent."""
        self._bytes = np.empty(0, np.uint8)  # it holds the mapping open
        self._map.close()

    def bring(self, offset: int, nbytes: int) -> bool:
        """Has what lies at `offset` read into the page cache. Returns False where it cannot be had, as `fill`."""
        start = offset - offset % PAGE
        # Not mmap.madvise: it keeps the interpreter lock while the disk works.
        end = offset + nbytes
        return end <= self._bytes.size and not _LIBC.madvise(self._address + start, end - start, _POPULATE_READ)

    def fill(self, buffers: Sequence[NDArray[np.uint8]], offset: int) -> bool:
        """Fills 1-D buffers, one behind the other, with what lies at `offset`.

        Returns False where it cannot be had: there is no such place in the file, the disk fails, or the kernel is too old.
        """
        if not self.bring(offset, sum(buffer.size for buffer in buffers)):
            return False
        for buffer in buffers:
            np.copyto(buffer, self._bytes[offset : offset + buffer.size])
            offset += buffer.size
        return True


def is_missing(fd: int, offset: int) -> bool:
    """Whether the page of a file at `offset` is not in the page cache; False also where the kernel does not tell."""
    place = (ctypes.c_uint64 * 2)(offset, 1)
    found = (ctypes.c_uint64 * 5)()  # the first says how many pages are cached
    return _LIBC.syscall(_CACHESTAT, fd, place, found, 0) == 0 and not found[0]
