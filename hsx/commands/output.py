"""How commands print: JSON for programs, aligned text for people."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import msgspec

from hsx.printable import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


def emit(text: str) -> None:
    """Writes lines to standard output; what is not printable in them is escaped."""
    write(printable(text) + "\n")


def write(text: str) -> None:
    """Writes to standard output; what its encoding does not have (latin-1 has no Japanese) becomes a backslash escape."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))


def emit_json(document: object) -> None:
    """Writes `document` (plain data, dataclasses, structs, paths) as one JSON object."""
    text = msgspec.json.format(msgspec.json.encode(document, enc_hook=str), indent=2).decode()
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=2)  # in ASCII, with the escapes of JSON
    sys.stdout.write(text + "\n")


class Ticker:
    """A line of progress now and then, to standard error: every half second on a terminal, every half minute elsewhere.

    Args:
        every: seconds between two lines, instead.
    """

    def __init__(self, every: float | None = None) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = every if every is not None else 0.5 if self._terminal else 30.0
        self._next = time.monotonic() + self._every

    def say(self, line: Callable[[], str]) -> None:
        """Writes what `line` says, if it is time."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._every
        sys.stderr.write(line() + ("\r" if self._terminal else "\n"))
        sys.stderr.flush()


def plural(count: int, noun: str) -> str:
    """The count with its noun: `1 row`, `2 rows`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns padded to their widest cell; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(header), *cells]) for column in range(len(header))]
    numeric = [bool(cells) and all(line[column].isdecimal() for line in cells) for column in range(len(header))]

    def line(values: Sequence[str]) -> str:
        padded = (value.rjust(width) if right else value.ljust(width) for value, width, right in zip(values, widths, numeric))  # noqa: B905 - same length by construction
        return "  ".join(padded).rstrip()

    return "\n".join([line(list(header)), *(line(row) for row in cells)])
