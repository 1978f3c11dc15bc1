"""One call of `hsx export`: writes what is not there yet of an export that `hsx.exporting` has planned.

Samples are read, converted and written by a few threads, one file after the other; each file appears whole. What is written is
listed, and an export that was cut short is continued by the same call.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.amounts import in_words
from hsx.errors import RunError
from hsx.export.files import whole_file
from hsx.export.manifest import INDEX, RowList, WrittenRow, claim, read_rows, rows_name
from hsx.export.norm import apply_final_norm
from hsx.export.protocol import Exported, Surroundings
from hsx.locks import locked
from hsx.stores.durable import FULL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.exporting import ExportPlan

_SPARE: Final = 64 << 20


@dataclass(slots=True)
class Progress:
    """How far an export is: rows of this part.

    Attributes:
        rows: rows of this part.
        nbytes_total: bytes of states that they have.
        done: rows that are there.
        kept: of them, those that an earlier call had written.
        linked: of them, those that are links.
        nbytes: bytes written by this call.
        seconds: since it began.
    """

    rows: int
    nbytes_total: int
    done: int = 0
    kept: int = 0
    linked: int = 0
    nbytes: int = 0
    seconds: float = 0.0


def export(planned: ExportPlan, watch: Callable[[Progress], None] = lambda _: None) -> Progress:
    """Writes what is not there yet.

    Raises RunError: `export_refused` where the folder holds something else; `export_unwritable`; `job_locked` where another
    process writes the same part; `store_invalid`, `root_unusable` where the store cannot be read: what was written stays, and
    the same call goes on.
    """
    folder, request = planned.folder, planned.request
    with _translated(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder, planned.document(), planned.identity())
        buffer = io.BytesIO()
        np.save(buffer, planned.selection.indices)
        with whole_file(folder / INDEX, shared=True) as file:
            file.write(buffer.getvalue())
        name = rows_name(request.part, request.parts)
        with locked(folder / f".{name}.lock", f"export {folder} part {request.part}/{request.parts}", "export_unwritable"):
            return _Run(planned, folder / name, watch).run()


@dataclass(slots=True)
class _Run:
    planned: ExportPlan
    list_path: Path
    watch: Callable[[Progress], None]
    progress: Progress = field(init=False)
    folders: set[str] = field(default_factory=set)
    norm: tuple[NDArray[np.float32], float] | None = None

    def run(self) -> Progress:
        planned = self.planned
        begun = time.monotonic()
        written = {row.row: row for row in read_rows(self.list_path) if self._is_there(row)}
        token_bytes = len(planned.mapping.names) * planned.store.hidden_size * 2
        lengths = planned.store.lengths[planned.selection.indices[list(planned.rows)]]
        self.progress = progress = Progress(len(planned.rows), int(lengths.sum()) * token_bytes)
        progress.done = progress.kept = sum(row in written for row in planned.rows)
        todo = [row for row in planned.rows if row not in written]
        self._require_room(todo, token_bytes)
        self.norm = planned.store.final_norm if planned.mapping.computed else None
        groups = self._groups(todo, written)
        with RowList(self.list_path) as rows, ThreadPoolExecutor(planned.request.threads, "hsx-export") as pool:
            pending: deque[Any] = deque()
            try:
                for group in groups:
                    pending.append(pool.submit(self._write_group, group, written))
                    if len(pending) > planned.request.threads:
                        self._account(pending.popleft().result(), rows, begun)
                while pending:
                    self._account(pending.popleft().result(), rows, begun)
            finally:
                pool.shutdown(cancel_futures=True)
        around = Surroundings(planned.folder, planned.all_rows, planned.vocabulary)
        planned.form.finish(around)
        progress.seconds = time.monotonic() - begun
        self.watch(progress)
        return progress

    def _account(self, rows: Sequence[tuple[WrittenRow, bool]], listed: RowList, begun: float) -> None:
        for row, linked in rows:
            listed.add(row)
            self.progress.done += 1
            self.progress.linked += linked
            self.progress.nbytes += 0 if linked else row.bytes
        self.progress.seconds = time.monotonic() - begun
        self.watch(self.progress)

    def _groups(self, todo: Sequence[int], written: dict[int, WrittenRow]) -> Iterator[list[int]]:
        """Rows that are to be one file: single ones, but with `link` those of one shard, a written one in front."""
        planned = self.planned
        if not planned.request.link:
            yield from ([row] for row in todo)
            return
        groups: dict[tuple[Any, ...], list[int]] = {}
        for row in [*written, *todo]:
            index = int(planned.selection.indices[row])
            mask = b"" if planned.form.depends_on == "prompt" else planned.store.loss_mask_numpy(index).tobytes()
            key = planned.store.captured_as(index), hashlib.sha256(mask).digest()
            groups.setdefault(key, []).append(row)
        for group in groups.values():
            if any(row not in written for row in group):
                yield group

    def _write_group(self, group: Sequence[int], written: dict[int, WrittenRow]) -> list[tuple[WrittenRow, bool]]:
        first = written.get(group[0])
        made: list[tuple[WrittenRow, bool]] = []
        if first is None:
            first = self._write(group[0])
            made.append((first, False))
        for row in group[1:]:
            if row not in written:
                linked = self._link(first, row)
                made.append((self._write(row), False) if linked is None else (linked, True))
        return made

    def _write(self, row: int) -> WrittenRow:
        planned = self.planned
        path = self._path(row)
        index = int(planned.selection.indices[row])
        try:
            shard = planned.store.shard_crc32c(index)  # before the states: what changes in between is written again next time
            sample = planned.store.sample(index, states=planned.mapping.stored)
        except RunError as error:
            name = planned.store.sample_id(index)
            raise RunError(error.kind, f"row {row}, sample {name!r}: {error.message}; what is written stays") from error
        states = sample.hidden_states
        if self.norm is not None:
            states[:, -1] = apply_final_norm(states[:, -1], *self.norm)  # this memory is the sample's alone
        given = Exported(row, sample.id, sample.input_ids, sample.loss_mask, states, planned.mapping.names)
        with whole_file(path) as file:
            planned.form.write(file, given)
        return self._row(row, file.nbytes, file.crc32c, shard)

    def _link(self, first: WrittenRow, row: int) -> WrittenRow | None:
        path = self._path(row)
        path.unlink(missing_ok=True)
        try:
            os.link(self.planned.folder / first.file, path)
        except OSError as error:
            if error.errno in FULL:
                raise
            return None  # no more links, or a file system without them: a copy will do
        return self._row(row, first.bytes, first.crc32c, first.shard)

    def _row(self, row: int, nbytes: int, crc32c: int, shard: int | None) -> WrittenRow:
        planned = self.planned
        index = int(planned.selection.indices[row])
        name = planned.form.path(row, planned.request.part)
        return WrittenRow(row, planned.store.sample_id(index), index, planned.store.tokens(index), name, nbytes, crc32c, shard)

    def _is_there(self, row: WrittenRow) -> bool:
        """The listed file is there, and made of what the store has today: a commit may have been revoked since."""
        planned = self.planned
        try:
            if (planned.folder / row.file).stat().st_size != row.bytes:
                return False
            return row.shard is None or row.shard == planned.store.shard_crc32c(int(planned.selection.indices[row.row]))
        except (OSError, RunError, IndexError):  # writing it will say why
            return False

    def _path(self, row: int) -> Path:
        path = self.planned.folder / self.planned.form.path(row, self.planned.request.part)
        if path.parent.name not in self.folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.folders.add(path.parent.name)
        return path

    def _require_room(self, todo: Sequence[int], token_bytes: int) -> None:
        """Refuses what cannot fit before the first byte. With `link` it may need less, and is let through."""
        planned = self.planned
        lengths = planned.store.lengths[planned.selection.indices[list(todo)]]
        needed = int(lengths.sum()) * (token_bytes + 16) + _SPARE * bool(todo)
        free = shutil.disk_usage(planned.folder).free
        if needed > free and not planned.request.link:
            raise RunError(
                "export_unwritable",
                f"{planned.folder} has {in_words(free)} free; expected {in_words(needed)} for this part",
            )


@contextmanager
def _translated(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        named = error.filename or folder
        raise RunError("export_unwritable", f"{named} cannot be written: {error.strerror or error}") from error
