"""crc32c, and the digest by which a shard names its tokens."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import numpy as np
from awscrt import checksums

if TYPE_CHECKING:
    from numpy.typing import NDArray


def crc32c(data: NDArray[np.uint8], start: int = 0) -> int:
    """The crc32c of `data` (uint8, 1-D, contiguous), continuing from the checksum `start` of what came before it.

    The interpreter lock is let go meanwhile. Raises BufferError or ValueError for what does not lie in one piece.
    """
    return cast("int", checksums.crc32c(data, start))


def crc32c_bytes(data: bytes) -> int:
    """The crc32c of a few bytes."""
    return cast("int", checksums.crc32c(data))


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32c of A+B out of crc32c(A), crc32c(B) and the number of bytes of B, without touching the data again."""
    return cast("int", checksums.combine_crc32c(first, second, second_bytes))


def ids_digest(ids: NDArray[np.int32]) -> str:
    """sha256 of a sample's ids, int32 [tokens], in little endian: `ShardRecord.ids`."""
    return hashlib.sha256(np.ascontiguousarray(ids, "<i4").data).hexdigest()
