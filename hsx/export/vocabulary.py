"""The draft's vocabulary: the tokens that the draft may propose, chosen by how often they occur where the loss counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from hsx.export.protocol import IndexRow, Vocabulary


@dataclass(frozen=True, slots=True)
class Coverage:
    """What a draft vocabulary has of the tokens that count for the loss.

    Attributes:
        counted: tokens that count, each time that one occurs.
        covered: of them, those that the draft can propose.
        distinct: different ones among them: with so many the draft has them all.
    """

    counted: int
    covered: int
    distinct: int

    @property
    def share(self) -> float:
        """From 0 to 1; 1 where nothing counts."""
        return self.covered / self.counted if self.counted else 1.0


def count_tokens(rows: Iterable[IndexRow]) -> NDArray[np.int64]:
    """How often each token id occurs where the loss mask is 1: int64 [largest id + 1]."""
    counts = np.zeros(0, np.int64)
    for row in rows:
        found = np.bincount(row.input_ids[row.loss_mask != 0])
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    return counts


def coverage(counts: NDArray[np.int64], draft: int) -> Coverage:
    """What the `draft` most frequent tokens have of all that count: `counts` int64 [ids], as `count_tokens` gives them."""
    return Coverage(int(counts.sum()), int(np.sort(counts)[::-1][:draft].sum()), int(np.count_nonzero(counts)))


def mapping(counts: NDArray[np.int64], vocabulary: Vocabulary) -> dict[str, torch.Tensor]:
    """`d2t` int64 [draft] (target id minus draft id) and `t2d` bool [target] of the most frequent tokens.

    Of tokens that occur equally often, the lower id comes first, those that do not occur at all included.
    Raises RunError `export_refused` where an id lies beyond the vocabulary.
    """
    assert vocabulary.target is not None
    assert vocabulary.draft is not None
    if len(counts) > vocabulary.target:
        raise RunError(
            "export_refused", f"token id {len(counts) - 1} occurs; expected less than --vocab-size {vocabulary.target}"
        )
    padded = np.pad(counts, (0, vocabulary.target - len(counts)))
    chosen = np.sort(np.argsort(-padded, kind="stable")[: vocabulary.draft])
    t2d = torch.zeros(vocabulary.target, dtype=torch.bool)
    t2d[torch.from_numpy(chosen)] = True
    return {"d2t": torch.from_numpy(chosen - np.arange(vocabulary.draft)), "t2d": t2d}
