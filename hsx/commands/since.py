"""What `--since` takes: a span of time, a moment, or the last sound verification."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Final

from hsx.errors import RunError

LAST: Final = "last"
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")


def since(text: str, now: float, last: float | None) -> float:
    """The moment that is meant, in Unix seconds.

    Args:
        text: `90m`, `12h`, `3d` before now; an ISO 8601 date or time, local unless it names its zone; or `last`.
        now: Unix seconds.
        last: what `last` stands for; None where there was none.

    Raises:
        RunError: `usage`.
    """
    if text == LAST:
        if last is None:
            raise RunError(
                "usage", "--since last: no verification of this store has found it sound yet; expected a whole one before"
            )
        return last
    if span := _SPAN.fullmatch(text):
        return now - float(span[1]) * _UNITS[span[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise RunError(
            "usage", f"--since is {text!r}; expected a span such as 90m, 12h or 3d, an ISO 8601 time, or {LAST!r}"
        ) from error
