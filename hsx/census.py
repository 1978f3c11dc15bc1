"""What the shards say of themselves: reads and proves every shard on every root, whether a ledger knows it or not."""

from __future__ import annotations

import threading
import time
from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from hsx.core.layout import shard_key
from hsx.core.marker import parse
from hsx.stores.ledger_merge import Found
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.reader import Store
from hsx.stores.shard_reader import ShardError, read_record
from hsx.stores.view import visible
from hsx.verify import Reading
from hsx.verify.readers import RootReaders
from hsx.verify.shard import Expected, ShardProver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hsx.stores.group import StoreInfo

THREADS: Final = 2
"""Reading threads of each root."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard that was read: what it is, or which damage keeps it from being taken."""

    index: int
    nbytes: int
    found: Found | None
    kind: str = ""
    message: str = ""


def census(store: StoreInfo, ledger: Path, watch: Callable[[Reading], None] | None) -> Iterator[Shard]:
    """Reads every shard on every root, each root's with threads of its own.

    Args:
        store: the store; all its roots are there.
        ledger: what is known of the history. Where shards have no records, it alone tells which attempt a shard is of.
        watch: told how far the reading is.

    Returns:
        Each shard, in the order in which they were read.

    Raises:
        RunError: `store_invalid` where a root cannot be listed; what is wrong with a shard is in its `kind` and `message`.
    """
    work = {name: array("q", visible(store.folder(name)).tobytes()) for name in store.roots}
    total = sum(map(len, work.values()))
    began = time.monotonic()
    done = nbytes = refused = 0
    with LedgerReader(ledger) as history:
        judge = _Judge(Store(store.path), history)
        for shard in RootReaders(judge.judge, THREADS).run(work):
            done, nbytes, refused = done + 1, nbytes + shard.nbytes, refused + (shard.found is None)
            if watch is not None:
                watch(Reading(done, total, nbytes, nbytes * total // done, refused, time.monotonic() - began))
            yield shard


class _Judge:
    """Reads a shard and says what it is; in reading threads.

    Args:
        store: the store.
        history: what a copy of the ledger says; where shards have no records, it alone tells which attempt a shard is of.
    """

    def __init__(self, store: Store, history: LedgerReader) -> None:
        self._store = store
        self._history = history
        self._asking = threading.Lock()
        self._prover = ShardProver(store)

    def judge(self, root: str, index: int) -> Shard:
        """One shard."""
        info = self._store.info
        path = info.folder(root) / shard_key(index)
        if index >= len(self._store):
            return Shard(index, 0, None, "record", f"shard {path} is of a sample beyond the {len(self._store)} of the store")
        try:
            found = self._by_record(root, index, path) if info.layout.records else self._by_history(root, index, path)
            status = path.stat()
        except ShardError as error:
            return Shard(index, 0, None, error.problem, error.message)
        except OSError as error:
            return Shard(index, 0, None, "unreadable", f"shard {path}: {error.strerror}")
        tokens = self._store.tokens(index)
        proof = self._prover.prove(Expected(index, tokens, root, path, status.st_size, found.crc32c, found.marker))
        if proof.findings:
            return Shard(index, proof.nbytes, None, proof.findings[0].kind, proof.findings[0].message)
        return Shard(index, proof.nbytes, replace(found, nbytes=status.st_size, written=status.st_mtime))

    def _by_record(self, root: str, index: int, path: Path) -> Found:
        record = read_record(path, self._store.info.layout)
        return _found(record.marker, index, root, record.epoch, record.sequence, record.crc32c, path)

    def _by_history(self, root: str, index: int, path: Path) -> Found:
        with self._asking:
            row = self._history.row(index)
        if row is None:
            raise ShardError("record", path, "has no record, and the copy of the ledger has no commit of the sample")
        return _found(row.marker, index, root, row.epoch, row.sequence, row.crc32c, path)


def _found(marker: str, index: int, root: str, epoch: str, sequence: int, crc32c: int, path: Path) -> Found:
    """What a shard says; its size and time are still to come. Raises ShardError `record`."""
    name = parse(marker)
    if name is None or name.canary:
        raise ShardError("record", path, f"is of {marker}; expected a sample's marker")
    return Found(index, root, name.attempt, marker, epoch, sequence, 0, crc32c, 0.0, shared=name.index != index)
