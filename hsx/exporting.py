"""`hsx export`: what a store's samples become as the files that a trainer reads, decided before any of them is written.

The formats are in `hsx.export`; `hsx.export_run` writes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx import __version__
from hsx.errors import RunError
from hsx.export.manifest import FORMAT
from hsx.export.mapping import map_states
from hsx.export.protocol import IndexRow, Vocabulary
from hsx.export.vocabulary import Coverage, count_tokens, coverage
from hsx.model_config import read_model_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState
    from hsx.export.mapping import Mapping
    from hsx.export.protocol import Format
    from hsx.stores.reader import Store

KNOWN_FORMATS: Final = frozenset({"hsx-store-1", "hsx-store-2"})
"""Stores in which every sample has all its tokens, in bf16."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to export, and how.

    Attributes:
        layers: the k of the layers to take; None: all.
        final: the final state, for formats that take either; None: as the format wants it, or as it is stored.
        ids: only these samples; None: all that are committed.
        max_tokens: longer samples are left out; None: none.
        part: this part, from 0, ...
        parts: ... of so many, that together make up the export: row r belongs to part r modulo parts.
        draft_vocab: size of the draft's vocabulary; None: no mapping.
        vocab_size: of the model's; None: out of the model's folder, if it is still where it was.
        link: files that would be equal are hard links of one.
        index_only: what lies beside the samples is written, and no sample.
        threads: that read, convert and write.
    """

    layers: tuple[int, ...] | None = None
    final: FinalState | None = None
    ids: Collection[str] | None = None
    max_tokens: int | None = None
    part: int = 0
    parts: int = 1
    draft_vocab: int | None = None
    vocab_size: int | None = None
    link: bool = False
    index_only: bool = False
    threads: int = 2

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RunError("usage", f"--max-tokens is {self.max_tokens}; expected at least 1")
        if not 0 <= self.part < self.parts:
            raise RunError("usage", f"--shard is {self.part}/{self.parts}; expected i/n with i from 0 to n - 1")
        if self.threads < 1:
            raise RunError("usage", f"--threads is {self.threads}; expected at least 1")


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows of an export.

    Attributes:
        indices: the store's index of each row, int64 [rows].
        without: the store's index of each sample that is no row, by reason, int64 [samples]; no reason without a sample.
        tokens: of all rows.
    """

    indices: NDArray[np.int64]
    without: dict[str, NDArray[np.int64]]
    tokens: int

    @property
    def left_out(self) -> dict[str, int]:
        """How many samples of the store are no rows, by reason."""
        return {reason: len(indices) for reason, indices in self.without.items()}

    @property
    def digest(self) -> str:
        """Tells this selection from others."""
        return hashlib.sha256(self.indices.astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All that is decided before anything is written."""

    store: Store
    form: Format
    folder: Path
    request: Request
    mapping: Mapping
    selection: Selection
    vocabulary: Vocabulary

    @property
    def rows(self) -> range:
        """The rows of this part that are to be files."""
        if self.request.index_only:
            return range(0)
        return range(self.request.part, len(self.selection.indices), self.request.parts)

    def index_row(self, row: int) -> IndexRow:
        """Ids and mask of a row."""
        index = int(self.selection.indices[row])
        return IndexRow(self.store.input_ids_numpy(index), self.store.loss_mask_numpy(index))

    def all_rows(self) -> Iterator[IndexRow]:
        """Ids and masks of all rows, in order."""
        return map(self.index_row, range(len(self.selection.indices)))

    def coverage(self) -> Coverage | None:
        """What the draft vocabulary has of the tokens that count, in all rows, which are read; None without one."""
        draft = self.vocabulary.draft
        return None if draft is None else coverage(count_tokens(self.all_rows()), draft)

    def left_out(self) -> Iterator[dict[str, Any]]:
        """Each sample of the store that is no row: its id, its index and why."""
        for reason, indices in self.selection.without.items():
            for index in indices.tolist():
                yield {"id": self.store.sample_id(index), "index": index, "reason": reason}

    def document(self) -> dict[str, Any]:
        """The manifest."""
        store = self.store
        return {
            "format": FORMAT,
            "to": self.form.name,
            "hsx": __version__,
            "store": {
                **{key: store.metadata[key] for key in ("format", "store_id", "states", "model")},
                "path": str(store.path),
            },
            "hidden_size": store.hidden_size,
            "keys": self.form.keys,
            "trainer_folder": self.form.trainer_folder,
            "mapping": self.mapping.document(),
            "rows": len(self.selection.indices),
            "tokens": self.selection.tokens,
            "left_out": self.selection.left_out,
            "max_tokens": self.request.max_tokens,
            "vocabulary": {"target": self.vocabulary.target, "draft": self.vocabulary.draft},
        }

    def identity(self) -> dict[str, Any]:
        """What decides which files there are, and what is in them."""
        return {
            "to": self.form.name,
            "store_id": self.store.info.store_id,
            "states": list(self.mapping.names),
            "rows": len(self.selection.indices),
            "selection": self.selection.digest,
            "draft_vocab": self.vocabulary.draft,
            **({} if self.vocabulary.draft is None else {"vocab_size": self.vocabulary.target}),
            **({"parts": self.request.parts} if self.form.path(0, 0) != self.form.path(0, 1) else {}),
        }


def refuse_partial(store: Store) -> None:
    """Refuses stores that do not hold every token of a sample as it was computed: trainers have no word for such samples.

    The place to name further kinds of stores. Raises RunError `export_refused`.
    """
    layout = store.info.layout
    less = "the states of some tokens alone" if layout.selects else "fp8 values" if layout.reduced else ""
    if less or store.metadata["format"] not in KNOWN_FORMATS:
        raise RunError(
            "export_refused",
            f"store {store.path} ({store.metadata['format']}) holds {less or 'what this hsx does not know'}; expected all "
            f"tokens as bf16 ({' or '.join(sorted(KNOWN_FORMATS))}), which is what trainers read; hsx.open reads the store",
        )


def refuse_own_folders(store: Store, folder: Path) -> None:
    """Refuses to export into the store or into its folder on a root, links followed. Raises RunError `export_refused`."""
    target = folder.resolve()
    for own in (store.path, *store.roots.values()):
        if target.is_relative_to(own.resolve()):
            raise RunError("export_refused", f"{folder} lies in {own}, which is the store's; expected a folder of its own")


def plan(store: Store, form: Format, folder: Path, request: Request) -> ExportPlan:
    """Decides what an export will be; writes nothing.

    Raises RunError: `export_refused`, `sample_unknown`, `dependency_missing`.
    """
    refuse_partial(store)
    form.prepare()
    if request.draft_vocab is not None and not form.maps_vocabulary:
        raise RunError("export_refused", f"{form.name} has no file for the draft's vocabulary; expected no --draft-vocab")
    if request.index_only and not form.has_index:
        raise RunError("export_refused", f"{form.name} has nothing but its samples; expected no --index-only")
    if request.link and form.depends_on == "id":
        raise RunError("export_refused", f"{form.name} files hold the sample's id, and no two are equal; expected no --link")
    refuse_own_folders(store, folder)
    has_norm = store.final_norm is not None
    mapping = map_states(form, store.info.spec, request.layers, has_norm=has_norm, final=request.final)
    vocabulary = Vocabulary(_vocab_size(store, request), request.draft_vocab)
    selection = select(store, form, request)
    return ExportPlan(store, form, folder, request, mapping, selection, vocabulary)


def _vocab_size(store: Store, request: Request) -> int | None:
    if request.vocab_size is not None or request.draft_vocab is None:
        return request.vocab_size
    path = store.info.model.get("path")
    try:
        return None if path is None else read_model_shape(Path(path)).vocab_size
    except RunError:
        return None


def select(store: Store, form: Format, request: Request) -> Selection:
    """The samples that become rows, in order of their index, and which do not for which reason.

    Raises RunError: `sample_unknown` where an id of `request.ids` is not in the store, or not committed; `export_refused` where
    nothing is left.
    """
    committed, lengths = store.committed, store.lengths
    without = {"not_committed": np.setdiff1d(np.arange(len(store)), committed)}
    chosen = committed
    if request.ids is not None:
        chosen = np.unique(np.array([store.index(name) for name in request.ids], np.int64))
        missing = np.setdiff1d(chosen, committed)
        if missing.size:
            name = store.sample_id(int(missing[0]))
            raise RunError("sample_unknown", f"sample {name!r} of store {store.path} is not committed; expected --ids that are")
        without["not_in_ids"] = np.setdiff1d(committed, chosen)
    if request.max_tokens is not None:
        fitting = lengths[chosen] <= request.max_tokens
        without["longer_than_max_tokens"] = chosen[~fitting]
        chosen = chosen[fitting]
    kept: list[int] = []
    unfit: dict[str, list[int]] = {}
    for index in chosen.tolist():
        reason = form.unfit(IndexRow(store.input_ids_numpy(index), store.loss_mask_numpy(index)))
        (unfit.setdefault(reason, []) if reason else kept).append(index)
    without |= {reason: np.array(found, np.int64) for reason, found in unfit.items()}
    selection = Selection(
        np.array(kept, np.int64),
        {reason: found for reason, found in without.items() if len(found)},
        int(lengths[np.array(kept, np.int64)].sum()),
    )
    if not kept:
        why = ", ".join(f"{count} {reason}" for reason, count in selection.left_out.items()) or "it has no committed sample"
        raise RunError("export_refused", f"store {store.path} has no sample to export: {why}; expected at least one")
    return selection
