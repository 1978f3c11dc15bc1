"""What all row formats share: the id, token checks, cutting what is too long, and duplicate detection."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

import numpy as np

from hsx.datasets.fields import Bad, Columns, Fields, brief, excerpt
from hsx.records import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

LONGEST_ID: Final = 1024  # bytes of UTF-8
SEEN_CACHE_KIB: Final = 32 << 10
STANDARD: Final = Columns()


class Records(Protocol):
    """What rows are read from: one file, or all files of a dataset."""

    def records(self) -> Iterator[tuple[int, Fields | Bad]]:
        """Each row with its number, in order."""
        ...

    def sha256(self) -> str:
        """The hash of the content."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a usable row keeps to.

    Attributes:
        vocab_size: ids are valid in [0, vocab_size).
        max_tokens: longest sample, in tokens.
        too_long: what becomes of a longer one: `reject`; `left` or `right` cuts tokens off that end; `turns` keeps whole turns
            from the beginning: it cuts after the last token that counts for the loss and is followed by one that does not.
    """

    vocab_size: int
    max_tokens: int
    too_long: Literal["reject", "left", "right", "turns"] = "reject"

    def fingerprint(self) -> dict[str, str]:
        """The limits; the policy only where it is not the default, which older jobs had."""
        policy = {"dataset.too_long": self.too_long} if self.too_long != "reject" else {}
        return {"dataset.max_tokens": str(self.max_tokens), "dataset.vocab_size": str(self.vocab_size), **policy}


@dataclass(frozen=True, slots=True)
class Naming:
    """How fields are called.

    Attributes:
        columns: the fields' names.
        number_ids: the id is the row's place in the dataset, from 0, and no field.
    """

    columns: Columns = STANDARD
    number_ids: bool = False

    def fingerprint(self) -> dict[str, str]:
        """What differs from the defaults, so that a job that was begun before there were other names goes on."""
        names = {
            f"dataset.columns.{name}": getattr(self.columns, name)
            for name in Columns.__slots__
            if getattr(self.columns, name) != getattr(STANDARD, name)
        }
        return names | ({"dataset.ids": "number"} if self.number_ids else {})


def id_of(fields: Fields, name: str) -> str:
    """The row's id as text: a non-empty string, or an integer in decimal. Raises Bad `missing_field` or `bad_type`."""
    value = fields.value(name)
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Bad("bad_type", f"field {name!r} is {brief(value)}; expected a string or an integer")
    text = str(value)
    if not text:
        raise Bad("missing_field", f"field {name!r} is an empty string")
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise Bad("bad_type", f"field {name!r} is not valid text: {error}") from error
    if nbytes > LONGEST_ID:
        raise Bad("bad_type", f"field {name!r} has {nbytes} bytes; expected at most {LONGEST_ID}")
    return text


def checked_ids(ids: list[int] | NDArray[np.int64], limits: Limits) -> NDArray[np.int32]:
    """int32 [tokens] of ids that the server survives. Raises Bad `empty`, `too_long` or `out_of_vocabulary`.

    An id outside the vocabulary is not refused by the server but kills it, so this check is what keeps a job alive.
    """
    if not len(ids):
        raise Bad("empty", "the row has no tokens; expected at least one")
    if limits.too_long == "reject" and len(ids) > limits.max_tokens:
        raise Bad("too_long", f"the row has {len(ids)} tokens; expected at most {limits.max_tokens}")
    try:
        wide = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        wide = None
    # As unsigned numbers negative ids are huge, so one pass finds both kinds.
    if wide is None or int(wide.view(np.uint64).max()) >= limits.vocab_size:
        at = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        raise Bad("out_of_vocabulary", f"input_ids[{at}] is {ids[at]}; expected 0 to {limits.vocab_size - 1}")
    return wide.astype(np.int32)


def fitted(sample_id: str, ids: NDArray[np.int32], mask: NDArray[np.uint8], limits: Limits, line: int) -> Row:
    """The row, cut to the longest sample allowed, ids and mask together.

    Raises Bad `too_long` where it cannot be cut: no turn ends in time, or nothing is left that counts for the loss.
    """
    tokens, most = len(ids), limits.max_tokens
    if tokens <= most:
        return Row(sample_id, ids, mask, line)
    start, stop = 0, most
    if limits.too_long == "left":
        start, stop = tokens - most, tokens
    elif limits.too_long == "turns":
        ends = np.flatnonzero((mask[:most] == 1) & (mask[1 : most + 1] == 0))
        if not len(ends):
            raise Bad("too_long", f"the row has {tokens} tokens, and no turn of the assistant ends within {most}")
        stop = int(ends[-1]) + 1
    kept = mask[start:stop]
    if mask.any() and not kept.any():
        raise Bad("too_long", f"the row has {tokens} tokens; cut to {stop - start}, none is left that counts for the loss")
    # Copies: the slices would keep the whole row in memory, which may be megabytes, for as long as the few tokens left of it.
    return Row(sample_id, ids[start:stop].copy(), kept.copy(), line, tokens - (stop - start))


class SeenIds:
    """Which ids came already, and in which line, in bounded memory: a private SQLite file that is deleted on close."""

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=OFF")
        self._db.execute(f"PRAGMA cache_size=-{SEEN_CACHE_KIB}")
        self._db.execute("CREATE TABLE seen (id TEXT PRIMARY KEY, line INTEGER NOT NULL) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def add(self, sample_id: str, line: int) -> int | None:
        """Remembers the id; returns the line of its first use when there was one."""
        if self._db.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (sample_id, line)).rowcount:
            return None
        (first,) = self._db.execute("SELECT line FROM seen WHERE id = ?", (sample_id,)).fetchone()
        return int(first)

    def close(self) -> None:
        """Deletes the file."""
        self._db.close()


def rows_of(source: Records, parse: Callable[[str, Fields, int], Row], naming: Naming) -> Iterator[Row | BadRow]:
    """All rows of a dataset, in its order.

    Args:
        source: the dataset's files.
        parse: makes a row of its id, its fields and its line's number, or raises Bad.
        naming: where the id is.
    """
    unit = getattr(source, "unit", "line")
    where = getattr(source, "where", f"{unit} {{}}".format) if getattr(source, "several", False) else None
    with closing(SeenIds()) as seen:
        for place, (line, fields) in enumerate(source.records()):
            sample_id = ""
            row: Row | Bad
            try:
                if isinstance(fields, Bad):
                    raise fields
                sample_id = str(place) if naming.number_ids else id_of(fields, naming.columns.id)
                row = parse(sample_id, fields, line)
            except Bad as bad:
                row = bad
            yield judged(line, sample_id, seen, row, where, unit)


def judged(
    line: int, sample_id: str, seen: SeenIds, row: Row | Bad, where: Callable[[int], str] | None = None, unit: str = "line"
) -> Row | BadRow:
    """The final verdict on a row: what its format said, and whether its id came before. `unit` is what `line` counts.

    Ids of bad rows count as seen, too: a later row of the same id is then reported, not quietly taken in its place.
    """
    first = seen.add(sample_id, line) if sample_id else None
    if first is None and not isinstance(row, Bad):
        return row
    place = f" ({where(line)})" if where else ""
    if isinstance(row, Bad):
        return BadRow(line, sample_id, row.reason, row.message + place, unit)
    earlier = where(first) if where and first is not None else f"{unit} {first}"
    message = f"id {excerpt(sample_id.encode())} was used in {earlier} already"
    return BadRow(line, sample_id, "duplicate_id", message + place, unit)
