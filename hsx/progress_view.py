"""How a run shows its progress to people: bars on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from hsx.core.amounts import in_words

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN_EVERY_S = 30.0


class ProgressView(Protocol):
    """What the run feeds; `interval_s` says how often it likes to be fed."""

    interval_s: float

    def update(self, snapshot: dict[str, Any]) -> None:
        """Shows `Telemetry.snapshot()`. Cheap; called on the event loop."""
        ...

    def close(self) -> None:
        """The run ended: gives the terminal back. Idempotent."""
        ...


def summary_line(snapshot: dict[str, Any]) -> str:
    """One line on where the run stands; needs nothing to be known yet."""
    progress, engine = snapshot["progress"], snapshot["engine"]
    samples, tokens = progress["samples"], progress["tokens"]
    total = samples.get("total")
    done = samples.get("committed", samples["committed_by_run"])
    parts = [
        f"samples {done}/{total}" if total is not None else f"samples {done}",
        *(f"PAUSED: {pause['message']}" for pause in snapshot["intake"]["pauses"]),
        f"{tokens['per_second']['minute']:.0f} tokens/s",
        f"{in_words(round(progress['bytes']['per_second']['minute']))}/s",
        f"in flight {snapshot['in_flight']['requests']}",
        f"engine {engine['state']}",
    ]
    lost = [name for name, root in snapshot["roots"].items() if root["state"] == "lost"]
    if lost:
        parts.append(f"roots lost: {', '.join(lost)}")
    for words, count in (
        ("quarantined", snapshot["quarantine"]["count"]),
        ("violations", snapshot["invariants"]["violations"]),
        ("restarts", engine["restarts"]["total"]),
    ):
        if count:
            parts.append(f"{words} {count}")
    if engine["waiting_for"]:
        parts.append(f"waiting: {engine['waiting_for']}")
    left = progress["eta"]["seconds"]
    if left is not None:
        parts.append(f"left {duration(left)}")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as "41 s", "12 min", "3 h 20 min" or "2 d 5 h"."""
    whole = round(seconds)
    if whole < 90:
        return f"{whole} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


class PlainView:
    """A line every `every_s` seconds, and one at the end if anything changed since.

    Args:
        write: takes each line, without its newline.
        every_s: seconds between lines.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        *,
        every_s: float = PLAIN_EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = every_s
        self._write = write
        self._clock = clock
        self._next = clock()
        self._line = self._written = ""

    def update(self, snapshot: dict[str, Any]) -> None:
        """Keeps the line, and writes it when it is time."""
        self._line = summary_line(snapshot)
        if self._clock() >= self._next:
            self._next = self._clock() + self.interval_s
            self._flush()

    def close(self) -> None:
        """Writes the last line, unless it has been written."""
        self._flush()

    def _flush(self) -> None:
        if self._line != self._written:
            self._written = self._line
            self._write(self._line)


class BarView:
    """A bar that moves by tokens, which are what takes time, beside the counts of samples."""

    def __init__(self, stream: TextIO) -> None:
        self.interval_s = 0.5
        # sys.stderr is replaced by rich while the bar stands, so that log lines go above it: configure logging after this.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>5.1f} %"),
            TimeElapsedColumn(),
            _SummaryColumn(),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("hsx", total=None, summary="starting")
        self._progress.start()

    def update(self, snapshot: dict[str, Any]) -> None:
        tokens = snapshot["progress"]["tokens"]
        self._progress.update(
            self._task,
            description=snapshot["job"].get("name", "hsx"),
            total=tokens.get("total"),
            completed=tokens.get("committed", tokens["committed_by_run"]),
            summary=summary_line(snapshot),
        )

    def close(self) -> None:
        self._progress.stop()


class _SummaryColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(str(task.fields["summary"]), no_wrap=True, overflow="ellipsis")
