"""What both row formats share: fields of a JSON line, the id, token checks, and duplicate detection."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from hsx.ports import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from hsx.datasets.jsonl import JsonlFile

LONGEST_ID: Final = 1024  # bytes of UTF-8
SEEN_CACHE_KIB: Final = 32 << 10
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Bad(Exception):  # noqa: N818 - a row's verdict on its way to becoming a BadRow, not an error of the program
    """This row cannot be used.

    Args:
        reason: one of the reasons of `hsx.ports.BadRow`.
        message: expected and found.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Limits:
    """What a usable row keeps to.

    Attributes:
        vocab_size: ids are valid in [0, vocab_size).
        max_tokens: longest sample, in tokens.
    """

    vocab_size: int
    max_tokens: int


def fields_of(line: bytes) -> dict[str, msgspec.Raw]:
    """The undecoded fields of a JSON object; of duplicate keys the last one. Raises Bad `not_json` or `bad_type`."""
    try:
        return _FIELDS.decode(line)
    except msgspec.ValidationError as error:
        raise Bad("bad_type", f"the line is not a JSON object: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        # Decoders call the missing half of a surrogate pair anything from truncated to malformed.
        hint = " (a lone surrogate?)" if b"\\ud" in line.lower() else ""
        raise Bad("not_json", f"{error}{hint}; the line begins with {_excerpt(line)}") from error


def value_of(fields: dict[str, msgspec.Raw], name: str) -> Any:  # noqa: ANN401 - JSON is any of several types
    """The decoded value of a field. Raises Bad `missing_field` (also for null), `not_json` (such as a lone surrogate)."""
    raw = fields.get(name)
    if raw is None or bytes(raw) == b"null":
        raise Bad("missing_field", f"field {name!r} is {'missing' if raw is None else 'null'}")
    try:
        return msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        found = _excerpt(bytes(raw))
        raise Bad(
            "not_json", f"field {name!r} cannot be decoded (a lone surrogate or a huge number): {error}; {found}"
        ) from error


def id_of(fields: dict[str, msgspec.Raw]) -> str:
    """The row's id as text: a non-empty string, or an integer in decimal. Raises Bad `missing_field` or `bad_type`."""
    value = value_of(fields, "id")
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Bad("bad_type", f"field 'id' is {_shown(value)}; expected a string or an integer")
    text = str(value)
    if not text:
        raise Bad("missing_field", "field 'id' is an empty string")
    if len(text.encode()) > LONGEST_ID:
        raise Bad("bad_type", f"field 'id' has {len(text.encode())} bytes; expected at most {LONGEST_ID}")
    return text


def checked_ids(ids: list[int], limits: Limits) -> NDArray[np.int32]:
    """int32 [tokens] of ids that the server survives. Raises Bad `empty`, `too_long` or `out_of_vocabulary`.

    An id outside the vocabulary is not refused by the server but kills it, so this check is what keeps a job alive.
    """
    if not ids:
        raise Bad("empty", "the row has no tokens; expected at least one")
    if len(ids) > limits.max_tokens:
        raise Bad("too_long", f"the row has {len(ids)} tokens; expected at most {limits.max_tokens}")
    try:
        wide = np.array(ids, dtype=np.int64)
    except OverflowError:
        wide = None
    # As unsigned numbers negative ids are huge, so one pass finds both kinds.
    if wide is None or int(wide.view(np.uint64).max()) >= limits.vocab_size:
        at = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        raise Bad("out_of_vocabulary", f"input_ids[{at}] is {ids[at]}; expected 0 to {limits.vocab_size - 1}")
    return wide.astype(np.int32)


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


def rows_of(file: JsonlFile, parse: Callable[[str, dict[str, msgspec.Raw], int], Row]) -> Iterator[Row | BadRow]:
    """All rows of a file, in its order.

    Args:
        file: the dataset.
        parse: makes a row of its id, its fields and its line's number, or raises Bad.
    """
    with closing(SeenIds()) as seen:
        for line, text in file.lines():
            sample_id = ""
            row: Row | Bad
            try:
                fields = fields_of(text)
                sample_id = id_of(fields)
                row = parse(sample_id, fields, line)
            except Bad as bad:
                row = bad
            yield judged(line, sample_id, seen, row)


def judged(line: int, sample_id: str, seen: SeenIds, row: Row | Bad) -> Row | BadRow:
    """The final verdict on a row: what its format said, and whether its id came before.

    Ids of bad rows count as seen, too: a later row of the same id is then reported, not quietly taken in its place.
    """
    first = seen.add(sample_id, line) if sample_id else None
    if isinstance(row, Bad):
        return BadRow(line, sample_id, row.reason, row.message)
    if first is not None:
        return BadRow(line, sample_id, "duplicate_id", f"id {_excerpt(sample_id.encode())} was used in line {first} already")
    return row


def _excerpt(text: bytes, longest: int = 60) -> str:
    shown = text[:longest].decode("utf-8", "replace")
    return repr(shown) + ("..." if len(text) > longest else "")


def _shown(value: object) -> str:
    return f"{_excerpt(repr(value).encode())} ({type(value).__name__})"
