"""Proves a store: re-reads its shards and compares them with the ledger, the token arrays and the content invariants.

Damage is collected, not raised: one report names all of it. Safe beside a running job and a running move, because whatever can
be seen is listed before the ledger is read, and because nothing is called damaged before the ledger was asked again.
"""

from __future__ import annotations

import threading
import time
import zlib
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from hsx.errors import RunError
from hsx.stores.reader import Store
from hsx.stores.seal import manifest_faults, read_seal
from hsx.stores.view import UnionView, visible
from hsx.verify.readers import RootReaders
from hsx.verify.report import LISTED, Damage, Reading, VerifyReport
from hsx.verify.shard import READERS, Expected, Finding, Proof, ShardProver
from hsx.verify.sources import Folders, LedgerSource, SealSource, ViewSource, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from os import PathLike

    from hsx.records import CommittedRow
    from hsx.verify.sources import Rows, Source
    from hsx.verify.state import VerifyState

SETTLE_S: Final = 1.0
"""A link follows its commit at once; one that is not there is looked for again after this."""
TURNS: Final = 5
"""So often a sample is read again that moved, or was extracted again, while it was being read."""


def verify(
    store_path: str | PathLike[str],
    ledger: Iterable[CommittedRow] | Rows | None = None,
    *,
    fraction: float = 1.0,
    seed: int = 0,
    threads: int = 2,
    watch: Callable[[Reading], None] | None = None,
    on_damage: Callable[[Damage], None] | None = None,
    since: float | None = None,
    cold: bool = True,
    state: VerifyState | None = None,
    roots: Mapping[str, str | PathLike[str]] | None = None,
) -> VerifyReport:
    """Verifies a store.

    Args:
        store_path: the store.
        ledger: a ledger's reader, which is asked again before anything is called damaged; or committed rows, which are held in
            memory; or None: a sealed store is held against its own arrays, another against its union view.
        fraction: share of the samples whose shards are read, chosen by `seed`, besides the first. All are looked up, sized
            against the ledger, and their links checked, whatever the fraction.
        seed: another seed reads another share.
        threads: of each root, that compute at a time; `READERS` times as many read, each a piece of `PIECE_BYTES` in memory.
        watch: called with each sample that was read, from this thread.
        on_damage: called with each damage, those that the report does not list included, from this thread.
        since: only samples that were committed after this, in Unix seconds. Needs a ledger's reader.
        cold: read from the disks and not from the kernel's cache, which proves nothing of them.
        state: where proved samples are noted, and which were proved before.
        roots: where roots are mounted now, by name, if not where the store says.

    Raises:
        RunError: `store_invalid` where there is no store to verify, or its seal is torn; `root_unusable` where `roots` names
            what is no root of it. Damage is reported instead.
    """
    store = Store(store_path, roots=roots)
    verifier = _Verifier(store, threads, on_damage, state, cold=cold)
    began = time.monotonic()
    verifier.run(verifier.source(ledger, since), _Choice(fraction, seed), watch)
    verifier.report.seconds = time.monotonic() - began
    return verifier.report


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which shards are read: the first one always, others as seed and index decide."""

    fraction: float
    seed: int

    def __call__(self, number: int, index: int) -> bool:
        return number == 0 or zlib.crc32(f"{self.seed}/{index}".encode()) < self.fraction * 2**32


class _Work:
    """Which samples of one root are to be read, in 8 bytes each."""

    def __init__(self) -> None:
        self.committed = array("q")
        self.chosen = array("q")


class _Verifier:
    def __init__(
        self,
        store: Store,
        threads: int,
        on_damage: Callable[[Damage], None] | None,
        state: VerifyState | None,
        *,
        cold: bool,
    ) -> None:
        self._store = store
        self._folders = Folders(store)
        self._view = UnionView(store.info)
        self._on_damage = on_damage
        self._state = state
        self._readers: RootReaders[tuple[Expected, Proof] | int] = RootReaders(self._prove, threads * READERS)
        self._threads = threads
        self._turns: dict[str, threading.Semaphore] = {}
        self._prover = ShardProver(store, cold=cold, stopped=lambda: self._readers.stopped)
        self._shown = self._view.indices()
        self._links: list[int] = []
        self._nbytes_total = 0
        self.report = VerifyReport(store=str(store.path), samples=len(store), sealed=store.info.sealed is not None)

    def source(self, ledger: Iterable[CommittedRow] | Rows | None, since: float | None) -> Source:
        """What the store is held against."""
        if ledger is not None:
            return LedgerSource(self._folders, rows_of(ledger), since)
        if self._store.info.sealed is not None:
            return SealSource(self._store, self._folders, read_seal(self._store.info))
        return ViewSource(self._store, self._folders, self._view, self._shown)

    def run(
        self,
        source: Source,
        choice: _Choice,
        watch: Callable[[Reading], None] | None,
    ) -> None:
        self._source = source
        if self.report.sealed:
            for fault in manifest_faults(self._store.info, self._folders.all()):
                self._damage(None, "manifest", fault)
        on_roots = {name: self._list(name) for name in self._store.info.roots} if source.whole else {}
        work = self._survey(choice)
        total = sum(len(of_root.chosen) for of_root in work.values())
        began = time.monotonic()
        self._turns = {name: threading.Semaphore(self._threads) for name in work}
        for outcome in self._readers.run({name: of_root.chosen for name, of_root in work.items()}):
            if isinstance(outcome, int):
                self.report.committed -= 1  # the job has taken it back since
                continue
            self._collect(*outcome)
            if watch is not None:
                seconds = time.monotonic() - began
                report = self.report
                watch(Reading(report.read, total, report.nbytes, self._nbytes_total, report.damaged, seconds))
        of_roots = {name: np.frombuffer(of_root.committed, np.int64) for name, of_root in work.items() if of_root.committed}
        self._judge_view(np.concatenate([*of_roots.values(), np.empty(0, np.int64)]))
        for name, present in on_roots.items():
            orphans = np.setdiff1d(present, of_roots.get(name, np.empty(0, np.int64)))
            for index in orphans.tolist():
                now = self._source.now(index) if self._source.changing else None
                if now is None or now.root != name:
                    self.report.uncommitted += 1
                    if len(self.report.uncommitted_indices) < LISTED:
                        self.report.uncommitted_indices.append(index)

    def _survey(self, choice: _Choice) -> dict[str, _Work]:
        """Looks at every committed sample without reading it, and gives each root its work."""
        work: dict[str, _Work] = {name: _Work() for name in self._store.info.roots}
        number = 0
        for expected in self._source.expected():
            self.report.committed += 1
            if not self._known(expected):
                continue
            of_root = work.setdefault(expected.root, _Work())
            of_root.committed.append(expected.index)
            if self._source.linked and not self._linked(expected):
                self._links.append(expected.index)
            proved = self._state is not None and self._state.proved(expected)
            if choice(number, expected.index) and not proved:
                of_root.chosen.append(expected.index)
                self._nbytes_total += expected.nbytes or self._store.info.layout.file_bytes(expected.tokens)
            else:
                self.report.resumed += proved
                self._conclude(expected, self._prover.look(expected), self._prover.look)
            number += 1
        return work

    def _known(self, expected: Expected) -> bool:
        """Whether the store has such a sample, root and length; else that is the damage."""
        index, tokens = expected.index, expected.tokens
        if not 0 <= index < len(self._store):
            kind = "root" if self._source.whole else "uncommitted_visible"
            self._damage(index, kind, f"sample {index} is committed or shown; the store has {len(self._store)} samples")
            return False
        if self._source.whole and expected.root not in self._store.info.roots:
            names = ", ".join(self._store.info.roots)
            self._damage(index, "root", f"the ledger has sample {index} on root {expected.root!r}; the store has {names}")
            return False
        if tokens != self._store.tokens(index):
            self._damage(index, "ledger", f"the ledger has {tokens} tokens; expected {self._store.tokens(index)}")
        return True

    def _prove(self, root: str, index: int) -> tuple[Expected, Proof] | int:
        """In a reading thread: the sample as it is committed now, and what its shard is; its index where it is not any more."""
        expected = self._source.now(index)
        return index if expected is None else (expected, self._prover.prove(self._sized(expected), self._turns[root]))

    def _sized(self, expected: Expected) -> Expected:
        """With the length that the token arrays have: a ledger that says otherwise is told of in the survey."""
        tokens = self._store.tokens(expected.index)
        if tokens == expected.tokens:
            return expected
        return Expected(expected.index, tokens, expected.root, expected.path, expected.nbytes, expected.crc32c, expected.marker)

    def _collect(self, expected: Expected, proof: Proof) -> None:
        """Takes the result of one reading."""
        nbytes = proof.nbytes

        def read(again: Expected) -> Sequence[Finding]:
            nonlocal nbytes
            proof = self._prover.prove(self._sized(again))
            nbytes = proof.nbytes
            return proof.findings

        proved = self._conclude(expected, proof.findings, read)
        if proved is None:
            return
        self.report.read += 1
        self.report.tokens += self._store.tokens(expected.index)
        self.report.nbytes += nbytes
        if self._state is not None and proved:
            self._state.note(proved)

    def _conclude(
        self, expected: Expected, findings: Sequence[Finding], judge: Callable[[Expected], Sequence[Finding]]
    ) -> Expected | Literal[False] | None:
        """Tells of what was found, unless the sample is somewhere else by now: it is judged there instead.

        Returns what was found sound; False where it was not; None where the sample is not committed any more.
        """
        for _ in range(TURNS):
            if not findings:
                return expected
            now = self._source.now(expected.index)
            if now is None:
                self.report.committed -= 1
                return None
            if now == expected:
                break
            expected, findings = now, judge(now)
        for finding in findings:
            self._damage(expected.index, finding.kind, finding.message)
        return False if findings else expected

    def _judge_view(self, committed: np.typing.NDArray[np.int64]) -> None:
        """Links that are wrong, or that nothing was committed for. A job that runs has a moment to put them right."""
        wrong = [index for index in self._links if self._wrong(index)]
        extra = np.setdiff1d(self._shown, committed).tolist() if self._source.whole else []
        extra = [index for index in extra if self._uncommitted(index)]
        if (wrong or extra) and self._source.changing:
            time.sleep(SETTLE_S)
        for index in wrong:
            if expected := self._wrong(index):
                self._damage(index, "link", f"the link points to {self._view.target(index)}; expected {expected.path}")
        for index in extra:
            if self._uncommitted(index):
                self._damage(index, "uncommitted_visible", "the union view shows it; the ledger has no commit of it")

    def _wrong(self, index: int) -> Expected | None:
        """What the link should point to, where it points elsewhere."""
        expected = self._source.now(index)
        return expected if expected is not None and not self._linked(expected) else None

    def _linked(self, expected: Expected) -> bool:
        """Whether the view shows a shard where it is, or where it was when the link was made."""
        recorded = self._store.info.folder(expected.root) / expected.path.name
        return self._view.target(expected.index) in (expected.path, recorded)

    def _uncommitted(self, index: int) -> bool:
        """Whether the view shows a sample that is not committed."""
        path = self._view.path(index)
        return self._source.now(index) is None and (path.is_symlink() or path.exists())

    def _list(self, root: str) -> np.typing.NDArray[np.int64]:
        try:
            return visible(self._folders.of(root))
        except RunError as error:
            self._damage(None, "root", f"root {root}: {error.message}")
            return np.empty(0, np.int64)

    def _damage(self, index: int | None, kind: str, message: str) -> None:
        known = index is not None and 0 <= index < len(self._store)
        sample_id = self._store.sample_id(index) if known and index is not None else ""
        damage = Damage(index, sample_id, kind, message)
        self.report.damaged += 1
        if len(self.report.damage) < LISTED:
            self.report.damage.append(damage)
        if self._on_damage is not None:
            self._on_damage(damage)
