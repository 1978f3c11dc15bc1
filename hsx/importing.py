"""`hsx import`: hidden states that others have extracted, as a store, as far as they pass what hsx proves of its own.

First the files are listed; then the ids and masks of all samples are read, and what cannot be taken is set aside; then the
states, which are judged by the invariants on content before they are written. What fails is listed. Whose states they are, only
the files themselves say. A journal (`hsx.ingest.journal`) lies beside the store meanwhile: the same call goes on.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.dump import DumpHeader
from hsx.core.invariants import Evidence, judge_dump
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec, FinalState, final_state
from hsx.dumps.measure import measure
from hsx.errors import RunError
from hsx.export.manifest import MANIFEST, read_manifest, read_rows
from hsx.ingest import open_source
from hsx.ingest.journal import Journal, Known, Rejection
from hsx.ingest.protocol import Entry, RejectedSampleError
from hsx.locks import locked, store_lock
from hsx.records import Payload, Row
from hsx.stores.durable import make_folder, store_error, sync_folder
from hsx.stores.group import StoreInfo, create_store, open_store, refuse_populated
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.root import ShardRoot, attach_roots
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.view import UnionView, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from hsx.ingest.journal import Listed
    from hsx.ingest.protocol import Head, Source

_RUN = "00000000"
_ENDINGS: Final = (".ckpt.gz", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What to import, and where to.

    Attributes:
        kind: the kind of folder, out of `hsx.ingest.SOURCES`.
        folder: the folder.
        store: the store to make.
        roots: its roots, by name; folders that exist.
        layers: the k of the layers h_k, in the order of the files; None: as the folder's manifest says.
        final: the final state; None: as the manifest or the kind of folder says.
        threads: that read, judge and write.
    """

    kind: str
    folder: Path
    store: Path
    roots: Mapping[str, Path]
    layers: tuple[int, ...] | None = None
    final: FinalState | None = None
    threads: int = 2


@dataclass(slots=True)
class ImportReport:
    """What came of it: `found` = `committed` + the sum of `rejected`.

    Attributes:
        store: the store.
        listing: the file that names each rejected sample, a line of JSON each.
        states: names of the states.
        found: samples in the folder.
        committed: samples that are in the store.
        kept: of them, those that an earlier call had brought.
        tokens: of all that are in the store.
        rejected: how many samples were not taken, by reason.
    """

    store: Path
    listing: Path
    states: tuple[str, ...]
    found: int = 0
    committed: int = 0
    kept: int = 0
    tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)


def journal_path(store: Path) -> Path:
    """Where the journal of an import lies until it is done."""
    return store.with_name(f"{store.name}.import.sqlite")


def import_folder(request: ImportRequest, watch: Callable[[ImportReport], None] = lambda _: None) -> ImportReport:
    """Makes a store of a folder, or goes on with it: the same call as one that was cut short keeps all that is committed.

    Raises RunError: `import_refused` where the folder is not of that kind, nothing in it can be taken, the store is there
    already, or another import was begun there; `job_locked` where one is under way; `dependency_missing`; `root_unusable`,
    `roots_full`, `store_unwritable`, after which the same call goes on.
    """
    if not request.folder.is_dir():
        raise RunError("import_refused", f"{request.folder} is not a folder; expected one of {request.kind}")
    with locked(store_lock(request.store), f"store {request.store}", "store_unwritable"):
        if request.store.exists() and not journal_path(request.store).exists():
            raise RunError(
                "import_refused", f"{request.store} is there already; expected a new path: an import makes a new store"
            )
        source = open_source(request.kind, request.folder)
        spec = _capture(request, source)
        report = ImportReport(request.store, request.store.with_name(f"{request.store.name}.import.jsonl"), spec.names)
        with _begin(request, spec) as journal:
            _Import(request, source, spec, report, journal, watch).run()
            journal.remove()
    return report


def _capture(request: ImportRequest, source: Source) -> CaptureSpec:
    """The states that the files have."""
    layers, final = request.layers, request.final
    if (request.folder / MANIFEST).exists():
        manifest = read_manifest(request.folder)
        if manifest.get("to") != request.kind and request.kind != "vllm":
            raise RunError(
                "import_refused", f"{request.folder} is an export to {manifest.get('to')}; expected --from {manifest.get('to')}"
            )
        said, last = _mapped(request.folder, manifest)
        for option, given, known in (("--layers", layers, said), ("--final", final, last)):
            if given not in (None, known):
                raise RunError(
                    "import_refused",
                    f"{option} is {given}, and {request.folder / MANIFEST} says {known}; expected the same, or no {option}",
                )
        layers, final = said, last
    if not layers:
        raise RunError(
            "import_refused", f"{request.folder} does not say which layers it has; expected --layers with the k of h_k"
        )
    if any(after <= before for before, after in pairwise(layers)):
        raise RunError("import_refused", f"layers are {list(layers)}; expected strictly rising ones, as a store has them")
    return CaptureSpec(layers, final or source.final)


def _begin(request: ImportRequest, spec: CaptureSpec) -> Journal:
    """The journal of this very import, begun before or now. Raises RunError `import_refused`."""
    path, store = journal_path(request.store), request.store
    journal = Journal(path)
    try:
        if journal.stage == "states" and not store.exists():
            journal.remove()  # what it speaks of was taken away
            journal = Journal(path)
        wanted = {"kind": request.kind, "folder": str(request.folder.resolve()), "states": list(spec.names)}
        begun = journal.fix("import", wanted)
        if begun != wanted:
            key = next(key for key in wanted if begun[key] != wanted[key])
            raise RunError(
                "import_refused",
                f"another import into {store} was begun: its {key} is {begun[key]!r}; expected {wanted[key]!r} (to give that "
                f"one up, remove {path}, the store, and its folders on the roots)",
            )
        if journal.stage in ("listing", "heads") and store.exists():
            raise RunError("import_refused", f"{store} is there, and the import that {path} tells of did not make it")
    except BaseException:
        journal.close()
        raise
    return journal


def _mapped(folder: Path, manifest: Mapping[str, Any]) -> tuple[tuple[int, ...], FinalState]:
    """Layers and final state that an export has."""
    try:
        mapping = manifest["mapping"]
        return tuple(int(k) for k in mapping["layers"]), final_state(str(mapping["final"]))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError("import_refused", f"{folder / MANIFEST} says nothing of the states: {error}") from error


@dataclass(slots=True)
class _Import:
    request: ImportRequest
    source: Source
    spec: CaptureSpec
    report: ImportReport
    journal: Journal
    watch: Callable[[ImportReport], None]
    epoch: str = ""

    def run(self) -> None:
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

        rows = (row for path in sorted(self.request.folder.glob("hsx-rows*.jsonl")) for row in read_rows(path))
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
                raise RunError("import_refused", f"{store} is not the store that the import of {journal_path(store)} has made")
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
