"""Log output: structlog, as JSON lines or, on a terminal, as coloured text.

Events are facts, `noun.verb_past` plus fields. The standard library's loggers (aiohttp, asyncio) come out the same way.
"""

from __future__ import annotations

import atexit
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Literal, TextIO, cast

import msgspec
import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from structlog.typing import Processor

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "json", "console"]

PER_SAMPLE: Final = "sample.committed"
"""The canonical line of one sample: an audit trail in JSON, noise on a terminal."""

EVENTS: Final[dict[str, tuple[Level, str]]] = {
    "job.began": ("info", "the job is open; name, run, store, and the samples by state before this run"),
    "job.progressed": ("info", "where the run stands, now and then, where there is no terminal"),
    "config.doubted": ("warning", "the job file works, but a setting is doubtful; key and message, as `hsx check` prints them"),
    "dataset.indexing": ("info", "the dataset is being read; rows and tokens so far"),
    "status.listening": ("info", "the status endpoint is up; url"),
    "run.draining": ("info", "a signal came: no new samples, what is in flight is finished; signal, attempts in flight"),
    "run.forced": ("warning", "a second signal came: the run ends now; what was not committed is done again"),
    "run.unvouched": (
        "warning",
        "the run ends, and no canary stands behind the last samples of these epochs: run the job again; epochs",
    ),
    "sample.shared": (
        "info",
        "one sample is durable without a prefill of its own: its prompt is that of marker, and its shard a link to that one",
    ),
    PER_SAMPLE: ("info", "one sample is durable: the canonical line, with marker, epoch, sequence, root and timings"),
    "root.lost": ("error", "a root is out of service in this run; its committed samples stay; root, kind, message"),
    "intake.paused": ("error", "no sample is started: disks or dump directory have no room; kind, and what to free in message"),
    "intake.resumed": ("info", "there is room again; kind, and how many seconds it took"),
    "attempt.failed": ("warning", "an attempt failed by the sample's own fault and will be repeated; marker, reason, evidence"),
    "sample.quarantined": ("error", "an attempt failed for good; marker, reason, evidence"),
    "invariant.violated": ("warning", "an invariant does not hold; invariant, evidence, and the marker unless it is the run's"),
    "engine.state_changed": ("info", "the engine's life took a step; state and reason"),
    "engine.waiting": ("info", "what the engine waits for while it comes up; reason"),
    "engine.restarted": ("error", "the epoch is void and a restart follows; reason, evidence, samples requeued, delay"),
    "canary.passed": ("info", "hsx's own prompts came back sound; epoch, and the sequence up to which that vouches"),
    "samples.revoked": ("error", "committed samples are taken back and extracted again; epoch, invariant, evidence, count"),
    "sample.convicted": ("error", "a sample was found to kill the server, and is quarantined; index, and how many deaths"),
    "epoch.began": ("info", "a server passed the boot gate; `continued` where an earlier run had used it"),
    "error.met": ("error", "anything else that went wrong; kind and message"),
    "systemd.notify_failed": ("warning", "the service manager's socket took no message"),
}
"""Log events by name: their level, and what they say."""


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


def configure(level: Level, format: Format, stream: TextIO, *, samples: bool = True) -> None:  # noqa: A002 - the key's name
    """Sets up logging for the process.

    Args:
        level: lowest level that is written.
        format: `json`: one object a line; `console`: text; `auto`: console where `stream` is a terminal.
        stream: where to; every line is flushed. One that fails loses lines and does no other harm.
        samples: False leaves the line for each committed sample out.
    """
    lenient = LenientStream(stream)
    atexit.register(lenient.settle)
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
    # Libraries talk at INFO about what hsx reports itself.
    root.setLevel(max(number, logging.WARNING))


def _to_json(event: MutableMapping[str, Any], **_options: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()


def _drop_samples(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if event.get("event") in (PER_SAMPLE, "sample.shared"):
        raise structlog.DropEvent
    return event
