"""From characters to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.datasets.fields import Bad

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

SHOWN: Final = 20
"""Characters of a token's text in a message."""


def span_mask(text: str, offsets: list[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    """uint8 [tokens]: 1 where a token begins within one of the spans.

    White space does not decide: a token that begins with white space before a span counts if it has text of the span, and one
    that ends with white space behind it counts, too. One that has only white space of the span, and other text, does not.

    Args:
        text: what was encoded.
        offsets: [start, end) in characters of each token.
        spans: [start, end) in characters of what counts.

    Raises Bad `bad_mask` where a token joins text of a span with other text, so that it can neither count nor not count, or a
    span has text and no token of its own.
    """
    bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    mask = np.zeros(len(bounds), dtype=np.uint8)
    rising = bool((np.diff(bounds, axis=0) >= 0).all())
    for start, end in spans:
        # Only the tokens that touch the span: those of a long conversation times its spans would be quadratic.
        part = slice(*_touching(bounds, start, end)) if rising else slice(None)
        starts, stops = bounds[part, 0], bounds[part, 1]
        own = (starts >= start) & (starts < end)
        for at in np.flatnonzero((starts < start) & (stops > start)).tolist():
            before, within = text[starts[at] : start], text[start : min(stops[at], end)]
            if within.strip():
                _require_apart(before, within)
                own[at] = True
        for at in np.flatnonzero((starts < end) & (stops > end)).tolist():
            within, behind = text[max(starts[at], start) : end], text[end : stops[at]]
            _require_apart(within, behind)
            if behind.strip():
                own[at] = False
        if not own.any() and text[start:end].strip():
            raise Bad("bad_mask", f"no token stands for {_shown(text[start:end])}, which counts for the loss")
        mask[part] |= own.astype(np.uint8)
    return mask


def _touching(bounds: NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    """The range of tokens, whose bounds rise, that begin or reach into [start, end)."""
    starts, stops = bounds[:, 0], bounds[:, 1]
    first = min(int(np.searchsorted(starts, start)), int(np.searchsorted(stops, start, side="right")))
    return first, int(np.searchsorted(starts, end))


def _require_apart(left: str, right: str) -> None:
    if left.strip() and right.strip():
        raise Bad("bad_mask", f"one token has both {_shown(left)} and {_shown(right)}, of which only one counts for the loss")


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
