"""Log output: structlog, as JSON lines or, on a terminal, as coloured text.

Events are facts, `noun.verb_past` plus fields. The standard library's loggers (aiohttp, asyncio) come out the same way.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec
import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from structlog.typing import Processor

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

PER_SAMPLE = "sample.committed"
"""The canonical line of one sample: an audit trail in JSON, noise on a terminal."""


def configure(level: Level, format: Format, stream: TextIO, *, samples: bool = True) -> None:  # noqa: A002 - the key's name
    """Sets up logging for the process.

    Args:
        level: lowest level that is written.
        format: `json`: one object a line; `console`: text; `auto`: console where `stream` is a terminal.
        stream: where to; every line is flushed.
        samples: False leaves the line for each committed sample out.
    """
    console = format == "console" or (format == "auto" and stream.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
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
    quiet: list[Processor] = [] if samples else [_drop_samples]
    structlog.configure(
        processors=[*quiet, *shared, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        # One write a line: print() writes text and newline apart, which threads could interleave.
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries talk at INFO about what hsx reports itself.
    root.setLevel(max(number, logging.WARNING))


def _to_json(event: MutableMapping[str, Any], **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


def _drop_samples(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.get("event") == PER_SAMPLE:
        raise structlog.DropEvent
    return event
