"""Proves a store: re-reads its shards and compares them with the ledger, the token arrays and the content invariants.

Damage is collected, not raised: one report names all of it. Safe beside a running job, because whatever can be seen is listed
before the ledger is read: a shard that is listed and not in the ledger was not committed, which is no damage.
"""

from __future__ import annotations

import threading
import zlib
from array import array
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core import invariants
from hsx.core.dump import DumpHeader
from hsx.core.layout import shard_key
from hsx.core.marker import Marker
from hsx.dumps.measure import measure
from hsx.errors import RunError
from hsx.stores.reader import Store
from hsx.stores.shard_reader import PROBLEMS, ShardError, ShardFile
from hsx.stores.view import UnionView, visible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from os import PathLike
    from pathlib import Path

    from hsx.core.invariants import Violation
    from hsx.ports import CommittedRow

LISTED: Final = 1000
"""So many damages and uncommitted samples are listed; all are counted."""

KINDS: Final[dict[str, str]] = {
    **{str(problem): meaning for problem, meaning in PROBLEMS.items()},
    "root": "a root of the store cannot be listed, or the ledger names one that the store does not know",
    "ledger": "the ledger has another number of tokens for the sample than the store",
    "size": "the shard file has another size than the ledger says",
    "crc32c": "the payload has another crc32c than the ledger says: whole, but not what was committed",
    "link": "the union view does not show the committed shard; the next `hsx run` repairs it",
    "uncommitted_visible": "the union view shows a sample that the ledger does not hold as committed",
    "finite": "there are NaN or infinite values",
    "nonzero_rows": "there are all-zero rows",
    "not_repeated": "states are copies of each other, or all rows are equal",
}


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        index: the sample; None where it concerns a whole root.
        sample_id: its id; "" where it concerns a whole root.
        kind: one of `KINDS`.
        message: what was expected and what was found.
    """

    index: int | None
    sample_id: str
    kind: str
    message: str


@dataclass(slots=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        store: path of the store.
        samples: samples of the job.
        committed: those that the ledger (without one: the union view) holds as committed.
        read: those whose shards were read and proved.
        tokens: tokens read.
        nbytes: bytes of the shard files that were read.
        uncommitted: shards without a committed row: left by attempts under way or cut short; no damage.
        uncommitted_indices: the first `LISTED` of them.
        damaged: number of damages.
        damage: the first `LISTED` of them, in the order found.
    """

    store: str
    samples: int
    committed: int = 0
    read: int = 0
    tokens: int = 0
    nbytes: int = 0
    uncommitted: int = 0
    uncommitted_indices: list[int] = field(default_factory=list)
    damaged: int = 0
    damage: list[Damage] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Nothing is damaged."""
        return self.damaged == 0

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {"ok": self.ok, **asdict(self)}


@dataclass(frozen=True, slots=True)
class _Task:
    index: int
    path: Path
    row: CommittedRow | None


@dataclass(frozen=True, slots=True)
class _Result:
    tokens: int
    nbytes: int
    damage: list[Damage]


def verify(
    store_path: str | PathLike[str],
    ledger: Iterable[CommittedRow] | None = None,
    *,
    fraction: float = 1.0,
    seed: int = 0,
    threads: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Verifies a store.

    Args:
        store_path: the store.
        ledger: the committed rows in order of their index, streamed; None to verify what the union view shows, without ledger.
        fraction: share of the samples whose shards are read, chosen by `seed`, besides the first. All are looked up, sized
            against the ledger, and their links checked, whatever the fraction.
        seed: another seed reads another share.
        threads: reading threads.
        progress: called with (samples done, samples to do at most), from this thread.

    Raises:
        RunError: `store_invalid` where there is no store to verify; damage is reported instead.
    """
    return _Verifier(Store(store_path), fraction, seed, threads, progress).run(ledger)


class _Verifier:
    def __init__(
        self, store: Store, fraction: float, seed: int, threads: int, progress: Callable[[int, int], None] | None
    ) -> None:
        self._store = store
        self._layout = store.info.layout
        self._view = UnionView(store.info)
        self._fraction = fraction
        self._seed = seed
        self._threads = threads
        self._progress = progress
        self._local = threading.local()
        self._report = VerifyReport(store=str(store.path), samples=len(store))

    def run(self, ledger: Iterable[CommittedRow] | None) -> VerifyReport:
        report = self._report
        shown = self._view.indices()
        if ledger is None:
            self._read(self._shown(shown))
            return report
        on_roots = {name: self._list(name) for name in self._store.info.roots}
        committed = {name: array("q") for name in self._store.info.roots}
        self._read(self._rows(ledger, committed))
        everywhere = np.concatenate([np.frombuffer(a, np.int64) for a in committed.values()] or [np.empty(0, np.int64)])
        for index in np.setdiff1d(shown, everywhere):
            self._damage(int(index), "uncommitted_visible", "the union view shows it; the ledger has no commit of it")
        for name, present in on_roots.items():
            orphans = np.setdiff1d(present, np.frombuffer(committed[name], np.int64))
            report.uncommitted += len(orphans)
            report.uncommitted_indices += [int(i) for i in orphans[: LISTED - len(report.uncommitted_indices)]]
        return report

    def _shown(self, shown: np.typing.NDArray[np.int64]) -> Iterator[_Task]:
        for index in map(int, shown):
            self._report.committed += 1
            if index >= len(self._store):
                self._damage(index, "uncommitted_visible", f"the union view shows it; the store has {len(self._store)} samples")
                continue
            yield _Task(index, self._view.target(index) or self._view.path(index), None)

    def _rows(self, ledger: Iterable[CommittedRow], committed: dict[str, array[int]]) -> Iterator[_Task]:
        for row in ledger:
            self._report.committed += 1
            if row.root not in committed or not 0 <= row.index < len(self._store):
                where = f"sample {row.index} on root {row.root!r}"
                self._damage(row.index, "root", f"the ledger has {where}; the store has no such sample or root")
                continue
            committed[row.root].append(row.index)
            path = self._store.info.folder(row.root) / shard_key(row.index)
            if self._view.target(row.index) != path:
                self._damage(row.index, "link", f"the link points to {self._view.target(row.index)}; expected {path}")
            if row.tokens != self._store.tokens(row.index):
                self._damage(
                    row.index, "ledger", f"the ledger has {row.tokens} tokens; expected {self._store.tokens(row.index)}"
                )
            yield _Task(row.index, path, row)

    def _list(self, root: str) -> np.typing.NDArray[np.int64]:
        try:
            return visible(self._store.info.folder(root))
        except RunError as error:
            self._damage(None, "root", f"root {root}: {error.message}")
            return np.empty(0, np.int64)

    def _chosen(self, tasks: Iterator[_Task]) -> Iterator[tuple[_Task, bool]]:
        """Each task, with whether its shard is to be read: the first one always, others as seed and index decide."""
        limit = self._fraction * 2**32
        for number, task in enumerate(tasks):
            yield task, number == 0 or zlib.crc32(f"{self._seed}/{task.index}".encode()) < limit

    def _read(self, tasks: Iterator[_Task]) -> None:
        """Runs the tasks in threads, a few ahead of each other, so that memory is bounded by the largest samples."""
        pending: set[Future[_Result]] = set()
        with ThreadPoolExecutor(self._threads, thread_name_prefix="hsx-verify") as pool:
            for task, chosen in self._chosen(tasks):
                if not chosen:
                    for kind, message in self._look(task):
                        self._damage(task.index, kind, message)
                    continue
                pending.add(pool.submit(self._prove, task))
                if len(pending) >= 2 * self._threads:
                    pending = self._collect(pending, FIRST_COMPLETED)
            self._collect(pending, "ALL_COMPLETED")

    def _collect(self, pending: set[Future[_Result]], until: str) -> set[Future[_Result]]:
        done, rest = wait(pending, return_when=until)
        for future in done:
            result = future.result()
            self._report.read += 1
            self._report.tokens += result.tokens
            self._report.nbytes += result.nbytes
            for damage in result.damage:
                self._add(damage)
            if self._progress is not None:
                self._progress(self._report.read, self._report.samples)
        return rest

    def _look(self, task: _Task) -> list[tuple[str, str]]:
        """What can be said of a shard without reading it: (kind, message) of each damage."""
        try:
            size = task.path.stat().st_size
        except OSError as error:
            return [
                ("missing" if isinstance(error, FileNotFoundError) else "unreadable", f"shard {task.path}: {error.strerror}")
            ]
        if task.row is not None and size != task.row.nbytes:
            return [("size", f"shard {task.path} has {size} bytes; expected {task.row.nbytes}")]
        return []

    def _prove(self, task: _Task) -> _Result:
        """Reads one shard and judges it. In a worker thread: touches no shared state."""
        tokens = self._store.tokens(task.index)
        found = self._look(task)
        size = 0
        try:
            with ShardFile(task.path, self._layout, tokens) as shard:
                size = shard.nbytes
                states, crc = shard.read_all(self._buffer(tokens))
        except ShardError as error:
            if error.problem not in {kind for kind, _ in found}:
                found.append((error.problem, error.message))
        else:
            if task.row is not None and crc != task.row.crc32c:
                found.append(("crc32c", f"shard {task.path} holds payload {crc:08x}; expected {task.row.crc32c:08x}"))
            found += [(v.invariant, f"shard {task.path}: {v.evidence}") for v in self._content(task.index, states)]
        sample_id = self._store.sample_id(task.index)
        return _Result(tokens, size, [Damage(task.index, sample_id, kind, message) for kind, message in found])

    def _content(self, index: int, states: np.typing.NDArray[np.uint16]) -> list[Violation]:
        """The content invariants, the same that were judged before the commit."""
        ids = self._store.input_ids_numpy(index)
        marker = Marker("00000000", index, 1, len(states))  # a stand-in: identity is not judged here
        spec, width = self._store.info.spec, self._store.hidden_size
        header = DumpHeader(marker, "", 1, spec, width, "", "")
        evidence = invariants.Evidence(
            marker=marker,
            epoch="",
            spec=spec,
            hidden_size=width,
            dump=header,
            content=measure(states, ids, ids),
        )
        judges = (invariants.finite, invariants.nonzero_rows, invariants.not_repeated)
        return [violation for judge in judges if (violation := judge(evidence)) is not None]

    def _buffer(self, tokens: int) -> np.typing.NDArray[np.uint16]:
        """This thread's reading buffer, grown to the largest sample it met."""
        size = tokens * self._layout.states * self._layout.hidden_size
        buffer: np.typing.NDArray[np.uint16] | None = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._local.buffer = np.empty(size, np.uint16)
        return buffer[:size].reshape(tokens, self._layout.states, self._layout.hidden_size)

    def _damage(self, index: int | None, kind: str, message: str) -> None:
        known = index is not None and 0 <= index < len(self._store)
        self._add(Damage(index, self._store.sample_id(index) if known and index is not None else "", kind, message))

    def _add(self, damage: Damage) -> None:
        self._report.damaged += 1
        if len(self._report.damage) < LISTED:
            self._report.damage.append(damage)
