"""A ledger in few numbers, for the report: whatever grows with the samples is added up by SQLite, never held here."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import translated

if TYPE_CHECKING:
    from collections.abc import Iterator

SLICES: Final = 240
"""At most so many slices of a timeline, and one more for what is left."""
FEWEST_SLICES: Final = 24
SAMPLES_PER_SLICE: Final = 8
"""With fewer samples to a slice, its rate would be that of single samples' lengths: then slices are longer."""
STEPS: Final = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Seconds that a slice may be long; then whole days."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What was committed within one slice of time; `tokens` and `nbytes` without samples that share another one's shard."""

    number: int
    samples: int
    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """Commits over time, in slices of `step` seconds from `began` on.

    Attributes:
        began: when the first server or the first commit of the job was recorded, whichever is earlier, in Unix seconds.
        ended: the last commit, in Unix seconds.
        step: length of a slice in seconds.
        slices: those in which anything was committed, in order.
        undated: committed samples without a time, as of a ledger that was built again.
    """

    began: float
    ended: float
    step: float
    slices: tuple[Slice, ...]
    undated: int


@dataclass(frozen=True, slots=True)
class RootTally:
    """Committed samples whose shards lie on one root; `shared` of them are links to another one's, and add no bytes."""

    root: str
    samples: int
    tokens: int
    nbytes: int
    shared: int


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a server, or one rank's stream of it.

    Attributes:
        epoch: its id.
        began: when, in Unix seconds.
        ended: when it was voided; None where it was not.
        reason: the invariant, or the kind of error, that voided it.
        evidence: what was expected and what was found.
        requeued: how many samples went back to the queue for it.
        committed: samples that are committed out of it.
        unvouched: of these, those that no sound canary vouches for.
        stream: whether it is the stream of a further rank.
    """

    epoch: str
    began: float
    ended: float | None
    reason: str | None
    evidence: str | None
    requeued: int
    committed: int
    unvouched: int
    stream: bool


@dataclass(frozen=True, slots=True)
class TakenBack:
    """One revocation: when (Unix seconds), of which epoch, why, and how many samples."""

    at: float
    epoch: str
    invariant: str
    evidence: str
    samples: int


class LedgerSummary(LedgerReader):
    """A reader that also adds up. Raises RunError `ledger_failed`, as that does."""

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Within the block every number is of one moment, whatever a run commits meanwhile; it holds no writer up."""
        with translated(self._path):
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            with translated(self._path):
                self._connection.execute("ROLLBACK")

    def lengths(self) -> list[tuple[int, str, int]]:
        """(tokens, state, samples) for each length that occurs: as many rows as there are lengths."""
        with translated(self._path):
            return self._connection.execute(
                "SELECT tokens, state, count(*) FROM samples GROUP BY tokens, state ORDER BY tokens, state"
            ).fetchall()

    def timeline(self) -> Timeline | None:
        """Commits over time; None where nothing is committed with a time."""
        span = (
            "SELECT min(committed_at), max(committed_at), count(committed_at), count(*) FROM samples WHERE state = 'committed'"
        )
        with translated(self._path):
            first, last, dated, committed = self._connection.execute(span).fetchone()
            if first is None:
                return None
            (booted,) = self._connection.execute("SELECT min(began) FROM epochs").fetchone()
            began = first if booted is None else min(first, booted)
            step = slice_seconds(last - began, dated)
            rows = self._connection.execute(
                "SELECT CAST((committed_at - :began) / :step AS INTEGER), count(*), sum(tokens * (1 - shared)), "
                "sum(nbytes * (1 - shared)) FROM samples WHERE state = 'committed' AND committed_at IS NOT NULL "
                "GROUP BY 1 ORDER BY 1",
                {"began": began, "step": step},
            ).fetchall()
        return Timeline(began, last, step, tuple(Slice(*row) for row in rows), committed - dated)

    def by_root(self) -> list[RootTally]:
        """What is committed on each root, by name."""
        query = (
            "SELECT ifnull(root, ''), count(*), sum(tokens), ifnull(sum(nbytes * (1 - shared)), 0), sum(shared) FROM samples "
            "WHERE state = 'committed' GROUP BY 1 ORDER BY 1"
        )
        with translated(self._path):
            return [RootTally(*row) for row in self._connection.execute(query)]

    def lives(self) -> list[Life]:
        """The lives of the server, and the streams of their ranks, oldest first."""
        query = (
            "WITH captured AS (SELECT s.epoch AS epoch, count(*) AS committed, sum(s.sequence > ifnull(e.vouched, 0)) AS "
            "doubtful FROM samples s LEFT JOIN epochs e ON e.epoch = s.epoch WHERE s.state = 'committed' GROUP BY s.epoch) "
            "SELECT e.epoch, e.began, e.ended, e.reason, e.evidence, ifnull(json_array_length(e.requeued), 0), "
            "ifnull(c.committed, 0), ifnull(c.doubtful, 0), e.epoch GLOB '*.*' "
            "FROM epochs e LEFT JOIN captured c ON c.epoch = e.epoch ORDER BY e.began, e.epoch"
        )
        with translated(self._path):
            rows = self._connection.execute(query).fetchall()
        return [Life(*fields) for fields in ([*row[:-1], bool(row[-1])] for row in rows)]

    def taken_back(self) -> list[TakenBack]:
        """Revocations, oldest first, without the indices of their samples."""
        query = "SELECT at, epoch, invariant, evidence, json_array_length(samples) FROM revocations ORDER BY id"
        with translated(self._path):
            return [TakenBack(*row) for row in self._connection.execute(query)]

    def rejected_by_reason(self) -> dict[str, int]:
        """How many rows of the dataset are no samples, by reason."""
        with translated(self._path):
            return dict(self._connection.execute("SELECT reason, count(*) FROM rejected GROUP BY reason ORDER BY reason"))


def slice_seconds(span: float, samples: int) -> float:
    """The shortest step that cuts `span` seconds into at most `SLICES` slices, or fewer where there are few samples."""
    least = span / min(SLICES, max(FEWEST_SLICES, samples // SAMPLES_PER_SLICE))
    days = -(-least // 86400)
    return float(next((step for step in STEPS if step >= least), days * 86400))
