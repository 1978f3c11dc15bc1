"""crc32c over large buffers in pieces, and the digest by which a shard names its tokens."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, cast

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# google_crc32c holds the interpreter lock for the length of a call; 1 MiB keeps the event loop's stalls well under 1 ms.
PIECE: Final = 1 << 20


def crc32c(data: NDArray[np.uint8], start: int = 0) -> int:
    """The crc32c of `data` (uint8, 1-D, contiguous), continuing from the checksum `start` of what came before it."""
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
