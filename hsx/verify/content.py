"""The content invariants over a sample that is read in pieces."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.invariants import Content
from hsx.dumps.measure import measure
from hsx.stores.checksum import combine

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NO_IDS = np.empty(0, np.int32)


class ContentJudge:
    """Measures piece by piece what `hsx.dumps.measure.measure` measures of a whole dump.

    Args:
        states: L.
        chunk_tokens: tokens of an inner chunk.
    """

    def __init__(self, states: int, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._tokens = 0
        self._payload = 0
        self._nonfinite = self._zeros = 0
        self._nonfinite_at: tuple[int, int] | None = None
        self._zero_at: tuple[int, int] | None = None
        self._equal = set(combinations(range(states), 2))
        self._constant = set(range(states))
        self._first: NDArray[np.uint16] | None = None

    def add(self, rows: NDArray[np.uint16]) -> tuple[int, ...]:
        """The next tokens: bf16 bits [tokens, L, H], whole inner chunks but for the last ones; not kept.

        Returns the crc32c of the rows of each inner chunk.
        """
        found = measure(rows, _NO_IDS, _NO_IDS, self._chunk_tokens)
        row_bytes = rows[0].nbytes
        for number, crc in enumerate(found.crcs):
            size = min(len(rows) - number * self._chunk_tokens, self._chunk_tokens) * row_bytes
            self._payload = combine(self._payload, crc, size)
        self._nonfinite += found.nonfinite
        self._zeros += found.zero_rows
        self._nonfinite_at = self._nonfinite_at or self._moved(found.nonfinite_at)
        self._zero_at = self._zero_at or self._moved(found.zero_row_at)
        self._equal &= set(found.equal_states)
        if self._first is None:
            self._first = rows[0].copy()
        for state in tuple(self._constant):
            first = self._first[state]
            # Real rows differ at once, so the whole comparison is made only for suspects.
            if not np.array_equal(rows[-1, state], first) or not bool((rows[:, state] == first).all()):
                self._constant.discard(state)
        self._tokens += len(rows)
        return found.crcs

    @property
    def payload(self) -> int:
        """The crc32c of all rows so far."""
        return self._payload

    def finish(self, *, ids_all_equal: bool) -> Content:
        """What was measured. `ids_all_equal`: the sample repeats a single id; its rows may then rightly be equal."""
        return Content(
            ids_differ_at=None,
            ids_all_equal=ids_all_equal,
            nonfinite=self._nonfinite,
            nonfinite_at=self._nonfinite_at,
            zero_rows=self._zeros,
            zero_row_at=self._zero_at,
            equal_states=tuple(sorted(self._equal)),
            constant_states=tuple(sorted(self._constant)) if self._tokens > 1 else (),
        )

    def _moved(self, at: tuple[int, int] | None) -> tuple[int, int] | None:
        return None if at is None else (at[0] + self._tokens, at[1])
