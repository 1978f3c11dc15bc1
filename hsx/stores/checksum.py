"""crc32c over large buffers, without the interpreter lock, and the digest by which a shard names its tokens."""

from __future__ import annotations

import ctypes
import hashlib
import sys
from typing import TYPE_CHECKING, Final, cast

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from numpy.typing import NDArray

PIECE: Final = 1 << 20
"""The most that google_crc32c is given at once: it holds the interpreter lock for as long as it reads an array."""
_SMALL: Final = 1 << 16
"""Bytes that take less time than letting go of the lock and getting it again may."""


def c_function(module: ModuleType | None) -> Callable[[int, int, int], int] | None:
    """google_crc32c's own C function, (checksum so far, address, bytes); ctypes calls it without the interpreter lock.

    None where `module`, its extension, is not there, or was built so that nothing else can call what is in it.
    """
    try:
        function = ctypes.CDLL(str(module.__file__)).crc32c_extend if module else None
    except (OSError, AttributeError):
        return None
    if function is None:
        return None
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_uint32
    return cast("Callable[[int, int, int], int]", function)


_EXTEND: Final = c_function(sys.modules.get("google_crc32c._crc32c"))


def crc32c(data: NDArray[np.uint8], start: int = 0) -> int:
    """The crc32c of `data` (uint8, 1-D, contiguous), continuing from the checksum `start` of what came before it."""
    if _EXTEND is not None and data.size >= _SMALL and data.flags.c_contiguous:
        return _EXTEND(start, data.__array_interface__["data"][0], data.nbytes)
    crc = start
    for at in range(0, data.size, PIECE):
        crc = cast("int", google_crc32c.extend(crc, data[at : at + PIECE]))
    return crc


def crc32c_bytes(data: bytes) -> int:
    """The crc32c of a few bytes."""
    return cast("int", google_crc32c.value(data))


def ids_digest(ids: NDArray[np.int32]) -> str:
    """sha256 of a sample's ids, int32 [tokens], in little endian: `ShardRecord.ids`."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").data).hexdigest()
