"""Which tokens of which markers have arrived: the rules by which chunks become one dump. No files, no SGLang.

A long prompt is prefilled in chunks of arbitrary sizes, one forward each, and a forward carries chunks of several
requests. A dump is whole when its tokens 0 to n arrived without a gap; everything else is an error or is dropped:

- a chunk at offset 0 begins, or begins again (a retracted request is prefilled from the start);
- a chunk where the last one ended continues;
- a chunk anywhere else fails the marker: part of the prompt came from a cache or got lost, and its states are unknown;
- more tokens than the marker promises fail it;
- a marker that is settled (published or failed) is ignored from then on: markers are never reused, so what still comes is
  a request that the server runs again.

An aborted request is not announced, it only stops coming. SGLang prefills the chunks of a long prompt in consecutive
prefill forwards, so a partial marker that misses `PATIENCE` of them is taken for gone and dropped. Were that ever wrong, its
next chunk would not begin at 0 and would fail it: the price is a repeated request, never a wrong dump. `MAX_PARTIAL` bounds
the partial markers, and with them the files, whatever happens.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hsx.core.marker import parse

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsx.core.marker import Marker

PATIENCE: Final = 16
"""Prefill forwards that a partial marker may miss."""
MAX_PARTIAL: Final = 64
"""Partial markers kept at once."""
MAX_SETTLED: Final = 65536
"""Settled markers remembered; older ones are long gone from the server."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Take `count` rows of the batch, from `row` on, as tokens `offset` onwards of `marker`.

    Attributes:
        begins: this is the marker's first piece, or a fresh start.
        whole: with this piece the dump is complete.
    """

    marker: Marker
    row: int
    offset: int
    count: int
    begins: bool
    whole: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """The marker cannot become a dump, for this reason. Whoever is told settles it, once the failure is on record."""

    marker: Marker
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one forward brings, decided before it runs.

    Attributes:
        rows: real rows of the batch; what lies beyond is padding.
        pieces: what to take, in batch order.
        failures: markers that failed with this batch.
        gone: partial markers that are given up; their files are to be deleted.
        foreign: requests that began with this forward and whose rid is no marker.
    """

    rows: int
    pieces: tuple[Piece, ...]
    failures: tuple[Failure, ...]
    gone: tuple[Marker, ...]
    foreign: int


@dataclass(slots=True)
class _Partial:
    covered: int
    missed: int = 0


class Assembly:
    """The state of all markers that this server has seen."""

    def __init__(self) -> None:
        self._partial: OrderedDict[Marker, _Partial] = OrderedDict()
        self._settled: OrderedDict[Marker, None] = OrderedDict()

    @property
    def partial(self) -> int:
        """Markers of which a part has arrived."""
        return len(self._partial)

    def forward(self, rids: Sequence[str], prefix_lens: Sequence[int], extend_lens: Sequence[int]) -> Plan:
        """Takes note of one prefill forward.

        Args:
            rids: request ids, in batch order.
            prefix_lens: for each, how many of its tokens were forwarded (or cached) before.
            extend_lens: for each, how many tokens this forward brings.

        Raises:
            ValueError: the three differ in length: the batch is not what this code understands.
        """
        pieces: list[Piece] = []
        failures: list[Failure] = []
        row = foreign = 0
        seen: set[Marker] = set()
        for rid, offset, count in zip(rids, prefix_lens, extend_lens, strict=True):
            marker = parse(rid)
            if marker is None:
                foreign += offset == 0
            elif marker not in self._settled and count > 0:
                seen.add(marker)
                outcome = self._take(marker, row, offset, count)
                if isinstance(outcome, Piece):
                    pieces.append(outcome)
                else:
                    failures.append(outcome)
            row += count
        return Plan(row, tuple(pieces), tuple(failures), self._expire(seen), foreign)

    def is_settled(self, marker: Marker) -> bool:
        """Whether the marker was published or failed, as far as is remembered."""
        return marker in self._settled

    def settle(self, marker: Marker) -> None:
        """The marker was published or failed; nothing of it is taken any more."""
        self._partial.pop(marker, None)
        self._settled[marker] = None
        while len(self._settled) > MAX_SETTLED:
            self._settled.popitem(last=False)

    def _take(self, marker: Marker, row: int, offset: int, count: int) -> Piece | Failure:
        partial = self._partial.get(marker)
        expected = 0 if partial is None else partial.covered
        if offset not in (0, expected):
            return Failure(marker, f"a chunk begins at token {offset}; expected {expected} (a cached prefix or a lost chunk)")
        if offset + count > marker.tokens:
            return Failure(marker, f"a chunk ends at token {offset + count}; expected at most {marker.tokens}")
        self._partial[marker] = _Partial(offset + count)
        self._partial.move_to_end(marker)
        return Piece(marker, row, offset, count, begins=offset == 0, whole=offset + count == marker.tokens)

    def _expire(self, seen: set[Marker]) -> tuple[Marker, ...]:
        gone = []
        for marker, partial in self._partial.items():
            if marker not in seen:
                partial.missed += 1
                if partial.missed > PATIENCE:
                    gone.append(marker)
        crowd = len(self._partial) - len(gone) - max(MAX_PARTIAL, len(seen))
        gone += [marker for marker in self._partial if marker not in seen and marker not in gone][: max(0, crowd)]
        for marker in gone:
            del self._partial[marker]
        return tuple(gone)
