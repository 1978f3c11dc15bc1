"""What becomes of a dataset's rows, before anything runs: numbers over many, and the text of some."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from hsx.datasets.sniff import ALL_COUNT, SUCH_COUNT
from hsx.records import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from hsx.datasets.sniff import Sniffed
    from hsx.ports import Dataset

BAD_SHOWN = 5
BAD_LISTED = 1000
"""Bad rows that are kept where all of them are asked for."""


@dataclass(slots=True)
class Preview:
    """Numbers over the rows that were read.

    Attributes:
        rows: read.
        complete: whether these are all rows of the dataset.
        accepted: usable rows.
        reasons: bad rows for each reason; these and `accepted` are `rows`.
        tokens: of all usable rows.
        counted: tokens that count for the loss.
        unmasked: usable rows of which no token counts.
        whole: usable rows of which every token counts.
        cut: usable rows that were cut, because they were too long.
        lengths: tokens of each usable row.
        samples: some usable rows: the first ones, or those of the ids that were asked for.
        bad: the first bad rows, and those of these ids.
        missing: ids that were asked for, and none of the rows has.
    """

    rows: int = 0
    complete: bool = True
    accepted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    counted: int = 0
    unmasked: int = 0
    whole: int = 0
    cut: int = 0
    lengths: list[int] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def quantiles(self) -> dict[str, int]:
        """Tokens of the shortest, the median, the 95th of a hundred, and the longest row; empty without a usable row."""
        if not self.lengths:
            return {}
        low, middle, high, most = np.quantile(self.lengths, [0, 0.5, 0.95, 1], method="nearest").tolist()
        return {"shortest": int(low), "median": int(middle), "p95": int(high), "longest": int(most)}


def take(dataset: Dataset, rows: int | None, samples: int, *, ids: Collection[str] = (), bad: int = BAD_SHOWN) -> Preview:
    """Reads rows from the beginning, and keeps some of them. Raises what the dataset raises.

    Args:
        dataset: the dataset.
        rows: how many to read at most; None: all.
        samples: how many usable ones to keep, the first ones.
        ids: keep the rows of these ids instead, usable or bad, and read no further than to the last of them.
        bad: how many bad rows to keep, the first ones; those of `ids` besides.
    """
    found, wanted = Preview(), set(ids)
    for row in dataset:
        if found.rows == rows or (ids and not wanted):
            found.complete = False
            break
        found.rows += 1
        chosen = row.sample_id in wanted
        wanted.discard(row.sample_id)
        if isinstance(row, BadRow):
            found.reasons[row.reason] += 1
            if chosen or len(found.bad) < bad:
                found.bad.append(row)
            continue
        kept = int(np.count_nonzero(row.loss_mask))
        found.accepted += 1
        found.tokens += len(row.input_ids)
        found.counted += kept
        found.unmasked += not kept
        found.whole += kept == len(row.input_ids)
        found.cut += row.cut > 0
        found.lengths.append(len(row.input_ids))
        if chosen or (not ids and len(found.samples) < samples):
            found.samples.append(row)
    found.missing = sorted(wanted)
    return found


def whole_note(whole: int, accepted: int, seen: Sniffed) -> list[str]:
    """A line on usable rows of which every token counts for the loss, where what was found of the dataset does not say so yet.

    A row without a mask is such a row; one in a dataset that has masks is easily overlooked.
    """
    if not whole or (whole == accepted and any(note.endswith((ALL_COUNT, SUCH_COUNT)) for note in seen.notes)):
        return []
    which = "every usable row" if whole == accepted else f"{whole} of {accepted} usable rows"
    return [f"note       every token of {which} counts for the loss: the mask is all ones, or there is none"]


def pieces(row: Row, decode: Callable[[list[int]], str] | None) -> Iterable[tuple[str, bool]]:
    """The text of a row in pieces of tokens that all count, or all do not; without a tokenizer the ids.

    Args:
        row: the row.
        decode: text of ids.
    """
    edges = np.flatnonzero(np.diff(row.loss_mask)) + 1
    bounds = [0, *edges.tolist(), len(row.input_ids)]
    for start, stop in pairwise(bounds):
        ids = row.input_ids[start:stop].tolist()
        yield decode(ids) if decode else " ".join(map(str, ids)), bool(row.loss_mask[start])
