"""One call of `hsx import`: lists the files, reads ids and masks, makes the store, and brings the states; each goes on where a
call before was cut short. `hsx.importing` says what is asked for.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.dump import DumpHeader
from hsx.core.invariants import Evidence, judge_dump
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.dumps.measure import measure
from hsx.errors import RunError
from hsx.export.manifest import read_rows
from hsx.ingest.journal import Known, Rejection
from hsx.ingest.protocol import Entry, RejectedSampleError
from hsx.records import Payload, Row
from hsx.stores.attach import attach_roots
from hsx.stores.durable import make_folder, store_error, sync_folder
from hsx.stores.group import StoreInfo, create_store, open_store, refuse_populated
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.view import UnionView, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hsx.core.spec import CaptureSpec
    from hsx.export.manifest import WrittenRow
    from hsx.ingest.journal import Journal, Listed
    from hsx.ingest.protocol import Head, Source
    from hsx.ingest.request import ImportReport, ImportRequest
    from hsx.stores.root import ShardRoot

_RUN: Final = "00000000"
_ENDINGS: Final = (".ckpt.gz", ".ckpt", ".safetensors")


@dataclass(slots=True)
class Import:
    """An import as far as its journal says.

    Attributes:
        request: what is asked for.
        source: the folder.
        spec: the states that its files have.
        report: filled in on the way.
        journal: of this import.
        watch: called with the report now and then.
        epoch: stands in the shards' records for that of a server.
    """

    request: ImportRequest
    source: Source
    spec: CaptureSpec
    report: ImportReport
    journal: Journal
    watch: Callable[[ImportReport], None]
    epoch: str = ""

    def run(self) -> None:
        """Imports. Raises RunError, as `hsx.importing.import_folder` says."""
        self.epoch = self.journal.fix("epoch", str(uuid.uuid4()))
        if self.journal.stage == "listing":
            self._list()
        self.report.found = self.journal.count_files()
        with ThreadPoolExecutor(self.request.threads, "hsx-import") as pool:
            if self.journal.stage == "heads":
                self._read_heads(pool)
            info = self._store()
            self._bring(info, attach_roots(info, self._roots(info)), pool)
        try:
            sync_folder(info.path / HIDDEN_STATES)
        except OSError as error:
            raise store_error(error, info.path) from error
        self._list_rejected()

    def _list(self) -> None:
        def found() -> Iterator[tuple[int, bytes]]:
            for entry in self.source.entries():
                yield entry.row, os.fsencode(entry.file.relative_to(self.request.folder))

        rows = _exported_rows(self.request.folder)
        self.journal.list_files(found(), ((os.fsencode(row.file), _text(row.id)) for row in rows))

    def _read_heads(self, pool: ThreadPoolExecutor) -> None:
        """Takes down ids and masks of what can be taken so far."""
        width = next((known.width for known in self.journal.samples()), 0)
        while batch := self.journal.unread():
            heads = list(pool.map(self._head, batch))
            width = width or _usual_width(heads)
            with self.journal.transaction():
                for item, found in zip(batch, heads, strict=True):
                    name = item.name or _name(item.path)
                    try:
                        if isinstance(found, RejectedSampleError):
                            raise found
                        stamp, head = found
                        if head.hidden_size != width:
                            raise RejectedSampleError(
                                "bad_shape", f"H is {head.hidden_size}; expected {width}, as most of the first samples have"
                            )
                        if self.journal.has_id(name):
                            raise RejectedSampleError("duplicate_id", f"id {name!r} is another sample's, too")
                    except RejectedSampleError as rejected:
                        self._reject(item, name, rejected)
                        continue
                    known = Known(item.at, item.row, item.path, name, stamp, width, head.input_ids, head.loss_mask)
                    self.journal.add(known)
            self.report.rejected = self.journal.reasons()
            self.watch(self.report)
        self.report.rejected = self.journal.reasons()
        if not len(self.journal.places()):
            why = ", ".join(f"{count} {reason}" for reason, count in self.report.rejected.items()) or "it has no samples"
            self._list_rejected()
            self.journal.remove()
            raise RunError("import_refused", f"{self.request.folder} has nothing to import: {why}; see {self.report.listing}")
        self.journal.reach("creating")

    def _head(self, item: Listed) -> tuple[tuple[int, int], Head] | RejectedSampleError:
        entry = self._entry(item)
        try:
            if not os.path.lexists(entry.file):
                raise RejectedSampleError("missing_file", f"the dataset has row {entry.row}; expected its file")
            return _stamp(entry), self.source.head(entry, self.spec.states)
        except RejectedSampleError as rejected:
            return rejected

    def _store(self) -> StoreInfo:
        """The store with its token arrays: made, or found as it was made."""
        model = {"imported": self.request.kind, "folder": str(self.request.folder)}
        store = self.request.store
        lengths = self.journal.lengths()
        if self.journal.stage == "states":
            info = open_store(store)
            if dict(info.model) != model or info.layout.samples != len(lengths):
                raise RunError("import_refused", f"{store} is not the store that the import of {self.journal.path} has made")
            return info
        refuse_populated(store)
        with TokenTableWriter(store) as table:
            for known in self.journal.samples():
                table.add(Row(known.id, known.input_ids, known.loss_mask, known.at))
            table.finish({key: str(value) for key, value in model.items()}, {})
        width = next(known.width for known in self.journal.samples())
        layout = StoreLayout(len(lengths), int(lengths.max()), self.spec.states, width)
        info = create_store(store, layout, self.spec, model)
        self.journal.reach("states")
        return info

    def _roots(self, info: StoreInfo) -> Mapping[str, Path]:
        """The roots that take shards: those of the first call, and more if they are given. Makes their folders."""
        lacking = [name for name in info.roots if name not in self.request.roots]
        if lacking:
            raise RunError(
                "import_refused",
                f"the import was begun with root {lacking[0]} ({info.roots[lacking[0]]}); expected --root with it again",
            )
        for path in self.request.roots.values():
            try:
                make_folder(path)
            except OSError as error:
                raise RunError("root_unusable", f"root {path} cannot be made: {error.strerror}") from error
        return self.request.roots

    def _bring(self, info: StoreInfo, attached: tuple[StoreInfo, list[ShardRoot]], pool: ThreadPoolExecutor) -> None:
        info, roots = attached
        view = UnionView(info)
        done = np.zeros(info.layout.samples, np.bool_)
        done[view.indices()] = True
        for root in roots:
            root.sweep()
            here = visible(root.folder)
            for index in here[here < done.size].tolist():
                if not done[index]:  # written before the kill, and not committed
                    root.discard(index)
        places, lengths = self.journal.places(), self.journal.lengths()
        report = self.report
        report.rejected = self.journal.reasons()
        report.committed = report.kept = int(done.sum())
        report.tokens = int(lengths[done].sum())
        todo = np.flatnonzero(~done & ~np.isin(places, self.journal.rejected_places()))
        homes = {root.name: root for root in roots}
        size = 4 * self.request.threads
        for start in range(0, len(todo), size):
            batch = [(index, self.journal.sample(int(places[index]))) for index in todo[start : start + size].tolist()]
            futures = [pool.submit(self._take, roots, index, known) for index, known in batch]
            failed = next((error for future in futures if (error := future.exception()) is not None), None)
            outcomes = [None if future.exception() else future.result() for future in futures]
            taken = {index: home for (index, _), home in zip(batch, outcomes, strict=True) if isinstance(home, str)}
            for name in sorted(set(taken.values())):
                homes[name].sync()
            for index, name in taken.items():
                view.link(index, name)
            with self.journal.transaction():
                for (_, known), rejected in zip(batch, outcomes, strict=True):
                    if isinstance(rejected, RejectedSampleError):
                        self._reject(known, known.id, rejected)
            report.rejected = self.journal.reasons()
            report.committed += len(taken)
            report.tokens += int(lengths[list(taken)].sum())
            if failed is not None:
                raise failed
            self.watch(report)

    def _take(self, roots: list[ShardRoot], index: int, known: Known) -> str | RejectedSampleError:
        """Reads, judges and writes one sample; returns the root that has it."""
        entry = self._entry(known)
        root = roots[index % len(roots)]
        try:
            _require_unchanged(entry, known)
            head, states = self.source.sample(entry, self.spec.states)
            same = np.array_equal(head.input_ids, known.input_ids) and np.array_equal(head.loss_mask, known.loss_mask)
            if not same or states.shape != (len(known.input_ids), self.spec.states, known.width):
                raise RejectedSampleError("changed", "its ids, mask or shape are not what they were when it was first read")
            marker = Marker(_RUN, index, 1, len(known.input_ids))
            content = measure(states, head.input_ids, head.input_ids)
            header = DumpHeader(marker, self.epoch, index + 1, self.spec, known.width, "", "")
            violation = judge_dump(Evidence(marker, self.epoch, self.spec, known.width, header, content))
            if violation is not None:
                raise RejectedSampleError(violation.invariant, violation.evidence)
            root.write(Payload(marker, self.epoch, index + 1, head.input_ids, np.ascontiguousarray(states), content.crcs))
            try:
                _require_unchanged(entry, known)
            except RejectedSampleError:
                root.discard(index)
                raise
        except RejectedSampleError as rejected:
            return rejected
        return root.name

    def _entry(self, item: Listed | Known | Rejection) -> Entry:
        return Entry(item.row, self.request.folder / os.fsdecode(item.path))

    def _reject(self, item: Listed | Known, name: str, rejected: RejectedSampleError) -> None:
        self.journal.reject(Rejection(item.at, item.row, item.path, name, rejected.reason, _text(rejected.message)))

    def _list_rejected(self) -> None:
        """Writes the listing, whole."""
        path = self.report.listing
        partial_path = path.with_name(f".{path.name}.partial")
        try:
            with partial_path.open("w", encoding="utf-8") as file:
                for item in self.journal.rejections():
                    row = item.at - 1 if item.row < 0 else item.row
                    line: dict[str, Any] = {"file": str(self._entry(item).file), "row": row, "id": item.id}
                    file.write(json.dumps({**line, "reason": item.reason, "message": item.message}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial_path.replace(path)
        except OSError as error:
            partial_path.unlink(missing_ok=True)
            raise store_error(error, path) from error


def _exported_rows(folder: Path) -> Iterator[WrittenRow]:
    """What the lists of an export say; none where the folder has none. Raises RunError `import_refused`."""
    for path in sorted(folder.glob("hsx-rows*.jsonl")):
        try:
            yield from read_rows(path, "import_refused")
        except OSError as error:
            raise RunError("import_refused", f"{path} cannot be read: {error.strerror or error}") from error


def _usual_width(heads: list[tuple[tuple[int, int], Head] | RejectedSampleError]) -> int:
    """H of most of the samples, so that one strange file in front does not turn all others away; 0 where none can be read."""
    widths = Counter(found[1].hidden_size for found in heads if not isinstance(found, RejectedSampleError))
    return widths.most_common(1)[0][0] if widths else 0


def _stamp(entry: Entry) -> tuple[int, int]:
    try:
        about = entry.file.stat()
    except OSError as error:
        raise RejectedSampleError("unreadable", f"cannot be looked at: {error.strerror}") from error
    return about.st_size, about.st_mtime_ns


def _require_unchanged(entry: Entry, known: Known) -> None:
    stamp = _stamp(entry)
    if stamp != known.stamp:
        raise RejectedSampleError(
            "changed",
            f"is {stamp[0]} bytes of {stamp[1]} ns; expected {known.stamp[0]} of {known.stamp[1]}, as when it was read",
        )


def _name(path: bytes) -> str:
    """The id of a sample without a manifest: its path without what says its kind."""
    text = _text(os.fsdecode(path))
    return next((text.removesuffix(ending) for ending in _ENDINGS if text.endswith(ending)), text)


def _text(value: str) -> str:
    """What is no Unicode in it, of a path for example, as escapes."""
    return value.encode("utf-8", "backslashreplace").decode()
