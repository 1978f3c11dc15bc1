"""`hsx import`: hidden states that others have extracted, as a store, as far as they pass what hsx proves of its own.

First the ids and masks of all samples are read, and what cannot be taken is set aside; then the states, which are judged by the
invariants on content before they are written. What fails is listed. Whose states they are, only the files themselves say.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

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
from hsx.ingest.protocol import Entry, RejectedSampleError, name_of
from hsx.records import Payload, Row
from hsx.stores.durable import make_folder, store_error, sync_folder
from hsx.stores.group import StoreInfo, create_store
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.root import ShardRoot, attach_roots
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.view import UnionView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hsx.ingest.protocol import Head, Source

_RUN = "00000000"
_JUDGED_BY = 9
"""Samples by which the width of all is known."""


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
        tokens: of these.
        rejected: how many samples were not taken, by reason.
    """

    store: Path
    listing: Path
    states: tuple[str, ...]
    found: int = 0
    committed: int = 0
    tokens: int = 0
    rejected: dict[str, int] = field(default_factory=dict)


def import_folder(request: ImportRequest, watch: Callable[[ImportReport], None] = lambda _: None) -> ImportReport:
    """Makes a store of a folder.

    Raises RunError: `import_refused` where the folder is not of that kind, nothing in it can be taken, or the store is there
    already; `dependency_missing`; `root_unusable`, `roots_full`, `store_unwritable`.
    """
    if not request.folder.is_dir():
        raise RunError("import_refused", f"{request.folder} is not a folder; expected one of {request.kind}")
    if request.store.exists():
        raise RunError("import_refused", f"{request.store} is there already; expected a new path: an import makes a new store")
    source = open_source(request.kind, request.folder)
    spec, names = _capture(request, source)
    report = ImportReport(request.store, request.store.with_name(f"{request.store.name}.import.jsonl"), spec.names)
    try:
        with report.listing.open("w", encoding="utf-8") as listing:
            run = _Import(request, source, spec, names, report, listing.write, watch)
            run.run()
    except OSError as error:
        raise store_error(error, report.listing) from error
    return report


def _capture(request: ImportRequest, source: Source) -> tuple[CaptureSpec, dict[str, str]]:
    """The states that the files have, and the ids of samples by their file, as far as a manifest of hsx's knows them."""
    layers, final = request.layers, request.final
    names: dict[str, str] = {}
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
        for path in sorted(request.folder.glob("hsx-rows*.jsonl")):
            names.update((row.file, row.id) for row in read_rows(path))
    if not layers:
        raise RunError(
            "import_refused", f"{request.folder} does not say which layers it has; expected --layers with the k of h_k"
        )
    if any(after <= before for before, after in pairwise(layers)):
        raise RunError("import_refused", f"layers are {list(layers)}; expected strictly rising ones, as a store has them")
    return CaptureSpec(layers, final or source.final), names


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
    names: dict[str, str]
    report: ImportReport
    write_line: Callable[[str], Any]
    watch: Callable[[ImportReport], None]
    hidden_size: int = 0
    epoch: str = field(default_factory=lambda: str(uuid.uuid4()))

    def run(self) -> None:
        accepted, lengths = self._index()
        info, roots = self._create(lengths)
        view = UnionView(info)
        homes = {root.name: root for root in roots}
        with ThreadPoolExecutor(self.request.threads, "hsx-import") as pool:
            work = enumerate(accepted)
            while batch := list(islice(work, 4 * self.request.threads)):
                for entry, done in zip(
                    (entry for _, entry in batch),
                    pool.map(lambda item: self._take(item[0], item[1], lengths[item[0]], roots, info), batch),
                    strict=True,
                ):
                    if isinstance(done, RejectedSampleError):
                        self._reject(entry, done)
                        continue
                    index, root, tokens = done
                    homes[root].sync()
                    view.link(index, root)
                    self.report.committed += 1
                    self.report.tokens += tokens
                self.watch(self.report)
        sync_folder(info.path / HIDDEN_STATES)

    def _index(self) -> tuple[list[Entry], list[int]]:
        """Writes the token arrays of what can be taken so far; returns that, and its lengths."""
        accepted: list[Entry] = []
        lengths: list[int] = []
        seen: set[str] = set()
        self.hidden_size = self._usual_width()
        with TokenTableWriter(self.request.store) as table:
            for entry in self.source.entries():
                self.report.found += 1
                try:
                    name, head = self._name(entry), self.source.head(entry, self.spec.states)
                    self._fits(name, head, seen)
                except RejectedSampleError as rejected:
                    self._reject(entry, rejected)
                    continue
                seen.add(name)
                table.add(Row(name, head.input_ids, head.loss_mask, entry.row + 1))
                accepted.append(entry)
                lengths.append(len(head.input_ids))
            if not accepted:
                why = ", ".join(f"{count} {reason}" for reason, count in self.report.rejected.items()) or "it has no samples"
                raise RunError(
                    "import_refused", f"{self.request.folder} has nothing to import: {why}; see {self.report.listing}"
                )
            table.finish({"imported": self.request.kind, "folder": str(self.request.folder)}, {})
        return accepted, lengths

    def _usual_width(self) -> int:
        """H of most of the first samples that can be read: one strange file does not turn all others away. 0: of none."""
        widths: Counter[int] = Counter()
        for entry in self.source.entries():
            with suppress(RejectedSampleError):
                widths[self.source.head(entry, self.spec.states).hidden_size] += 1
            if widths.total() == _JUDGED_BY:
                break
        return widths.most_common(1)[0][0] if widths else 0

    def _fits(self, name: str, head: Head, seen: set[str]) -> None:
        if head.hidden_size != self.hidden_size:
            raise RejectedSampleError(
                "bad_shape", f"H is {head.hidden_size}; expected {self.hidden_size}, as the folder's first samples have"
            )
        if name in seen:
            raise RejectedSampleError("duplicate_id", f"id {name!r} is another sample's, too")

    def _create(self, lengths: list[int]) -> tuple[StoreInfo, list[ShardRoot]]:
        layout = StoreLayout(len(lengths), max(lengths), self.spec.states, self.hidden_size)
        model = {"imported": self.request.kind, "folder": str(self.request.folder)}
        info = create_store(self.request.store, layout, self.spec, model)
        for path in self.request.roots.values():
            try:
                make_folder(path)
            except OSError as error:
                raise RunError("root_unusable", f"root {path} cannot be made: {error.strerror}") from error
        return attach_roots(info, self.request.roots)

    def _take(
        self, index: int, entry: Entry, tokens: int, roots: list[ShardRoot], info: StoreInfo
    ) -> tuple[int, str, int] | RejectedSampleError:
        try:
            head = self.source.head(entry, self.spec.states)
            states = self.source.states(entry)
            if states.shape != (tokens, self.spec.states, self.hidden_size):
                raise RejectedSampleError("changed", f"states are {list(states.shape)}; expected {tokens} tokens, as at first")
        except RejectedSampleError as rejected:
            return rejected
        marker = Marker(_RUN, index, 1, tokens)
        content = measure(states, head.input_ids, head.input_ids)
        header = DumpHeader(marker, self.epoch, index + 1, self.spec, self.hidden_size, "", "")
        violation = judge_dump(Evidence(marker, self.epoch, self.spec, self.hidden_size, header, content))
        if violation is not None:
            return RejectedSampleError(violation.invariant, violation.evidence)
        root = roots[index % len(roots)]
        root.write(Payload(marker, self.epoch, index + 1, head.input_ids, np.ascontiguousarray(states), content.crcs))
        return index, root.name, tokens

    def _name(self, entry: Entry) -> str:
        file = str(entry.file.relative_to(self.request.folder))
        return self.names.get(file) or name_of(file)

    def _reject(self, entry: Entry, rejected: RejectedSampleError) -> None:
        self.report.rejected[rejected.reason] = self.report.rejected.get(rejected.reason, 0) + 1
        line = {"file": str(entry.file), "row": entry.row, "id": self._name(entry), "reason": rejected.reason}
        self.write_line(json.dumps({**line, "message": rejected.message}) + "\n")
