"""How a command that reads a whole store shows how far it is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO

from hsx.core.amounts import in_words
from hsx.progress_view import duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.verify import Reading

TERMINAL_S: Final = 0.5
PLAIN_S: Final = 30.0


class ReadingView:
    """A line with rate and time left: rewritten in place on a terminal, one every half a minute elsewhere.

    Args:
        stream: where to.
        clock: monotonic seconds.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._terminal = stream.isatty()
        self._every = TERMINAL_S if self._terminal else PLAIN_S
        self._next = clock() + self._every

    def __call__(self, reading: Reading) -> None:
        """Shows it, if it is time, or the end."""
        now = self._clock()
        last = reading.samples == reading.samples_total
        if now < self._next and not (last and self._terminal):
            return
        self._next = now + self._every
        if self._terminal:
            self._stream.write(f"\r\x1b[K{line(reading)}" + ("\n" if last else ""))
        else:
            self._stream.write(line(reading) + "\n")
        self._stream.flush()


def line(reading: Reading) -> str:
    """Where the reading stands, in one line."""
    parts = [
        f"shards {reading.samples}/{reading.samples_total}",
        f"{in_words(reading.nbytes)} of {in_words(reading.nbytes_total)}",
        f"{in_words(round(reading.bytes_per_second))}/s",
    ]
    if reading.damaged:
        parts.append(f"damages {reading.damaged}")
    if reading.eta_s is not None:
        parts.append(f"left {duration(reading.eta_s)}")
    return ", ".join(parts)
