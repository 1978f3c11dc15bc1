"""Amounts in words, for people."""

from __future__ import annotations

from typing import Final

_UNITS: Final = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def in_words(nbytes: int) -> str:
    """Bytes as "512 bytes", "1.5 MB" or "2.31 TB": three digits, in powers of ten."""
    for unit, name in _UNITS:
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.3g} {name}" if abs(nbytes) < 999.5 * unit else f"{nbytes / unit:.0f} {name}"
    return f"{nbytes} bytes"
