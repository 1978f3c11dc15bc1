"""What lies beside an export: `hsx-export.json`, which says what it is, and `hsx-rows*.jsonl`, which lists what was written.

The list is also how an export is continued: a row counts as written where its line and its file, of that size, are there.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hsx.errors import RunError
from hsx.export.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

MANIFEST: Final = "hsx-export.json"
INDEX: Final = "hsx-index.npy"
"""Index in the store of each row, int64 [rows]."""
FORMAT: Final = "hsx-export-1"


@dataclass(frozen=True, slots=True)
class WrittenRow:
    """One file of an export.

    Attributes:
        row: its number in the export.
        id: the sample's id.
        index: its index in the store.
        tokens: S.
        file: its path below the export's folder.
        bytes: the file's size.
        crc32c: of the whole file.
        shard: crc32c of the states in the store that it was made of; None where the store's shards have no records.
    """

    row: int
    id: str
    index: int
    tokens: int
    file: str
    bytes: int
    crc32c: int
    shard: int | None = None


_FIELDS: Final = ("row", "id", "index", "tokens", "file", "bytes", "crc32c")
"""What each line has; `shard` may be missing."""


def rows_name(part: int, parts: int) -> str:
    """Name of the list of one part."""
    return "hsx-rows.jsonl" if parts == 1 else f"hsx-rows-{part}-of-{parts}.jsonl"


def read_rows(path: Path, kind: str = "export_refused") -> Iterator[WrittenRow]:
    """The lines of one list; a last one that a kill has torn is passed over, a missing list is empty.

    Args:
        path: the list.
        kind: of the error; `import_refused` for one who imports.

    Raises:
        RunError: of that kind, for what is no such list.
        OSError: it cannot be read.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = WrittenRow(**json.loads(line))
                if not (type(row.id) is type(row.file) is str and type(row.row) is type(row.bytes) is int):
                    raise ValueError("id and file are to be text, row and bytes whole numbers")
                row.id.encode()  # JSON may hold half a character, which no other text can
            except (ValueError, TypeError, RecursionError) as error:
                # What Python says of a call that does not fit is no word on the file.
                what = f"expected an object with {', '.join(_FIELDS)}" if isinstance(error, TypeError) else str(error)
                raise RunError(kind, f"{path}: line {number} is no row of an export: {what}") from error
            yield row


class RowList:
    """Appends to the list of one part, after taking off a last line that a kill has torn. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab")
        self._file.truncate(path.read_bytes().rfind(b"\n") + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, row: WrittenRow) -> None:
        """Appends a line. Raises OSError."""
        self._file.write(json.dumps(asdict(row)).encode() + b"\n")
        self._file.flush()


def claim(folder: Path, document: dict[str, Any], identity: dict[str, Any]) -> None:
    """Writes the manifest of a new export, or proves that the one that is there is of this very export.

    Args:
        folder: the export.
        document: the manifest.
        identity: what decides which files there are and what is in them.

    Raises:
        RunError: `export_refused` where the folder holds something else.
        OSError: it cannot be written.
    """
    path = folder / MANIFEST
    if not path.exists():
        strangers = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
        if strangers and not path.exists():  # else another part has just begun
            raise RunError(
                "export_refused", f"{folder} has {strangers[0]} and no {MANIFEST}; expected a new folder, or one of this export"
            )
        if not strangers:
            with whole_file(path, shared=True) as file:
                file.write(json.dumps({**document, "identity": identity}, indent=2).encode() + b"\n")
            return
    found = read_manifest(folder).get("identity")
    differing = [key for key in identity if not isinstance(found, dict) or found.get(key) != identity[key]]
    if differing:
        key = differing[0]
        was = found.get(key) if isinstance(found, dict) else None
        raise RunError(
            "export_refused",
            f"{folder} holds another export: {key} is {was!r} there; expected {identity[key]!r}; give another folder",
        )


def read_manifest(folder: Path, kind: str = "export_refused") -> dict[str, Any]:
    """The manifest of an export.

    Args:
        folder: the export.
        kind: of the error; `import_refused` for one who imports.

    Raises RunError of that kind where there is none that can be read.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(kind, f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise RunError(kind, f"{path} is no manifest; expected format {FORMAT!r}")
    return document
