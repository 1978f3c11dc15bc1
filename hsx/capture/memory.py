"""Memory that the writer process sees, too: the staging pool lies in it."""

from __future__ import annotations

import errno
import mmap
import os
import weakref

import numpy as np


class SharedMemory:
    """Zeros at first; a page takes real memory when it is first touched, and none of it lies in a file system.

    A descriptor of it (memfd) and a shared mapping. The descriptor is closed with the object, the mapping with its last array.

    Args:
        nbytes: its size.

    Raises:
        OSError: there is no such memory here.
    """

    def __init__(self, nbytes: int) -> None:
        if not hasattr(os, "memfd_create"):  # a Python that was built for old systems lacks it on a new one, too
            raise OSError(errno.ENOSYS, "this Python has no os.memfd_create")
        self.fd = os.memfd_create("hsx-staging")
        """Descriptor of the memory; not inherited, unless it is passed."""
        try:
            os.ftruncate(self.fd, nbytes)
            self.bytes = map_bytes(self.fd, nbytes)
            """uint8 [nbytes]."""
        except BaseException:
            os.close(self.fd)
            raise
        self._begin = address(self.bytes)
        self._closed = weakref.finalize(self, os.close, self.fd)

    def close(self) -> None:
        """Gives the memory back, as soon as no array is left that lies in it."""
        self._closed()
        self.bytes = np.empty(0, np.uint8)

    def at(self, part: np.ndarray) -> int:
        """Where a part of it begins, in bytes. Raises ValueError for an array that lies elsewhere, or not in one piece."""
        offset = address(part) - self._begin
        if not 0 <= offset <= len(self.bytes) - part.nbytes or not part.flags.c_contiguous:
            raise ValueError(f"{part.nbytes} bytes lie at {offset}; expected a part of {len(self.bytes)} bytes, in one piece")
        return offset


def map_bytes(fd: int, nbytes: int) -> np.ndarray:
    """Such memory as uint8 [nbytes], given its descriptor. Raises OSError."""
    return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)


def address(array: np.ndarray) -> int:
    """Where an array begins in this process. As `ctypes.data`, at a fraction of its cost."""
    return int(array.__array_interface__["data"][0])
