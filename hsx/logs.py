"""Log output: structlog, as JSON lines or, on a terminal, as coloured text.

Events are facts, `noun.verb_past` plus fields; `hsx.events` lists them all. The standard library's loggers (aiohttp, asyncio)
come out the same way. Where the stream leads to systemd's journal, each line carries its priority.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import msgspec
import structlog

from hsx.events import ONCE_A_SAMPLE, Level
from hsx.journal import leads_to_journal, with_priority

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from structlog.typing import Processor

__all__ = ["Format", "LenientStream", "Level", "Thinned", "configure", "set_level"]

Format = Literal["auto", "json", "console"]

BURST_S: Final = 10.0
"""After a pause, so many seconds' worth of lines for samples are written at once."""


class LenientStream:
    """A text stream for the log of a job that must not end because its log cannot be written: full disk, closed pipe.

    Lines that cannot be written are lost; later ones are tried again.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes, or loses, `text`."""
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flushes what can be flushed."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def settle(self) -> None:
        """For the end of the process: what still cannot be written must not turn into the interpreter's exit status 120."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class Thinned:
    """Lets through as many lines for committed samples as a log can bear; the next one says how many were left out.

    Args:
        per_second: lines a second in the long run; 0: none.
        clock: monotonic seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._clock = clock
        self._allowed = per_second * BURST_S
        self._looked = clock()
        self._unlogged = 0

    def __call__(self, _logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """A structlog processor. Raises structlog.DropEvent for a line too many."""
        if event.get("event") not in ONCE_A_SAMPLE:
            return event
        now = self._clock()
        earned = (now - self._looked) * self._per_second
        self._looked = now
        self._allowed = min(self._allowed + earned, self._per_second * BURST_S)
        if self._allowed < 1:
            self._unlogged += 1
            raise structlog.DropEvent
        self._allowed -= 1
        if self._unlogged:
            event["unlogged"], self._unlogged = self._unlogged, 0
        return event


def configure(
    level: Level,
    format: Format,  # noqa: A002 - the key's name
    stream: TextIO,
    *,
    samples_per_second: float | None = None,
) -> None:
    """Sets up logging for the process.

    Args:
        level: lowest level that is written.
        format: `json`: one object a line; `console`: text; `auto`: console where `stream` is a terminal.
        stream: where to; every line is flushed. One that fails loses lines and does no other harm.
        samples_per_second: how many lines for committed samples are written in the long run; None: all, 0: none.
    """
    lenient = LenientStream(stream)
    atexit.register(lenient.settle)
    console = format == "console" or (format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console),
    ]
    ending: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if console
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    if leads_to_journal(stream):
        ending[-1] = _Prioritised(ending[-1])
    thinned: list[Processor] = [] if samples_per_second is None else [Thinned(samples_per_second)]
    structlog.configure(
        processors=[*thinned, *shared, *ending],
        # One write a line: print() writes text and newline apart, which threads could interleave.
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", lenient)),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(lenient)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: Level) -> None:
    """Changes the lowest level that is written, from now on; loggers that are in use hear of it."""
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(number))
    # Libraries talk at INFO about what hsx reports itself.
    logging.getLogger().setLevel(max(number, logging.WARNING))


class _Prioritised:
    """A renderer whose lines carry the priority of their level."""

    def __init__(self, renderer: Processor) -> None:
        self._renderer = renderer

    def __call__(self, logger: object, method: str, event: MutableMapping[str, Any]) -> str:
        level = str(event.get("level", method))
        return with_priority(level, str(self._renderer(logger, method, event)))


def _to_json(event: MutableMapping[str, Any], **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
