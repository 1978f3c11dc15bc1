"""Amounts in words, for people: the one way in which hsx writes how much something is.

Sizes of files that are held against each other, to find what is damaged, are told in bytes, every digit.
"""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def in_words(nbytes: int) -> str:
    """Bytes as "512 bytes", "1.5 MB" or "2.31 TB": three digits, in powers of ten."""
    for unit, name in _UNITS:
        if abs(nbytes) >= 0.9995 * unit:  # 999.6 MB is a GB in three digits
            return f"{nbytes / unit:.3g} {name}" if abs(nbytes) < 999.5 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes} byte{'' if abs(nbytes) == 1 else 's'}"


def in_words_and_bytes(nbytes: int) -> str:
    """Likewise, with the very number where that is another one: a limit that somebody is to set or to reach."""
    words = in_words(nbytes)
    return words if words.endswith(("byte", "bytes")) else f"{words} ({nbytes} bytes)"
