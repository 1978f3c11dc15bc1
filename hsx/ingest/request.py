"""What an import is asked for, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hsx.core.spec import FinalState


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
