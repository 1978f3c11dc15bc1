"""Builds a lost ledger again: from the records that shards carry, the token arrays, and the newest copy of it on a root.

Every shard on every root is read and proved; what its record says of it then counts as a commit. A copy of the ledger, where
there is one, gives the history: attempts, failures, quarantined samples, what canaries vouched for. What neither shards nor a
copy tell is lost, and never guessed:

- the run id is new, so that no marker is used twice, whatever attempts were made;
- no canary vouches for what a copy does not say was vouched for: the next server is asked for the last samples of each epoch;
- no server that is there now may go on: it may have been voided by a verdict that is lost.

The new ledger appears under its name when it is whole; the store is given the new run id after that, as the last thing.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from hsx.census import Shard, census
from hsx.core.epoch import RECORD_NAME
from hsx.core.fingerprint import changes
from hsx.core.marker import prefix
from hsx.datasets import open_dataset
from hsx.errors import RunError
from hsx.index import recorded_bad_rows
from hsx.model_config import read_model_shape
from hsx.prepare import fingerprint, store_layout
from hsx.repair import LISTED, present_roots
from hsx.stores.attach import flush_roots
from hsx.stores.durable import sync_folder
from hsx.stores.group import StoreInfo, forget_roots, open_store, record_run, require_unsealed
from hsx.stores.ledger import SqliteLedger, create, new_run
from hsx.stores.ledger_backup import BACKED_UP, BACKUP_NAME, backed_up, backup
from hsx.stores.ledger_merge import REBUILT_FROM, Found, Merge
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME, SCHEMA_VERSION, connect, translated
from hsx.stores.selection import StoredPrompts
from hsx.stores.tokens import TokenTable
from hsx.tidy import Tidied, tidy
from hsx.twins import find_twins
from hsx.verify import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hsx.config_load import LoadedConfig
    from hsx.verify import Reading

BATCH: Final = 1000
_DRAFT: Final = "ledger.rebuild"
_BESIDE: Final = ("-wal", "-shm", "-journal")
"""What SQLite keeps beside a ledger. It must never meet another one, into which it would be played."""


@dataclass(slots=True)
class RebuildReport:
    """What the new ledger was made of.

    Attributes:
        store: path of the store.
        ledger: the new ledger.
        run: its run id.
        previous_run: the one before.
        kept: where the broken ledger was put; None where there was none.
        copy: the copy that gave the history; None where no root had a sound one.
        copy_at: when it was taken, in Unix seconds.
        copies_refused: why other copies were not taken, by root.
        samples: samples of the job.
        committed: those that are committed in the new ledger.
        pending: those that are not.
        quarantined: those that the copy has as quarantined, and no shard was found of.
        shards: shards that were read.
        nbytes: their bytes.
        refused: shards that were not proved, and so not taken.
        refusals: the first of them.
        superseded: proved shards of older attempts, or of attempts that the copy knows to be revoked.
        missing: samples that the copy has as committed, and no sound shard was found of: they are pending.
        shared: committed samples whose shards are links to that of another one, with the same prompt.
        epochs: lives of servers that are in the new ledger.
        partials, relinked, strays, untidy: see `hsx.tidy.Tidied`.
        not_copied: roots that could not take a copy of the new ledger, and why.
    """

    store: str
    ledger: str
    run: str
    previous_run: str
    kept: str | None = None
    copy: str | None = None
    copy_at: float = 0.0
    copies_refused: dict[str, str] = field(default_factory=dict)
    samples: int = 0
    committed: int = 0
    pending: int = 0
    quarantined: int = 0
    shards: int = 0
    nbytes: int = 0
    refused: int = 0
    refusals: list[Damage] = field(default_factory=list)
    superseded: int = 0
    missing: int = 0
    shared: int = 0
    epochs: int = 0
    partials: int = 0
    relinked: int = 0
    strays: int = 0
    untidy: dict[str, str] = field(default_factory=dict)
    not_copied: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def rebuild(loaded: LoadedConfig, *, lost: Sequence[str] = (), watch: Callable[[Reading], None] | None = None) -> RebuildReport:
    """Builds the ledger of a job again. Blocks; the caller holds `hsx.locks.at_rest`. Killed at any time, it is called again.

    Args:
        loaded: the job file.
        lost: roots that are gone for good: their samples are pending, and the store forgets them.
        watch: told how far the reading is.

    Raises:
        RunError: `usage` where the ledger is sound; `ledger_failed` where it cannot be looked at, and where neither shards nor
            copies tell anything; `job_changed` where the job file is another job's, and there is no copy; `root_unusable`,
            `store_sealed`, `store_invalid`, `store_unwritable`, and what opening dataset and model raises.
    """
    store = open_store(loaded.store)
    require_unsealed(store)
    path = loaded.state_dir / FILE_NAME
    broken = _broken(path, store)
    store = present_roots(store, {root.name: root.path for root in loaded.roots}, lost, dry_run=False)
    if lost:
        store = forget_roots(store, lost)
    if broken is not None:
        flush_roots(store)
        report = _build(loaded, store, watch)
        report.kept = _put_aside(path)
        (loaded.state_dir / _DRAFT).rename(path)
        sync_folder(loaded.state_dir)
    else:
        with LedgerReader(path) as reader:
            report = RebuildReport(str(store.path), str(path), reader.run, store.run)
    # The last thing: until here the store belongs to the ledger that was lost, and a run refuses it.
    store = record_run(store, report.run)
    tidied = _tidy(store, path)
    report.partials, report.relinked, report.strays = tidied.partials, tidied.relinked, tidied.strays
    report.untidy = tidied.untidy
    copies = backup(path, {name: store.folder(name) for name in store.roots})
    report.not_copied = {name: error.message for name, error in copies.items() if error is not None}
    _forget_dumps(loaded.dump_dir, report.previous_run)
    with LedgerReader(path) as reader:
        counts = reader.counts()
        report.epochs = len(reader.epochs())
    report.samples = store.layout.samples
    report.committed, report.pending, report.quarantined = counts.committed, counts.pending, counts.quarantined
    report.shared = counts.shared
    return report


def _tidy(store: StoreInfo, path: Path) -> Tidied:
    ledger = SqliteLedger(path)
    try:
        return tidy(store, ledger)
    finally:
        asyncio.run(ledger.close())


def _broken(path: Path, store: StoreInfo) -> str | None:
    """Why the ledger is of no use; None where it was rebuilt already, and only the rest is to be done.

    Raises RunError `usage` where it is sound, `ledger_failed` where it is a newer hsx's or may not be read.
    """
    if not path.exists():
        return "it is missing"
    with translated(path), path.open("rb") as file:
        file.read(1)  # a ledger that may not be read is not broken
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (version,) = db.execute("PRAGMA user_version").fetchone()
            (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return f"{type(error).__name__}: {error}"
    if version > SCHEMA_VERSION:
        raise RunError(
            "ledger_failed", f"ledger {path} has schema version {version}, of a newer hsx; expected it to be missing or broken"
        )
    if verdict != "ok":
        return str(verdict)
    try:
        with LedgerReader(path) as reader:
            run, source, copied = reader.run, reader.fact(REBUILT_FROM), reader.fact(BACKED_UP)
    except RunError as error:
        return error.message
    if copied is not None:
        return "it is a copy of an earlier one"
    if source == store.run and run != store.run:
        return None
    whose = "" if run == store.run else f", of run {run}, where the store is of run {store.run}"
    raise RunError(
        "usage",
        f"--rebuild-ledger: ledger {path} is sound{whose}; expected it to be missing or broken. To have it built again all the "
        "same, move it away first",
    )


def _put_aside(path: Path) -> str | None:
    """Gives a broken ledger, and what lies beside it, other names. None where there is no ledger."""
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    there = path.exists()
    with translated(path):
        for name in (path.name, *(path.name + ending for ending in _BESIDE)):
            with suppress(FileNotFoundError):
                path.with_name(name).rename(path.with_name(f"{name}.broken-{stamp}"))
        sync_folder(path.parent)
    return str(path.with_name(f"{path.name}.broken-{stamp}")) if there else None


def _build(loaded: LoadedConfig, store: StoreInfo, watch: Callable[[Reading], None] | None) -> RebuildReport:
    """Makes the new ledger under the name of a draft, whole and on the disk."""
    draft = loaded.state_dir / _DRAFT
    report = RebuildReport(str(store.path), str(loaded.state_dir / FILE_NAME), new_run(), store.run)
    samples = TokenTable(store.path)
    with translated(draft):
        loaded.state_dir.mkdir(parents=True, exist_ok=True)
        for ending in ("", *_BESIDE):
            draft.with_name(draft.name + ending).unlink(missing_ok=True)
    source = _newest_copy(store, samples, report)
    if source is not None:
        with translated(draft):
            shutil.copyfile(source, draft)
    else:
        if not store.layout.records:
            raise RunError(
                "ledger_failed",
                f"the shards of store {store.path} have no records (format {store.format}), and no root has a copy of the "
                f"ledger ({BACKUP_NAME}); expected one of both",
            )
        same_as = find_twins(StoredPrompts(samples, store.layout)) if loaded.config.dataset.identical == "share" else None
        rejected = recorded_bad_rows(loaded.state_dir)
        create(draft, report.run, _fingerprint(loaded, store, samples), samples.lengths, rejected, same_as)
    with closing(connect(draft)) as db, translated(draft):
        db.execute("BEGIN IMMEDIATE")
        merge = Merge(db)
        batch: list[Found] = []
        for shard in census(store, draft, watch):
            report.shards, report.nbytes = report.shards + 1, report.nbytes + shard.nbytes
            if shard.found is None:
                _refuse(shard, samples, report)
                continue
            batch.append(shard.found)
            if len(batch) == BATCH:
                merge.add(batch)
                batch.clear()
        merge.add(batch)
        merged = merge.finish(report.run, store.run, _servers(loaded.dump_dir))
        report.superseded, report.missing = merged.superseded, merged.missing
        db.execute("COMMIT")
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return report


def _refuse(shard: Shard, samples: TokenTable, report: RebuildReport) -> None:
    report.refused += 1
    if len(report.refusals) < LISTED:
        sample_id = samples.sample_id(shard.index) if shard.index < samples.count else ""
        report.refusals.append(Damage(shard.index, sample_id, shard.kind, shard.message))


def _fingerprint(loaded: LoadedConfig, store: StoreInfo, samples: TokenTable) -> Mapping[str, str]:
    """The settings of the job file, where no copy of the ledger has them; they have to be those of the store."""
    shape = read_model_shape(loaded.model)
    dataset = open_dataset(loaded.config, shape)
    differing = [str(change) for change in changes(samples.dataset, dataset.fingerprint())]
    if loaded.spec != store.spec:
        differing.append(f"capture: the store has {store.spec}; the job file has {loaded.spec}")
    asked = store_layout(loaded, samples, shape)
    for key in ("codec", "chunk_tokens", "tokens", "context", "dtype"):
        name = "kept" if key == "tokens" else key
        has, wants = getattr(store.layout, name), getattr(asked, name)
        if has != wants:
            differing.append(f"storage.{key}: the store has {has}; the job file has {wants}")
    if shape.hidden_size != store.layout.hidden_size:
        differing.append(f"model: the store has width {store.layout.hidden_size}; {loaded.model} has {shape.hidden_size}")
    if differing:
        raise RunError("job_changed", f"store {store.path} was made by a job with other settings:\n  " + "\n  ".join(differing))
    return fingerprint(loaded, dataset, shape)


def _newest_copy(store: StoreInfo, samples: TokenTable, report: RebuildReport) -> Path | None:
    """The newest sound copy of the ledger on the store's roots."""
    newest: tuple[float, Path] | None = None
    for name in store.roots:
        path = store.folder(name) / BACKUP_NAME
        if not path.exists():
            continue
        try:
            at = _judged(path, samples)
        except (RunError, KeyError, ValueError) as error:
            report.copies_refused[name] = error.message if isinstance(error, RunError) else f"{path}: {error!r}"
            continue
        if newest is None or at > newest[0]:
            newest = (at, path)
    if newest is None:
        return None
    report.copy_at, report.copy = newest[0], str(newest[1])
    return newest[1]


def _judged(path: Path, samples: TokenTable) -> float:
    """When a copy was taken. Raises RunError `ledger_failed` where it is not sound, or of other samples."""
    at = backed_up(path)
    with closing(connect(path, read_only=True)) as db, translated(path):
        (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise RunError("ledger_failed", f"copy {path} of the ledger is broken: {verdict}")
        count = 0
        lengths = samples.lengths
        for index, tokens in db.execute("SELECT idx, tokens FROM samples ORDER BY idx"):
            if index != count or count >= samples.count or tokens != lengths[index]:
                raise RunError("ledger_failed", f"copy {path} of the ledger is of other samples than the store: sample {index}")
            count += 1
    if count != samples.count:
        raise RunError("ledger_failed", f"copy {path} of the ledger has {count} samples; expected {samples.count}")
    return at


def _servers(dump_dir: Path) -> list[tuple[str, float, str]]:
    """The servers that have a folder in the dump directory."""
    found = []
    with suppress(OSError):
        for record in dump_dir.glob(f"*/{RECORD_NAME}"):
            with suppress(OSError, UnicodeDecodeError):
                found.append((record.parent.name, record.stat().st_mtime, record.read_text(encoding="utf-8")))
    return found


def _forget_dumps(dump_dir: Path, run: str) -> None:
    """Removes the dumps of a run that is no more: nobody else would, and the dump directory is small."""
    with suppress(OSError):
        for dump in dump_dir.glob(f"*/{prefix(run)}*"):
            dump.unlink(missing_ok=True)
