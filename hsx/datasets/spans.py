"""From characters to tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


def span_mask(offsets: list[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> NDArray[np.uint8]:
    """uint8 [tokens]: 1 where a token begins within one of the spans.

    A token that begins before a span belongs to the template's text, even if it reaches into it: the model does not write it.

    Args:
        offsets: [start, end) in characters of each token.
        spans: [start, end) in characters of what counts.
    """
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    # Through the characters: the spans of a long conversation times its tokens would be quadratic.
    counts = np.zeros(int(starts.max(initial=0)) + 1, dtype=np.uint8)
    for start, end in spans:
        counts[start:end] = 1
    return counts[starts]
