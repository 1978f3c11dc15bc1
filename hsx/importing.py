"""`hsx import`: hidden states that others have extracted, as a store, as far as they pass what hsx proves of its own.

First the files are listed; then the ids and masks of all samples are read, and what cannot be taken is set aside; then the
states, which are judged by the invariants on content before they are written. What fails is listed. Whose states they are, only
the files themselves say. A journal (`hsx.ingest.journal`) lies beside the store meanwhile: the same call goes on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hsx.core.spec import CaptureSpec, FinalState, final_state
from hsx.errors import RunError
from hsx.export.manifest import MANIFEST, read_manifest
from hsx.import_run import Import
from hsx.ingest import SOURCES, open_source
from hsx.ingest.journal import Journal
from hsx.ingest.request import ImportReport, ImportRequest
from hsx.locks import locked, store_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hsx.ingest.protocol import Source


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
        what = "is not a folder" if request.folder.exists() else "is not there"
        raise RunError("import_refused", f"{request.folder} {what}; expected a folder of {request.kind}")
    with locked(store_lock(request.store), f"store {request.store}", "store_unwritable"):
        if request.store.exists() and not journal_path(request.store).exists():
            raise RunError(
                "import_refused", f"{request.store} is there already; expected a new path: an import makes a new store"
            )
        source = open_source(request.kind, request.folder)
        spec = _capture(request, source)
        report = ImportReport(request.store, request.store.with_name(f"{request.store.name}.import.jsonl"), spec.names)
        with _begin(request, spec) as journal:
            Import(request, source, spec, report, journal, watch).run()
            journal.remove()
    return report


def _capture(request: ImportRequest, source: Source) -> CaptureSpec:
    """The states that the files have."""
    layers, final = request.layers, request.final
    if (request.folder / MANIFEST).exists():
        manifest = read_manifest(request.folder, "import_refused")
        made_for = manifest.get("to")
        # A speculators export has the files of vLLM's connector, too.
        if made_for != request.kind and (request.kind, made_for) != ("vllm", "speculators"):
            wanted = f"--from {made_for}" if made_for in SOURCES else "one to specforge or speculators"
            raise RunError("import_refused", f"{request.folder} is an export to {made_for}; expected {wanted}")
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
        raise RunError(
            "import_refused", f"{folder / MANIFEST} says nothing of the states; expected 'mapping' with layers and final"
        ) from error
