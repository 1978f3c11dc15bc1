"""One pass over a dump's tensors that measures all that the content invariants judge, and takes the checksums of what it saw.

Works on bf16 bits as uint16: with the sign bit cleared, a value is zero iff its bits are 0 and NaN or infinite iff they are at
least 0x7F80, so the largest magnitude of a row tells both. It is found without clearing anything: the largest of the bits as
signed numbers is the largest positive value, that of the bits as unsigned ones the largest negative one where there is any.
That is many times faster than floating-point checks, and numpy releases the GIL meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, cast

import numpy as np
from awscrt import checksums

from hsx.core.invariants import Content
from hsx.core.layout import CHUNK_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITE = np.uint16(0x7F80)
_BLOCK_BYTES = 1 << 19
"""Rows are taken in blocks that stay in the processor's cache while they are looked at three times."""


def measure(
    states: NDArray[np.uint16],
    input_ids: NDArray[np.int32],
    expected_ids: NDArray[np.int32],
    chunk_tokens: int = CHUNK_TOKENS,
) -> Content:
    """Measures a dump against its sample.

    Args:
        states: bf16 bits, [tokens, L, H].
        input_ids: the ids recorded beside them, [tokens].
        expected_ids: the sample's ids.
        chunk_tokens: tokens that each checksum covers, those of an inner chunk of the store.

    Returns:
        The facts for `hsx.core.invariants.judge_dump`.
    """
    rows = _look_at_rows(np.ascontiguousarray(states), chunk_tokens)
    return Content(
        ids_differ_at=_first_difference(input_ids, expected_ids),
        ids_all_equal=bool((expected_ids == expected_ids[:1]).all()),
        nonfinite=rows.nonfinite,
        nonfinite_at=rows.nonfinite_at,
        zero_rows=rows.zeros,
        zero_row_at=rows.zero_at,
        equal_states=_equal_states(states),
        constant_states=_constant_states(states),
        crcs=tuple(rows.crcs),
    )


@dataclass(slots=True)
class _Rows:
    """What the pass over all rows found; see `Content`."""

    nonfinite: int = 0
    nonfinite_at: tuple[int, int] | None = None
    zeros: int = 0
    zero_at: tuple[int, int] | None = None
    crcs: list[int] = field(default_factory=list)


def _look_at_rows(states: NDArray[np.uint16], chunk_tokens: int) -> _Rows:
    tokens, layers, width = states.shape
    row_bytes = layers * width * 2
    step = max(1, _BLOCK_BYTES // row_bytes)
    signed = states.view(np.int16)
    raw = states.reshape(-1).view(np.uint8)
    found = _Rows()
    for chunk in range(0, tokens, chunk_tokens):
        end = min(chunk + chunk_tokens, tokens)
        crc = 0
        for start in range(chunk, end, step):
            stop = min(start + step, end)
            positive = signed[start:stop].max(axis=-1).view(np.uint16)
            largest = np.maximum(positive & _MAGNITUDE, states[start:stop].max(axis=-1) & _MAGNITUDE)
            bad = largest >= _INFINITE
            if bad.any():
                found.nonfinite += int(((states[start:stop] & _MAGNITUDE) >= _INFINITE).sum())
                found.nonfinite_at = found.nonfinite_at or _first(bad, start)
            empty = largest == 0
            if empty.any():
                found.zeros += int(empty.sum())
                found.zero_at = found.zero_at or _first(empty, start)
            crc = cast("int", checksums.crc32c(raw[start * row_bytes : stop * row_bytes], crc))
        found.crcs.append(crc)
    return found


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
