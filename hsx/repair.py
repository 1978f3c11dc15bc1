"""Puts a store right, at rest: what verification calls damaged is pending again, exactly that; all else follows the ledger.

The order is that of a revocation. The ledger first takes a sample back, in a transaction; then it is hidden, and its shard
discarded. Killed anywhere in between, the next repair, and the next run, go on: shards of samples that were taken back are
discarded at every start.

Nothing is taken back because a disk is not there: roots must show that they are what they were, before every batch too. A root
that is gone for good has to be said so; it may not be there then.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores.attach import attach_roots, identify
from hsx.stores.durable import root_error
from hsx.stores.group import StoreInfo, forget_roots, open_store, require_run, require_unsealed
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_backup import refuse_copy
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.root import ShardRoot
from hsx.stores.tokens import TokenTable
from hsx.stores.view import UnionView
from hsx.tidy import tidy
from hsx.verify import OF_SHARDS, Damage, Reading, verify

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hsx.config_load import LoadedConfig
    from hsx.records import CommittedRow

BATCH: Final = 256
"""Damages that are dealt with at once."""
LOST_BATCH: Final = 5000
"""Samples of a lost root that are taken back in one transaction."""
LISTED: Final = 100
"""So many damages that could not be mended are listed; all are counted."""
LOST: Final = "root_lost"
"""What the ledger records as the reason for taking back the samples of a lost root."""
RELINKED: Final = frozenset({"link", "uncommitted_visible"})
"""Damage of the union view, which is made to follow the ledger."""
_GONE: Final = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG, errno.ENODATA})
"""What a disk answers that has lost data, as opposed to one that may not be read."""
Fate = Literal["requeued", "relinked", "left"]


@dataclass(slots=True)
class RepairReport:
    """What was found, and what became of it. In a dry run: what would become of it.

    Attributes:
        store: path of the store.
        dry_run: nothing was changed.
        committed: samples that were committed before, those of lost roots not included.
        read: shards that were read and proved or found damaged.
        damaged: damages found.
        requeued: samples that are pending again, for the damage of their shards.
        by_kind: those, by the kind of the damage that was met first.
        tokens: their tokens and those of lost samples.
        nbytes: bytes of their shards.
        lost: samples that are pending again because their root is lost, by root.
        relinked: links of the union view that were made or removed; in a dry run, damages of it.
        strays: shards that were removed, as their samples are committed elsewhere, or were taken back.
        partials: files of writers that were cut short, which were removed.
        untidy: by root, why files that should have been removed are still there; they do no harm.
        left: damages that repair cannot mend.
        left_over: the first `LISTED` of them.
    """

    store: str
    dry_run: bool
    committed: int = 0
    read: int = 0
    damaged: int = 0
    requeued: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    nbytes: int = 0
    lost: dict[str, int] = field(default_factory=dict)
    relinked: int = 0
    strays: int = 0
    partials: int = 0
    untidy: dict[str, str] = field(default_factory=dict)
    left: int = 0
    left_over: list[Damage] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def repair(
    loaded: LoadedConfig,
    *,
    lost: Sequence[str] = (),
    dry_run: bool = False,
    report: Path | None = None,
    watch: Callable[[Reading], None] | None = None,
) -> RepairReport:
    """Verifies a store, and mends what can be mended. Blocks; the caller holds `hsx.locks.at_rest`.

    Args:
        loaded: the job file.
        lost: roots that are gone for good: all their samples are pending again, and the store forgets the roots.
        dry_run: change nothing, and say what would be done.
        report: a file that gets one line of JSON for each damage, and for each lost sample, with what became of it.
        watch: told how far the reading is.

    Raises:
        RunError: `root_unusable` where a root that is not said to be lost is not there, or goes while it is read: what was
            taken back until then stays so. `usage` where a lost root is none of the store's, or is there. `store_sealed`,
            `job_changed`, `ledger_failed`, `store_invalid`, `store_unwritable`, also for a report file that was
            full before all was told.
    """
    lost = list(dict.fromkeys(lost))
    store = open_store(loaded.store)
    require_unsealed(store)
    path = loaded.state_dir / FILE_NAME
    with LedgerReader(path) as reader:
        require_run(store, reader.run, path)
        refuse_copy(path)
        store = present_roots(store, {root.name: root.path for root in loaded.roots}, lost, dry_run=dry_run)
        with _Log(report) as log, _Hands(store, path, RepairReport(str(store.path), dry_run), log) as hands:
            for name in lost:
                hands.give_up(name, reader)
            if lost and not dry_run:
                store = hands.forget(lost)
            verifying = _Mending(hands, reader, frozenset(lost))
            found = verify(store.path, reader, watch=watch, on_damage=verifying.met)
            verifying.flush()
            hands.report.committed, hands.report.read = found.committed, found.read
            hands.report.damaged = verifying.damaged
            hands.tidy()
        return hands.report


def present_roots(store: StoreInfo, named: Mapping[str, Path], lost: Sequence[str], *, dry_run: bool) -> StoreInfo:
    """The store with its roots where they are mounted now; each is there but for those that are lost, which are not."""
    unknown = [name for name in lost if name not in store.roots]
    if unknown:
        raise RunError("usage", f"--lost {unknown[0]}: the store has no such root; it has {', '.join(store.roots) or 'none'}")
    paths = {name: named.get(name, path).absolute() for name, path in store.roots.items()}
    for name, path in paths.items():
        reason = absence(store, name, path / store.store_id)
        if reason is None and name in lost:
            raise RunError(
                "usage",
                f"--lost {name}: root {name} is at {path}; expected it to be gone (without --lost what is damaged is mended)",
            )
        if reason is not None and name not in lost:
            raise RunError("root_unusable", f"{reason.message}; mount its disk, or say --lost {name} if it is gone for good")
    if dry_run:
        for name, path in paths.items():
            if path != store.roots[name] and name not in lost:
                raise RunError(
                    "usage",
                    f"root {name} is at {path} now, and the store has it at {store.roots[name]}: a dry run cannot note that; "
                    "repair without --dry-run does",
                )
        return store
    there = {name: path for name, path in paths.items() if name not in lost}
    return attach_roots(store, there)[0]


def absence(store: StoreInfo, name: str, folder: Path) -> RunError | None:
    """Why a folder is not that of the store on this root; None where it is."""
    try:
        identify(store, name, folder)
    except OSError as error:
        return root_error(error, name, folder)
    except RunError as error:
        return error
    return None


class _Log:
    """The report file: one line of JSON for each thing that was dealt with."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed: OSError | None = None

    def __enter__(self) -> Self:
        try:
            self._file = None if self._path is None else self._path.open("w", encoding="utf-8")
        except OSError as error:
            raise RunError("usage", f"report {self._path} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
        except OSError as failed:
            self._failed = self._failed or failed
        if self._failed is not None and error is None:
            raise RunError(
                "store_unwritable",
                f"report {self._path} cannot be written: {self._failed.strerror}; all was done all the same",
            )

    def add(self, fate: str, **facts: object) -> None:
        if self._file is not None and self._failed is None:
            try:
                self._file.write(json.dumps({"fate": fate, **facts}) + "\n")
            except OSError as failed:
                self._failed = failed  # mending goes on: it is not for the report that it is done


class _Hands:
    """Changes ledger, roots and view; in a dry run only counts."""

    def __init__(self, store: StoreInfo, ledger: Path, report: RepairReport, log: _Log) -> None:
        self.report = report
        self.log = log
        self._store = store
        self._path = ledger
        self._view = UnionView(store)
        self._samples = TokenTable(store.path)

    def __enter__(self) -> Self:
        self._loop = asyncio.Runner()
        self._ledger = None if self.report.dry_run else SqliteLedger(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ledger is not None:
            self._loop.run(self._ledger.close())
        self._loop.close()

    def give_up(self, root: str, reader: LedgerReader) -> None:
        """Takes back every sample of a lost root."""
        self.report.lost[root] = 0
        evidence = f"root {root} was said to be lost, and is not at {self._store.roots[root]}"
        batch: list[CommittedRow] = []
        for row in reader.committed():
            if row.root == root:
                batch.append(row)
            if len(batch) == LOST_BATCH:
                self._give_up(root, batch, evidence)
                batch = []
        self._give_up(root, batch, evidence)

    def _give_up(self, root: str, batch: list[CommittedRow], evidence: str) -> None:
        for row in self.take_back(batch, LOST, evidence):
            self.report.lost[root] += 1
            self.log.add("requeued", index=row.index, sample_id=self._samples.sample_id(row.index), kind=LOST, root=root)

    def take_back(self, rows: Sequence[CommittedRow], reason: str, evidence: str) -> Sequence[CommittedRow]:
        """Makes samples pending, hides them, and discards their shards where their root is there; returns those it was."""
        if self._ledger is not None and rows:
            rows = self._loop.run(self._ledger.requeue_damaged([row.index for row in rows], reason, evidence))
            for row in rows:
                self._view.unlink(row.index)
            for row in rows:
                if row.root in self._store.roots and row.root not in self.report.lost:
                    self._discard(row)
        self.report.tokens += sum(row.tokens for row in rows)
        self.report.nbytes += sum(row.own_bytes for row in rows)
        return rows

    def _discard(self, row: CommittedRow) -> None:
        """A shard that stays, on a disk that takes no writes, does no harm: nothing shows it, and each start tries again."""
        try:
            self.root(row.root).discard(row.index)
        except RunError as error:
            self.report.untidy[row.root] = error.message

    def log_twin(self, row: CommittedRow, kind: str) -> None:
        """A sample that is pending again as its shard is that of a damaged one."""
        message = f"its shard is that of sample {row.captured_as}, or of another one with that prompt, which is damaged"
        sample_id = self._samples.sample_id(row.index)
        self.log.add("requeued", index=row.index, sample_id=sample_id, kind=kind, message=message, root=row.root)

    def forget(self, roots: Sequence[str]) -> StoreInfo:
        """The store without these roots, durably."""
        self._store = forget_roots(self._store, roots)
        self._view = UnionView(self._store)
        return self._store

    def root(self, name: str) -> ShardRoot:
        """A root of the store."""
        return ShardRoot(name, self._store.folder(name), self._store)

    def require_root(self, name: str) -> None:
        """Raises RunError `root_unusable` where a root went away after it was looked at."""
        if name in self._store.roots and (reason := absence(self._store, name, self._store.folder(name))) is not None:
            raise RunError("root_unusable", f"{reason.message}; it was there when repair began: nothing more is taken back")

    def tidy(self) -> None:
        """See the function of this name."""
        if self._ledger is None:
            return
        tidied = tidy(self._store, self._ledger)
        self.report.partials, self.report.relinked, self.report.strays = tidied.partials, tidied.relinked, tidied.strays
        self.report.untidy |= tidied.untidy

    def speaks_of_lost_root(self, damage: Damage) -> bool:
        """Whether it says that a root cannot be listed which is known to be lost, as it is in the store still in a dry run."""
        if damage.index is not None or damage.kind != "root" or not self.report.lost.keys() & self._store.roots.keys():
            return False
        others = self._store.roots.keys() - self.report.lost.keys()
        return all(absence(self._store, name, self._store.folder(name)) is None for name in others)

    def ids_are_sound(self, index: int) -> bool:
        """Whether the sample's own ids can be read: where they cannot, the token arrays are damaged, and not the shard."""
        try:
            self._samples.input_ids(index)
        except RunError:
            return False
        return True


class _Mending:
    """Takes damage as verification meets it, and deals with it in batches.

    Args:
        hands: what changes things.
        reader: the ledger.
        lost: roots whose samples are dealt with already.
    """

    def __init__(self, hands: _Hands, reader: LedgerReader, lost: frozenset[str]) -> None:
        self._hands = hands
        self._reader = reader
        self._lost = lost
        self._batch: list[Damage] = []
        self._seen: set[int] = set()
        self.damaged = 0

    def met(self, damage: Damage) -> None:
        """One more."""
        self._batch.append(damage)
        if len(self._batch) >= BATCH:
            self.flush()

    def flush(self) -> None:
        """Deals with what was met since the last time. Raises RunError `root_unusable`."""
        batch, self._batch = self._batch, []
        by_kind: dict[str, list[tuple[CommittedRow, Damage]]] = {}
        for damage in batch:
            row = None if damage.index is None else self._reader.row(damage.index)
            lost = row.root in self._lost if row is not None else self._hands.speaks_of_lost_root(damage)
            if lost or damage.index in self._seen:
                continue
            self.damaged += 1
            fate = self._fate(damage, row)
            if fate == "requeued" and row is not None:
                self._seen.add(row.index)
                by_kind.setdefault(damage.kind, []).append((row, damage))
                continue
            self._log(fate, damage, row)
            if fate == "left":
                self._hands.report.left += 1
                if len(self._hands.report.left_over) < LISTED:
                    self._hands.report.left_over.append(damage)
            elif self._hands.report.dry_run:
                self._hands.report.relinked += 1
        for root in {row.root for pairs in by_kind.values() for row, _ in pairs}:
            self._hands.require_root(root)
        for kind, pairs in by_kind.items():
            self._requeue(kind, pairs)

    def _requeue(self, kind: str, pairs: list[tuple[CommittedRow, Damage]]) -> None:
        more = f" (and {len(pairs) - 1} more)" if len(pairs) > 1 else ""
        taken = self._hands.take_back([row for row, _ in pairs], kind, f"{pairs[0][1].message}{more}")
        self._hands.report.requeued += len(taken)
        self._hands.report.by_kind[kind] = self._hands.report.by_kind.get(kind, 0) + len(taken)
        for row, damage in pairs:
            self._log("requeued", damage, row)
        damaged = {row.index for row, _ in pairs}
        for row in taken:
            if row.index not in damaged:
                self._seen.add(row.index)
                self._hands.log_twin(row, kind)

    def _fate(self, damage: Damage, row: CommittedRow | None) -> Fate:
        if damage.kind in RELINKED:
            return "relinked"
        if row is None:
            return "left"
        if damage.kind == "unreadable":
            return "requeued" if self._is_unreadable(row) else "left"
        if damage.kind == "ids":
            return "requeued" if self._hands.ids_are_sound(row.index) else "left"
        return "requeued" if damage.kind in OF_SHARDS else "left"

    def _is_unreadable(self, row: CommittedRow) -> bool:
        """Whether the disk has lost data of a shard: one that merely may not be read, or can be now, is not extracted again."""
        return data_lost(self._hands.root(row.root).folder / shard_key(row.index))

    def _log(self, fate: Fate, damage: Damage, row: CommittedRow | None) -> None:
        root = None if row is None else row.root
        facts = {"index": damage.index, "sample_id": damage.sample_id, "kind": damage.kind, "message": damage.message}
        self._hands.log.add(fate, **facts, root=root)


def data_lost(path: Path) -> bool:
    """Whether reading a file fails for the sake of the disk itself."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            offset = 0
            while piece := os.pread(fd, 1 << 20, offset):
                offset += len(piece)
        finally:
            os.close(fd)
    except OSError as error:
        return error.errno in _GONE
    return False
