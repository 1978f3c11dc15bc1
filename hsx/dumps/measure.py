"""One pass over a dump's tensors that measures all that the content invariants judge.

Works on bf16 bits as uint16: with the sign bit cleared, a value is zero iff its bits are 0 and NaN or infinite iff they are at
least 0x7F80, so the largest magnitude of a row tells both. That is many times faster than floating-point checks, and
numpy releases the GIL meanwhile.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.invariants import Content

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = np.uint16(0x7F80)
_BLOCK_BYTES = 1 << 20
"""Rows are taken in blocks that stay in the processor's cache between the two passes over them."""


def measure(states: NDArray[np.uint16], input_ids: NDArray[np.int32], expected_ids: NDArray[np.int32]) -> Content:
    """Measures a dump against its sample.

    Args:
        states: bf16 bits, [tokens, L, H].
        input_ids: the ids recorded beside them, [tokens].
        expected_ids: the sample's ids.

    Returns:
        The facts for `hsx.core.invariants.judge_dump`.
    """
    nonfinite, nonfinite_at, zeros, zero_at = _magnitudes(states)
    return Content(
        ids_differ_at=_first_difference(input_ids, expected_ids),
        ids_all_equal=bool((expected_ids == expected_ids[:1]).all()),
        nonfinite=nonfinite,
        nonfinite_at=nonfinite_at,
        zero_rows=zeros,
        zero_row_at=zero_at,
        equal_states=_equal_states(states),
        constant_states=_constant_states(states),
    )


def _magnitudes(states: NDArray[np.uint16]) -> tuple[int, tuple[int, int] | None, int, tuple[int, int] | None]:
    tokens, layers, width = states.shape
    step = max(1, _BLOCK_BYTES // (layers * width * 2))
    buffer = np.empty((min(step, tokens), layers, width), np.uint16)
    nonfinite = zeros = 0
    nonfinite_at: tuple[int, int] | None = None
    zero_at: tuple[int, int] | None = None
    for start in range(0, tokens, step):
        block = states[start : start + step]
        magnitude = np.bitwise_and(block, _MAGNITUDE, out=buffer[: len(block)])
        largest = magnitude.max(axis=-1)
        bad = largest >= _INFINITE
        if bad.any():
            nonfinite += int((magnitude >= _INFINITE).sum())
            nonfinite_at = nonfinite_at or _first(bad, start)
        empty = largest == 0
        if empty.any():
            zeros += int(empty.sum())
            zero_at = zero_at or _first(empty, start)
    return nonfinite, nonfinite_at, zeros, zero_at


def _first(mask: NDArray[np.bool_], start: int) -> tuple[int, int]:
    token, state = np.argwhere(mask)[0]
    return start + int(token), int(state)


def _first_difference(found: NDArray[np.int32], expected: NDArray[np.int32]) -> int | None:
    common = min(len(found), len(expected))
    differing = np.flatnonzero(found[:common] != expected[:common])
    if differing.size:
        return int(differing[0])
    return None if len(found) == len(expected) else common


def _equal_states(states: NDArray[np.uint16]) -> tuple[tuple[int, int], ...]:
    # Real states differ in the first row already, so the whole comparison is made only for suspects.
    pairs = combinations(range(states.shape[1]), 2)
    suspects = [(a, b) for a, b in pairs if np.array_equal(states[0, a], states[0, b])]
    return tuple((a, b) for a, b in suspects if np.array_equal(states[:, a], states[:, b]))


def _constant_states(states: NDArray[np.uint16]) -> tuple[int, ...]:
    if len(states) < 2:
        return ()
    suspects = [s for s in range(states.shape[1]) if np.array_equal(states[0, s], states[-1, s])]
    return tuple(s for s in suspects if bool((states[:, s] == states[0, s]).all()))
