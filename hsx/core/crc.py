"""Joining crc32c checksums without touching the data again.

A shard carries one crc32c per inner chunk and the ledger one for the whole payload. The second follows from the first: a
checksum is the remainder of a polynomial over GF(2), and to put n bytes behind the data is to multiply by x to the 8n.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0x82F63B78  # Castagnoli; like all numbers here, bit-reversed: the top bit is the coefficient of x^0
_ONE: Final = 1 << 31


def combine(first: int, second: int, second_bytes: int) -> int:
    """The crc32c of A+B out of crc32c(A), crc32c(B) and the number of bytes of B."""
    return _times(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """x to the power of 8 * `nbytes`, modulo the polynomial."""
    power = _ONE >> 8  # x^8
    result = _ONE
    while nbytes:
        if nbytes & 1:
            result = _times(power, result)
        power = _times(power, power)
        nbytes >>= 1
    return result


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
