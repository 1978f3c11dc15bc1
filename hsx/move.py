"""Drains a root: moves its committed samples to other roots while the job runs or rests.

The order is the promise, as in `hsx.writer`; docs/decisions/0017 has the argument. For each batch of samples:

1. each shard is copied under a partial name, synced, and proved from the disk (`hsx.stores.shard_copy`);
2. the copies get their final names, which never replaces a file, and the names are synced;
3. with the right to change homes, in one transaction of the ledger: samples that are still committed here, by the same
   attempt, are shown at their new place, and the ledger says so;
4. the originals go, one batch later, and only where the ledger still says that their sample lies on the new root.

At every moment a committed sample lies, whole and under its final name, on the root that the ledger names.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.move_report import LISTED, MoveReport
from hsx.move_targets import Targets
from hsx.stores.draining import begin_draining, is_draining
from hsx.stores.durable import root_error, store_error, sync_folder
from hsx.stores.group import open_store
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.root import MOVING
from hsx.stores.shard import PARTIAL
from hsx.stores.shard_copy import CopyStoppedError, ShardCopier, copy_name
from hsx.stores.shard_reader import ShardError
from hsx.stores.view import UnionView, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from hsx.ports import Homes
    from hsx.records import CommittedRow
    from hsx.stores.group import StoreInfo
    from hsx.stores.ledger_move import MoveLedger

Step = Literal["copied", "linked", "named", "shown", "switched", "committed", "tidied", "discarded"]
CHUNK: Final = 256
"""Samples that are looked up in one go."""


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """How much is moved at once.

    Attributes:
        threads: copies under way at once.
        batch_samples: samples of one transaction, at most.
        batch_bytes: bytes of one transaction, but for a single larger sample.
        reserves: bytes that stay free, by root.
    """

    threads: int = 2
    batch_samples: int = 64
    batch_bytes: int = 1 << 30
    reserves: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Copy:
    """A proved copy: the row that it was made of, its new root, and its place until it gets its final name."""

    row: CommittedRow
    target: str
    partial: Path

    @property
    def final(self) -> Path:
        return self.partial.with_name(shard_key(self.row.index))


class Mover:
    """One move. Its caller holds the job's `MOVE_LOCK`, and has marked the root as draining, unless it takes no writes at all.

    Args:
        info: the store, with all its roots.
        source: the root to drain.
        targets: the roots that take its samples; attached.
        ledger: the ledger.
        homes: the right to change where samples lie.
        settings: see there.
        stopped: asked now and then; True ends the move in good order.
        moved: hears (samples, bytes) of each batch.
        reached: hears each step as it was taken, for tests that end things there.
    """

    def __init__(
        self,
        info: StoreInfo,
        source: str,
        targets: Sequence[str],
        ledger: MoveLedger,
        homes: Homes,
        settings: MoveSettings | None = None,
        *,
        stopped: Callable[[], bool] = lambda: False,
        moved: Callable[[int, int], None] = lambda _samples, _bytes: None,
        reached: Callable[[Step], None] = lambda _step: None,
    ) -> None:
        if source in targets:
            raise ValueError(f"root {source} is to be moved to itself; expected other roots")
        self._info = info
        self._source = source
        self._folder = info.folder(source)
        self._ledger = ledger
        self._homes = homes
        self._settings = settings or MoveSettings()
        self._targets = Targets(source, {name: info.folder(name) for name in targets}, self._settings.reserves)
        self._asked = stopped
        self._marked = is_draining(self._folder)
        self._heard = moved
        self._reached = reached
        self._view = UnionView(info)
        self._broken: set[int] = set()
        self._left_alone = 0  # samples that were revoked while they were copied
        self._renamed: set[str] = set()
        self._moved: list[_Copy] = []
        self._local = threading.local()
        self._report = MoveReport(source)

    def run(self) -> MoveReport:
        """Moves all that is committed on the root, also what is committed meanwhile.

        Raises:
            RunError: `roots_full` or `root_unusable` where no target can take the next sample; `config_conflict` where a target
                was taken out of the store; `ledger_failed`, `store_unwritable`. What was moved stays moved.
        """
        self._clear()
        with ThreadPoolExecutor(self._settings.threads, thread_name_prefix="hsx-move") as pool:
            try:
                while self._pass(pool):
                    pass
            finally:
                self._discard()
        self._report.left = self._ledger.tally().get(self._source, (0, 0))[0]
        self._report.under_way = sum(
            1 for name in _names(self._folder, self._source) if name.endswith(PARTIAL) and not name.endswith(MOVING)
        )
        return self._report

    def _pass(self, pool: ThreadPoolExecutor) -> bool:
        """Goes once through all samples of the root; True where there may be more now."""
        after, found, begun = -1, 0, self._progress()
        if not self._marked:
            with suppress(RunError):  # the disk was full, and is not any more
                begin_draining(self._folder, self._source)
                self._marked = True
        while True:
            if self._stopped():
                self._report.stopped = True
                return False
            rows = self._batch(after)
            if not rows:
                break
            after = rows[-1].index
            rows = [row for row in rows if row.index not in self._broken]
            found += len(rows)
            self._move(pool, rows)
        if found and self._progress() == begun:
            raise RunError("root_unusable", f"{found} samples on root {self._source} cannot be moved: their copies disappear")
        return found > 0

    def _progress(self) -> tuple[int, ...]:
        return (self._report.moved, self._report.damaged, self._targets.lost, self._left_alone)

    def _batch(self, after: int) -> list[CommittedRow]:
        rows = self._ledger.page(self._source, after, self._settings.batch_samples)
        nbytes = 0
        for number, row in enumerate(rows):
            nbytes += row.nbytes
            if number and nbytes > self._settings.batch_bytes:
                return rows[:number]
        return rows

    def _move(self, pool: ThreadPoolExecutor, rows: Sequence[CommittedRow]) -> None:
        """Moves one batch, and removes the originals of the one before."""
        copies = self._copy(pool, rows)
        try:
            self._name(copies)
            moved = self._switch(copies)
        finally:
            for copy in copies:
                with suppress(OSError):
                    copy.partial.unlink(missing_ok=True)
        self._reached("tidied")
        # The links are made durable before the originals go: nobody may start this job again to mend them.
        self._sync_view()
        self._discard()
        self._moved = moved
        nbytes = sum(copy.row.own_bytes for copy in moved)
        self._report.moved += len(moved)
        self._report.nbytes += nbytes
        self._heard(len(moved), nbytes)

    # --- copying

    def _copy(self, pool: ThreadPoolExecutor, rows: Sequence[CommittedRow]) -> list[_Copy]:
        """Copies a batch, as far as targets and originals allow."""
        self._targets.look()
        futures: list[tuple[CommittedRow, str, Future[Path]]] = []
        for row in rows:
            target = self._targets.place(row.nbytes)
            if target is None:
                if futures:
                    break  # what fits is moved; the next batch tells
                raise self._targets.no_room(row.nbytes)
            futures.append((row, target, pool.submit(self._copier, row, target)))
        copies = []
        for row, target, future in futures:
            try:
                copy = _Copy(row, target, future.result())
                copies.append(copy)
                self._reached("copied")
                for twin in self._link_twins(pool, copy):
                    copies.append(twin)  # one by one: what is there is cleared away, whatever comes
                    self._reached("copied")
            except ShardError as error:
                if self._ledger.row(row.index) == row:
                    self._blame(row, error)
                else:
                    self._left_alone += 1
            except CopyStoppedError:
                pass
            except RunError as error:
                self._targets.failed(target, error)
        return copies

    def _link_twins(self, pool: ThreadPoolExecutor, copy: _Copy) -> Iterator[_Copy]:
        """Copies of the samples that share the shard of one: links to its copy, or copies where there are no hard links.

        Raises RunError, CopyStoppedError.
        """
        for row in self._ledger.twins(copy.row):
            partial = copy.partial.with_name(copy_name(row))
            try:
                partial.unlink(missing_ok=True)
                os.link(copy.partial, partial)
            except OSError:
                if not self._targets.book(copy.target, row.nbytes):
                    return  # they follow with the next batch
                try:
                    partial = pool.submit(self._copier, row, copy.target).result()
                except ShardError as error:
                    self._blame(row, error)
                    continue
            yield _Copy(row, copy.target, partial)

    def _copier(self, row: CommittedRow, target: str) -> Path:
        copier: ShardCopier | None = getattr(self._local, "copier", None)
        if copier is None:
            copier = self._local.copier = ShardCopier(self._info, self._stopped)
        return copier.copy(row, target)

    def _blame(self, row: CommittedRow, error: ShardError) -> None:
        self._broken.add(row.index)
        self._report.damaged += 1
        if len(self._report.damage) < LISTED:
            self._report.damage.append((row.index, error.message))

    # --- the change of homes

    def _name(self, copies: Sequence[_Copy]) -> None:
        """Gives copies their final names as well, durably. What is there under such a name is left to `_switch`."""
        for copy in copies:
            with suppress(OSError):  # taken, or a file system without hard links
                os.link(copy.partial, copy.final)
                self._reached("linked")
        for target in {copy.target for copy in copies}:
            self._targets.sync(target)
        self._reached("named")

    def _switch(self, copies: Sequence[_Copy]) -> list[_Copy]:
        """Makes the copies the samples, where the originals still are; returns those."""
        with self._held(), self._ledger.transaction():
            self._require_known({copy.target for copy in copies})
            ready = []
            for copy in copies:
                if self._ledger.row(copy.row.index) == copy.row:
                    ready += [copy] if self._in_place(copy) else []
                else:
                    # Revoked, and perhaps committed elsewhere again. While it is pending its file may be a new attempt's.
                    self._left_alone += 1
                    self._clear_stray(copy.target, copy.row.index)
            for target in self._renamed:
                self._targets.sync(target)
            self._renamed.clear()
            for copy in ready:
                self._view.link(copy.row.index, copy.target)
                self._reached("shown")
            for target in self._targets.names:
                self._ledger.rehome([copy.row.index for copy in ready if copy.target == target], target)
            self._reached("switched")
        self._reached("committed")
        return ready

    def _require_known(self, targets: Collection[str]) -> None:
        """A run that began without a root in its job file has made the store forget it, if nothing lay there yet."""
        forgotten = [name for name in targets if name not in open_store(self._info.path).roots]
        if forgotten:
            raise RunError(
                "config_conflict",
                f"root {forgotten[0]} is none of store {self._info.path} any more: hsx run was started without it in the job "
                "file; put it back, or move to another one",
            )

    def _in_place(self, copy: _Copy) -> bool:
        """Sees to it that the copy has its final name; False where it is gone.

        Another file under that name was left by a killed writer or a killed move: the sample is committed on another root, and
        nobody may write it as long as the ledger cannot change. Called within the transaction.
        """
        try:
            with suppress(FileNotFoundError):
                if copy.final.samefile(copy.partial):
                    return True
            copy.partial.rename(copy.final)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise root_error(error, copy.target, copy.final) from error
        self._renamed.add(copy.target)
        return True

    def _discard(self) -> None:
        """Removes the originals of the last batch. A sample that was revoked since may be under way to this very name again."""
        if not self._moved:
            return
        with self._held(), self._ledger.transaction():
            for copy in self._moved:
                row = self._ledger.row(copy.row.index)
                if row is not None and (row.root, row.marker) == (copy.target, copy.row.marker):
                    self._remove(self._source, copy.row.index)
                    self._reached("discarded")
        self._moved = []

    # --- what interrupted moves left

    def _clear(self) -> None:
        """Removes partial copies, and shards of samples that lie elsewhere by the ledger, on every root that is mounted."""
        for name in self._info.roots:
            folder = self._info.folder(name)
            if name not in self._targets.names and name != self._source and not folder.is_dir():
                continue
            sweep_copies(folder)
            here = visible(folder).tolist()
            for first in range(0, len(here), CHUNK):
                with self._held(), self._ledger.transaction():
                    for index in here[first : first + CHUNK]:
                        self._clear_stray(name, index)

    def _clear_stray(self, root: str, index: int) -> None:
        row = self._ledger.row(index)
        if row is None or row.root == root or row.root not in self._info.roots:
            return
        if (self._info.folder(row.root) / shard_key(index)).exists():
            self._view.link(index, row.root)  # it may still show the copy that goes
            self._remove(root, index)

    def _remove(self, root: str, index: int) -> None:
        try:
            (self._info.folder(root) / shard_key(index)).unlink(missing_ok=True)
        except OSError as error:
            if root == self._source:
                self._report.kept += 1
                return
            raise root_error(error, root, self._info.folder(root) / shard_key(index)) from error

    # --- plumbing

    def _stopped(self) -> bool:
        return self._asked() or (self._marked and self._cancelled())

    def _cancelled(self) -> bool:
        """Whether the mark was taken away: a failing disk that does not tell is drained on."""
        try:
            return not is_draining(self._folder)
        except OSError:
            return False

    def _sync_view(self) -> None:
        try:
            sync_folder(self._info.path / HIDDEN_STATES)
        except OSError as error:
            raise store_error(error, self._info.path / HIDDEN_STATES) from error

    @contextmanager
    def _held(self) -> Iterator[None]:
        give = self._homes.take()
        try:
            yield
        finally:
            give()


def sweep_copies(folder: Path) -> None:
    """Removes the partial copies that killed moves left in a root's folder, as far as they can be. `MOVE_LOCK` is held."""
    with suppress(OSError):
        for path in list(folder.iterdir()):
            if path.name.endswith(MOVING):
                path.unlink(missing_ok=True)


def _names(folder: Path, root: str) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except OSError as error:
        raise root_error(error, root, folder) from error
