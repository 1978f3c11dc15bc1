"""Prompt lengths: how many samples of each, by state, cut into bins; and their percentiles, which are exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsx.stores.reader import Store

BINS: Final = 48
PERCENTILES: Final = (50, 90, 99)
STATES: Final = ("committed", "pending", "quarantined")


def stored_lengths(store: Store) -> list[tuple[int, str, int]]:
    """What a ledger would say of lengths, out of the store alone: what is not committed counts as pending."""
    lengths = store.lengths
    there = np.zeros(len(lengths), np.bool_)
    there[store.committed] = True
    found = []
    for state, chosen in (("committed", lengths[there]), ("pending", lengths[~there])):
        values, counts = np.unique(chosen, return_counts=True)
        found += [(int(tokens), state, int(count)) for tokens, count in zip(values, counts, strict=True)]
    return sorted(found)


def length_facts(rows: Sequence[tuple[int, str, int]]) -> dict[str, Any]:
    """Plain data.

    Args:
        rows: (tokens, state, samples), sorted by tokens.

    Returns:
        `width`: tokens of a bin, of which bin k begins at k times that, plus 1; for each state of `STATES` the samples of each
        bin; `shortest`, `longest`, `mean` and the percentiles of all samples, None where there is none.
    """
    samples = sum(count for _, _, count in rows)
    if not samples:
        empty: dict[str, Any] = {"samples": 0, "tokens": 0, "width": 1, "bins": {state: [] for state in STATES}}
        return {**empty, "shortest": None, "longest": None, "mean": None, **{f"p{share}": None for share in PERCENTILES}}
    tokens = sum(length * count for length, _, count in rows)
    longest = rows[-1][0]
    width = _width(longest)
    bins = {state: [0] * ((longest - 1) // width + 1) for state in STATES}
    for length, state, count in rows:
        bins[state][max(length - 1, 0) // width] += count
    return {
        "samples": samples,
        "tokens": tokens,
        "width": width,
        "bins": bins,
        "shortest": rows[0][0],
        "longest": longest,
        "mean": tokens / samples,
        **{f"p{share}": _percentile(rows, samples, share) for share in PERCENTILES},
    }


def _width(longest: int) -> int:
    """A round number of tokens that cuts `longest` into at most `BINS` bins."""
    least, power = -(-longest // BINS), 1
    while True:
        for factor in (1, 2, 5):
            if factor * power >= least:
                return factor * power
        power *= 10


def _percentile(rows: Sequence[tuple[int, str, int]], samples: int, share: int) -> int:
    """The smallest length that at least `share` per cent of the samples do not exceed."""
    below = 0
    for length, _, count in rows:
        below += count
        if 100 * below >= share * samples:
            return length
    return rows[-1][0]
