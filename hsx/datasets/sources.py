"""Which files a dataset is: one file, a folder or pattern of them, or a folder that `datasets` saved; read one after the other.

The kind of a file is told by its first bytes, not by its name. The order of the rows is that of the files' names, or for a
saved dataset the one that it says itself, so it is the same at every run.
"""

from __future__ import annotations

import hashlib
import json
import stat
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.table import ARROW_FILE_MAGIC, PARQUET_MAGIC, TableFile
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.datasets.fields import Bad, Fields

SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst", ".ndjson", ".parquet", ".arrow")
TABLES: Final = (".parquet", ".arrow")
STATE_FILE: Final = "state.json"
SPLITS_FILE: Final = "dataset_dict.json"
_WILD: Final = "*?["
_ARROW_STREAM: Final = b"\xff\xff\xff\xff"
_LFS_POINTER: Final = b"version https://git-lfs"
LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files of a dataset.

    Attributes:
        paths: in the order in which they are read.
        names: of each, below the folder that was named.
        ignored: files of the folder that are no data, by their names.
    """

    paths: tuple[Path, ...]
    names: tuple[str, ...]
    ignored: tuple[str, ...] = ()


class Source:
    """All rows of a dataset's files.

    Args:
        found: the files.

    Raises:
        RunError: `dataset_unreadable` where a file cannot be opened, or some are JSONL and others are not.
    """

    def __init__(self, found: FoundFiles) -> None:
        self.found = found
        self._files = [_reader(path) for path in found.paths]
        self._rows = [0] * len(self._files)
        kinds = {file.kind for file in self._files}
        if len(kinds) > 1:
            raise RunError(
                "dataset_unreadable",
                f"{found.paths[0].parent} has files of several kinds ({', '.join(sorted(kinds))}), which may be the same rows "
                "twice; expected one kind: name it with a pattern, such as '*.parquet'",
            )
        self.kind = kinds.pop()
        self.unit = self._files[0].unit

    @property
    def path(self) -> Path:
        """The first file."""
        return self.found.paths[0]

    def records(self) -> Iterator[tuple[int, Fields | Bad]]:
        """Each row, with its number: its line in a single file; in several files they are counted through.

        Raises RunError `dataset_unreadable`, `dependency_missing`.
        """
        before = 0
        for number, file in enumerate(self._files):
            last = 0
            for last, fields in file.records():
                self._rows[number] = last
                yield before + last, fields
            self._rows[number] = last
            before += last

    def where(self, line: int) -> str:
        """Where a row that was read stands, in words."""
        before = 0
        for name, rows in zip(self.found.names, self._rows, strict=True):
            if line <= before + rows and len(self._files) > 1:
                return f"{self.unit} {line - before} of {name}"
            before += rows
        return f"{self.unit} {line}"

    @property
    def several(self) -> bool:
        """Whether there are several files, so that a line's number alone does not say where it is."""
        return len(self._files) > 1

    def sha256(self) -> str:
        """SHA-256 of the file; of several, of their hashes in order. Names do not count: they may change, the rows not."""
        hashes = [file.sha256() for file in self._files]
        return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()

    def manifest(self) -> dict[str, Any]:
        """What was read: kind, and name, bytes, SHA-256, last row and first number of each file. Reads files that were not."""
        begins = [1, *(1 + total for total in accumulate(self._rows))]
        return {
            "sha256": self.sha256(),
            "kind": self.kind,
            "files": [
                {"name": name, "bytes": file.path.stat().st_size, "sha256": file.sha256(), "lines": rows, "first": first}
                for name, file, rows, first in zip(self.found.names, self._files, self._rows, begins, strict=False)
            ],
        }


def find_files(path: Path) -> FoundFiles:
    """The files that a dataset's path means.

    Args:
        path: a file; a folder that `datasets` saved; any other folder, whose data files are taken from all levels, in the
            order of their names; or a pattern with `*`, `?`, `[...]` or `**`.

    Raises:
        RunError: `dataset_unreadable` where nothing is there, a link leads nowhere, or a saved dataset has several splits or an
            index of rows.
    """
    try:
        if path.is_dir():
            return _saved(path) or _folder(path)
        if not path.exists() and any(letter in str(path) for letter in _WILD):
            return _pattern(path)
    except OSError as error:
        raise RunError("dataset_unreadable", f"{path}: {error.strerror or error}") from error
    return FoundFiles((path,), (_named(path, path.parent),))


def _saved(folder: Path) -> FoundFiles | None:
    if (folder / SPLITS_FILE).is_file():
        splits = _json(folder / SPLITS_FILE).get("splits")
        names = [name for name in splits if isinstance(name, str)] if isinstance(splits, list) else []
        if len(names) != 1:
            raise RunError(
                "dataset_unreadable",
                f"{folder} is a saved dataset of {len(names)} splits ({', '.join(names)}); expected one: name its folder, "
                f"such as {folder / (names[0] if names else 'train')}",
            )
        folder = folder / names[0]
    if not (folder / STATE_FILE).is_file():
        return None
    state = _json(folder / STATE_FILE)
    entries = state.get("_data_files")
    if not isinstance(entries, list):
        return None
    if state.get("_indices_data_files"):
        raise RunError(
            "dataset_unreadable",
            f"{folder} is a saved dataset whose rows are picked by an index; expected one that was flattened: "
            "dataset.flatten_indices().save_to_disk(...)",
        )
    names = [str(entry.get("filename")) for entry in entries if isinstance(entry, dict)]
    if not names or any("/" in name for name in names):
        raise RunError(
            "dataset_unreadable", f"{folder / STATE_FILE} names {names} as data files; expected names of files beside it"
        )
    return FoundFiles(tuple(folder / name for name in names), tuple(names))


def _folder(folder: Path) -> FoundFiles:
    there: list[Path] = []
    left: list[Path] = []
    for file in _below(folder, folder, {folder.resolve()}):
        data = file.name.endswith(SUFFIXES)
        if data and not file.is_dir():
            _require_there(file)
        (there if data and file.is_file() else left).append(file)
    names = [_named(file, folder) for file in left]
    if not there:
        raise RunError(
            "dataset_unreadable",
            f"{folder} is a folder without a data file; expected files ending in {', '.join(SUFFIXES)}"
            + (f"; it has {', '.join(names[:LISTED])}" if names else ""),
        )
    there.sort(key=lambda file: file.relative_to(folder).parts)
    return FoundFiles(tuple(there), tuple(_named(file, folder) for file in there), tuple(sorted(names)))


def _below(folder: Path, top: Path, seen: set[Path]) -> Iterator[Path]:
    """What a folder has, at all levels, and is not hidden; links to folders are followed, each folder is read once.

    A folder that was read already, such as one that a link leads back to, comes as itself. Raises OSError, as `rglob` does not.
    """
    for entry in sorted(folder.iterdir()):
        if _hidden(entry.relative_to(top)):
            continue
        real = entry.resolve() if entry.is_dir() else None
        if real is None or real in seen:
            yield entry
            continue
        seen.add(real)
        yield from _below(entry, top, seen)


def _pattern(path: Path) -> FoundFiles:
    fixed = next(number for number, part in enumerate(path.parts) if any(letter in part for letter in _WILD))
    base, wild = Path(*path.parts[:fixed]), Path(*path.parts[fixed:])
    hidden = _hidden(wild)  # a pattern that names them means them
    found = sorted(base.glob(str(wild)), key=lambda file: file.relative_to(base).parts)
    meant = [file for file in found if hidden or not _hidden(file.relative_to(base))]
    for file in meant:
        _require_there(file)
    taken = [file for file in meant if file.is_file()]
    if not taken:
        raise RunError("dataset_unreadable", f"{path}: no file is called so; expected at least one")
    names = [_named(file, base) for file in taken]
    chosen = set(taken)
    left = [_named(file, base) for file in found if file not in chosen]
    return FoundFiles(tuple(taken), tuple(names), tuple(left))


def _require_there(file: Path) -> None:
    """Raises RunError `dataset_unreadable` for a link that leads nowhere, which would be passed over like what is not there."""
    if file.is_symlink() and not file.exists():
        raise RunError("dataset_unreadable", f"{file} is a link that leads nowhere; expected a link to a file, or none")


def _named(file: Path, folder: Path) -> str:
    """The file's name below the folder, as text: bytes that are not UTF-8 are escaped."""
    return str(file.relative_to(folder)).encode(errors="backslashreplace").decode()


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError("dataset_unreadable", f"{file} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _reader(path: Path) -> JsonlFile | TableFile:
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise RunError("dataset_unreadable", f"{path} is a pipe or a device; expected a file, which can be read twice")
        with path.open("rb") as file:
            first = file.read(len(_LFS_POINTER))
    except IsADirectoryError:
        first = b""  # JsonlFile says so
    except OSError as error:
        raise RunError("dataset_unreadable", f"{path}: {error.strerror or error}") from error
    if first == _LFS_POINTER:
        raise RunError("dataset_unreadable", f"{path} is a pointer of Git LFS; expected the data itself: git lfs pull")
    if first.startswith(PARQUET_MAGIC):
        return TableFile(path, "parquet")
    if first.startswith((ARROW_FILE_MAGIC, _ARROW_STREAM)):
        return TableFile(path, "arrow")
    if not first and path.name.endswith(TABLES):
        raise RunError("dataset_unreadable", f"{path} is empty; expected a Parquet or Arrow file: it may have been cut short")
    return JsonlFile(path)
