"""Seals a job's store: what is in it is proved, listed with its checksums, and not to change any more.

The seal can be taken away again. Whatever moment it is cut short at, the store is either sealed or is as it was.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from hsx.errors import RunError
from hsx.locks import JOB_LOCK, MOVE_LOCK, locked, store_lock
from hsx.stores.attach import flush_roots
from hsx.stores.group import open_store, require_run
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_backup import refuse_copy
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.seal import SealedArrays, remove_seal, write_seal
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hsx.config_load import LoadedConfig
    from hsx.records import Counts
    from hsx.stores.group import StoreInfo
    from hsx.verify import Reading, VerifyReport


@dataclass(frozen=True, slots=True)
class SealReport:
    """What came of sealing.

    Attributes:
        store: path of the store.
        sealed: it is sealed now.
        at: since when, ISO 8601; "" where it is not.
        committed: samples in it.
        left_out: samples of the job that are not: quarantined or pending ones.
        verified: every shard was read and proved for it.
        damage: what verification found, where that kept it from being sealed; else None.
    """

    store: str
    sealed: bool
    at: str = ""
    committed: int = 0
    left_out: int = 0
    verified: bool = False
    damage: VerifyReport | None = None


def seal(loaded: LoadedConfig, *, partial: bool, read: bool, watch: Callable[[Reading], None] | None = None) -> SealReport:
    """Seals the store of a job that does not run. One that is sealed stays as it is.

    Args:
        loaded: the job file.
        partial: also where samples are pending, or no canary stands behind some.
        read: read and prove every shard before; else only look for each, its size and its link.
        watch: told how far the reading is.

    Raises:
        RunError: `incomplete`; `job_locked` where the job runs, is repaired or moved; `not_run_yet`, `ledger_failed`,
            `job_changed`, `store_invalid`, `store_unwritable`, `root_unusable`.
    """
    with _at_rest(loaded) as (info, path):
        if info.sealed is not None:
            return _told(info)
        if not partial:
            asyncio.run(_require_vouched(path))
        with LedgerReader(path) as reader:
            counts = reader.counts()
            if counts.pending and not partial:
                raise RunError(
                    "incomplete",
                    f"{counts.pending} of {_samples(counts)} samples are pending; expected every one to be committed or "
                    "quarantined (hsx run goes on; --partial seals what is there)",
                )
            flush_roots(info)
            found = verify(info.path, reader, fraction=1.0 if read else 0.0, watch=watch)
            if not found.ok:
                return SealReport(str(info.path), sealed=False, committed=counts.committed, damage=found)
            arrays = SealedArrays.empty(info, shared=counts.shared > 0)
            for row in reader.committed():
                arrays.put(row.index, row.root, row.crc32c, row.captured_as)
        facts = {
            "at": datetime.now(tz=UTC).isoformat(timespec="seconds"),
            "samples": _samples(counts),
            "committed": int(arrays.committed.sum()),
            **({"shared": counts.shared} if counts.shared else {}),
            "verified": read,
        }
        return _told(write_seal(info, arrays, facts))


def unseal(loaded: LoadedConfig) -> SealReport:
    """Takes the seal away, and what a seal that was cut short has left.

    A ledger that is missing or broken does not hinder it: it is built again only once the store may change. Raises as `seal`.
    """
    with _at_rest(loaded, ledger_needed=False) as (info, _):
        return _told(remove_seal(info))


@contextmanager
def _at_rest(loaded: LoadedConfig, *, ledger_needed: bool = True) -> Iterator[tuple[StoreInfo, Path]]:
    """The store and the ledger of a job that nobody changes meanwhile."""
    name, path = loaded.config.job.name, loaded.state_dir / FILE_NAME
    if ledger_needed and not path.exists():
        raise RunError("ledger_failed", f"{path} does not exist; expected the ledger of a job that has been run")
    with (
        locked(loaded.state_dir / JOB_LOCK, f"job {name}"),
        locked(store_lock(loaded.store), f"store {loaded.store}", "store_unwritable"),
        locked(loaded.state_dir / MOVE_LOCK, f"moving samples of job {name}"),
    ):
        info = open_store(loaded.store)
        try:
            with LedgerReader(path) as reader:
                run = reader.run
        except RunError:
            if ledger_needed:
                raise
        else:
            require_run(info, run, path)
            if ledger_needed:
                refuse_copy(path)
        yield info, path


async def _require_vouched(path: Path) -> None:
    """Refuses samples that a run would take back, or extract again, before anything else."""
    ledger = SqliteLedger(path)
    try:
        doubtful = [*await ledger.unvouched(), *(epoch for epoch, _, _ in await ledger.overdue())]
    finally:
        await ledger.close()
    if doubtful:
        raise RunError(
            "incomplete",
            f"no canary stands behind the last samples of epochs {', '.join(dict.fromkeys(doubtful))}; expected one behind all "
            "(hsx run sees to it; --partial seals what is there)",
        )


def _samples(counts: Counts) -> int:
    return counts.pending + counts.committed + counts.quarantined


def _told(info: StoreInfo) -> SealReport:
    if info.sealed is None:
        return SealReport(str(info.path), sealed=False)
    committed = int(info.sealed.get("committed", 0))
    return SealReport(
        str(info.path),
        sealed=True,
        at=str(info.sealed.get("at", "")),
        committed=committed,
        left_out=info.layout.samples - committed,
        verified=bool(info.sealed.get("verified")),
    )
