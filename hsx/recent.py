"""The log of a run as its status shows it: what was said last, whatever the log's level and format."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from hsx.events import ONCE_A_SAMPLE

if TYPE_CHECKING:
    from collections.abc import Callable

    import structlog

LAST_EVENTS: Final = 100
_LONGEST_TEXT: Final = 500


class EventLog:
    """Writes log events, and keeps the last ones of level info and above; those that come once a sample are not kept.

    Args:
        logger: where they are written.
        wall: seconds since 1970.

    Attributes:
        last: the last events, oldest first: `id`, `time`, `level`, `event` and `fields`. Ids rise, over restarts of hsx too.
    """

    def __init__(self, logger: structlog.typing.FilteringBoundLogger, wall: Callable[[], float]) -> None:
        self._logger = logger
        self._wall = wall
        # A client that comes back after a restart names the last id it saw: the new ones must be above it.
        self._next = int(wall() * 1000)
        self.last: deque[dict[str, Any]] = deque(maxlen=LAST_EVENTS)

    def debug(self, event: str, **fields: object) -> None:
        """Writes an event; it is not kept."""
        self._logger.debug(event, **fields)

    def info(self, event: str, **fields: object) -> None:
        """Writes and keeps an event."""
        self._keep("info", event, fields)
        self._logger.info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        """Writes and keeps an event."""
        self._keep("warning", event, fields)
        self._logger.warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        """Writes and keeps an event."""
        self._keep("error", event, fields)
        self._logger.error(event, **fields)

    def _keep(self, level: str, event: str, fields: dict[str, object]) -> None:
        if event in ONCE_A_SAMPLE:
            return
        self._next += 1
        kept = {name: _short(value) for name, value in fields.items()}
        self.last.append({"id": self._next, "time": self._wall(), "level": level, "event": event, "fields": kept})


def _short(value: object) -> object:
    """A field as it is shown: plain and not long, so that a hundred events stay small."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
