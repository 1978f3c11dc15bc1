"""Read-only views of a ledger, for commands and status; safe beside a running job."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from hsx.errors import RunError
from hsx.records import BadRow, CommittedRow, Counts
from hsx.stores.ledger_schema import COMMITTED, VIOLATIONS_BY_INVARIANT, connect, count, facts_of, translated

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from types import TracebackType

PAGE_ROWS: Final = 1000
PAUSE_S: Final = 60.0
"""Two commits further apart belong to two runs, or have a restart of the server between them."""


@dataclass(frozen=True, slots=True)
class QuarantinedRow:
    """One quarantined sample: its last marker, the reason (an invariant's name or an error kind) and the evidence."""

    index: int
    tokens: int
    marker: str
    epoch: str
    reason: str
    evidence: str
    attempts: int
    failures: int


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The ledger's whole entry of one sample; fields of a commit are None until there is one."""

    index: int
    tokens: int
    state: str
    attempts: int
    failures: int
    marker: str | None
    epoch: str | None
    sequence: int | None
    root: str | None
    nbytes: int | None
    crc32c: int | None
    timings: dict[str, float]
    adopted: bool
    committed_at: float | None
    reason: str | None
    evidence: str | None


@dataclass(frozen=True, slots=True)
class EpochRow:
    """One life of a server.

    Attributes:
        epoch: its id.
        began: when, in Unix seconds.
        ended: when it was voided; None where it was not.
        reason: the invariant, or the kind of error, that voided it.
        evidence: what was expected and what was found.
        requeued: samples that went back to the queue for it.
        vouched: capture number up to which a sound canary vouches for its dumps.
    """

    epoch: str
    began: float
    ended: float | None
    reason: str | None
    evidence: str | None
    requeued: tuple[int, ...]
    vouched: int


@dataclass(frozen=True, slots=True)
class RevocationRow:
    """Samples of one epoch that were committed and then taken back, and why; `at` in Unix seconds."""

    at: float
    epoch: str
    invariant: str
    evidence: str
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ViolationRow:
    """One violation; `marker` is None where it speaks of no single sample; `at` in Unix seconds."""

    at: float
    epoch: str
    marker: str | None
    invariant: str
    evidence: str


@dataclass(frozen=True, slots=True)
class PlaceRow:
    """What is committed to one root: samples, bytes of their shards (shared ones once), when the last was (Unix seconds)."""

    samples: int
    nbytes: int
    last: float


class LedgerReader:
    """Reads a ledger. Iterators stream, so memory does not grow with the job.

    Args:
        path: the ledger file.

    Raises:
        RunError: kind `ledger_failed`, from here and from every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path, read_only=True)
        self.run, self.fingerprint = facts_of(self._connection, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._connection.close()

    def counts(self) -> Counts:
        """The job's totals."""
        with translated(self._path):
            return count(self._connection)

    def fact(self, key: str) -> str | None:
        """The fact recorded under `key`; None where there is none."""
        with translated(self._path):
            row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def sample(self, index: int) -> SampleRow:
        """One sample's entry. Raises RunError `sample_unknown`."""
        query = (
            "SELECT idx, tokens, state, attempts, failures, marker, epoch, sequence, root, nbytes, crc32c, timings, adopted, "
            "committed_at, reason, evidence FROM samples WHERE idx = ?"
        )
        with translated(self._path):
            row: Any = self._connection.execute(query, (index,)).fetchone()
        if row is None:
            raise RunError("sample_unknown", f"ledger {self._path} has no sample {index}")
        fields = list(row)
        fields[11] = json.loads(fields[11] or "{}")
        fields[12] = bool(fields[12])
        return SampleRow(*fields)

    def committed(self, since: float | None = None) -> Iterator[CommittedRow]:
        """Every committed sample, in index order.

        Read page by page, each as the ledger is at that time: a reader that takes hours would otherwise keep the log of a run
        from ever being emptied.

        Args:
            since: only what was committed after this, in Unix seconds; None: all.
        """
        query = f"{COMMITTED} AND idx > ? AND committed_at > ? ORDER BY idx LIMIT {PAGE_ROWS:d}"
        after = -1
        while True:
            with translated(self._path):
                page = self._connection.execute(query, (after, float("-inf") if since is None else since)).fetchall()
            for row in page:
                yield CommittedRow(*row)
            if len(page) < PAGE_ROWS:
                return
            after = page[-1][0]

    def twins(self, index: int) -> list[int]:
        """The other samples with the very same prompt that share a prefill with this one, in order."""
        query = "SELECT idx FROM samples WHERE same_as = (SELECT same_as FROM samples WHERE idx = ?) AND idx != ? ORDER BY idx"
        with translated(self._path):
            return [idx for (idx,) in self._connection.execute(query, (index, index))]

    def followers(self) -> Iterator[tuple[int, int]]:
        """(index, tokens) of every pending sample that will be committed with another one, in no order."""
        query = (
            "SELECT idx, tokens FROM samples WHERE state = 'pending' AND same_as IS NOT NULL AND EXISTS (SELECT 1 "
            "FROM samples AS twin WHERE twin.same_as = samples.same_as AND twin.idx < samples.idx AND twin.state = 'pending')"
        )
        with translated(self._path):
            yield from self._connection.execute(query)

    def row(self, index: int) -> CommittedRow | None:
        """One sample as it is committed now; None where it is not. May be called in between rows of an iterator."""
        with translated(self._path):
            row = self._connection.execute(f"{COMMITTED} AND idx = ?", (index,)).fetchone()
        return None if row is None else CommittedRow(*row)

    def quarantined(self) -> Iterator[QuarantinedRow]:
        """Every quarantined sample, in index order."""
        query = (
            "SELECT idx, tokens, ifnull(marker, ''), ifnull(epoch, ''), ifnull(reason, ''), ifnull(evidence, ''), attempts, "
            "failures FROM samples WHERE state = 'quarantined' ORDER BY idx"
        )
        with translated(self._path):
            for row in self._connection.execute(query):
                yield QuarantinedRow(*row)

    def quarantined_by_reason(self) -> dict[str, int]:
        """How many samples are quarantined, by invariant or error kind."""
        query = "SELECT ifnull(reason, ''), count(*) FROM samples WHERE state = 'quarantined' GROUP BY 1 ORDER BY 1"
        with translated(self._path):
            return dict(self._connection.execute(query).fetchall())

    def committed_by_root(self) -> dict[str, PlaceRow]:
        """What is committed to each root that has anything. Reads all rows: seconds, where there are millions."""
        query = (
            "SELECT root, count(*), sum(nbytes * (1 - shared)), max(committed_at) FROM samples WHERE state = 'committed' "
            "GROUP BY root ORDER BY root"
        )
        with translated(self._path):
            return {root: PlaceRow(*values) for root, *values in self._connection.execute(query)}

    def rejected(self) -> Iterator[BadRow]:
        """Every dataset row that was rejected, in line order."""
        with translated(self._path):
            for row in self._connection.execute("SELECT line, sample_id, reason, message FROM rejected ORDER BY line"):
                yield BadRow(*row)

    def epochs(self) -> list[EpochRow]:
        """The lives of the server, oldest first."""
        with translated(self._path):
            # The streams of further DP ranks begin and end with their epoch.
            query = (
                "SELECT epoch, began, ended, reason, evidence, ifnull(requeued, '[]'), vouched FROM epochs "
                "WHERE epoch NOT GLOB '*.*' ORDER BY began"
            )
            rows = self._connection.execute(query).fetchall()
        return [
            EpochRow(epoch, began, ended, reason, evidence, tuple(json.loads(requeued)), vouched)
            for epoch, began, ended, reason, evidence, requeued, vouched in rows
        ]

    def revocations(self) -> list[RevocationRow]:
        """What was committed and taken back again, oldest first."""
        with translated(self._path):
            query = "SELECT at, epoch, invariant, evidence, samples FROM revocations ORDER BY id"
            rows = self._connection.execute(query).fetchall()
        return [RevocationRow(at, epoch, name, why, tuple(json.loads(samples))) for at, epoch, name, why, samples in rows]

    def violations(self) -> Iterator[ViolationRow]:
        """Every violation of the job, oldest first."""
        with translated(self._path):
            for row in self._connection.execute("SELECT at, epoch, marker, invariant, evidence FROM violations ORDER BY id"):
                yield ViolationRow(*row)

    def violations_by_invariant(self) -> dict[str, int]:
        """How often each invariant did not hold, in the whole job, by its name; those that always held are absent."""
        with translated(self._path):
            return dict(self._connection.execute(VIOLATIONS_BY_INVARIANT).fetchall())

    def failures_by_reason(self) -> dict[str, int]:
        """How many attempts failed, by invariant or error kind."""
        with translated(self._path):
            return dict(self._connection.execute("SELECT reason, count(*) FROM failures GROUP BY reason ORDER BY reason"))

    def longest(self) -> int:
        """Tokens of the longest sample."""
        with translated(self._path):
            known = self._connection.execute("SELECT value FROM meta WHERE key = 'longest'").fetchone()
            # A ledger of an older version does not know it.
            return int((known or self._connection.execute("SELECT max(tokens) FROM samples").fetchone())[0])

    def tokens_per_second(self) -> float | None:
        """Prefill rate so far: the tokens of each group commit over the time since the one before; None with too few.

        Gaps of `PAUSE_S` and more are left out with the commit that ends them: hsx was not running, or the server was down.
        """
        query = (
            "SELECT sum(tokens), sum(gap) FROM ("
            "SELECT sum(tokens) AS tokens, committed_at - lag(committed_at) OVER (ORDER BY committed_at) AS gap "
            "FROM samples WHERE state = 'committed' AND NOT shared GROUP BY committed_at) WHERE gap < ?"
        )
        with translated(self._path):
            tokens, seconds = self._connection.execute(query, (PAUSE_S,)).fetchone()
        return tokens / seconds if seconds else None
