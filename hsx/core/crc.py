"""Joining crc32c checksums without touching the data again.

A shard carries one crc32c per inner chunk and the ledger one for the whole payload. The second follows from the first: the
checksum of A+B is linear, over GF(2), in those of A and B, with an operator that depends on the length of B alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli, bit-reversed
_Matrix = tuple[int, ...]


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32c of A+B out of crc32c(A), crc32c(B) and the number of bytes of B."""
    tables = _operator(second_bytes)
    shifted = tables[first & 0xFF] ^ tables[256 + (first >> 8 & 0xFF)] ^ tables[512 + (first >> 16 & 0xFF)]
    return shifted ^ tables[768 + (first >> 24)] ^ second


@lru_cache(maxsize=8)
def _operator(nbytes: int) -> tuple[int, ...]:
    """Four tables of 256 entries, one for each byte of a checksum, that advance it over `nbytes` zero bytes."""
    power: _Matrix = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # advances by one zero bit
    result: _Matrix = tuple(1 << bit for bit in range(32))
    remaining = nbytes * 8
    while remaining:
        if remaining & 1:
            result = tuple(_times(power, column) for column in result)
        power = tuple(_times(power, column) for column in power)
        remaining >>= 1
    return tuple(_times(result, byte << shift) for shift in (0, 8, 16, 24) for byte in range(256))


def _times(matrix: _Matrix, vector: int) -> int:
    product = 0
    for column in matrix:
        if vector & 1:
            product ^= column
        vector >>= 1
        if not vector:
            break
    return product
