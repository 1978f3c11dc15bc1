"""The rows of a batch of a table in which nothing is wrong, told for all of them at once.

A row costs a dozen calls of numpy when it is looked at by itself, whatever its length. So a whole batch is checked first; rows
in which that finds anything, or that say in two ways what counts, are looked at one by one, by the code that names the fault.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.datasets.fields import Bad
from hsx.datasets.masks import IGNORED, MASKS, PADDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.datasets.columns import BatchColumns, Numbers
    from hsx.datasets.fields import Columns
    from hsx.datasets.rows import Limits

    Bools = NDArray[np.bool_]
    Places = NDArray[np.int64] | slice


class CleanRows:
    """Token ids and loss masks of a batch, and which rows can be taken as they are.

    Args:
        batch: the columns.
        names: which is what.
        limits: what a usable row keeps to.

    Raises Bad where a column is of no type that can be right.
    """

    def __init__(self, batch: BatchColumns, names: Columns, limits: Limits) -> None:
        ids = batch.numbers(names.input_ids)
        self._starts, self._lengths = ids.starts, ids.stops - ids.starts
        self._ids = ids.flat.astype(np.int32)
        self._mask = np.ones(len(self._ids), dtype=np.uint8)
        # Booleans are no token ids; as unsigned numbers negative ids are huge.
        wrong = (ids.flat < 0) | (ids.flat >= limits.vocab_size)
        self._clean: Bools = (self._lengths > 0) & (self._lengths <= limits.max_tokens) & (not ids.flags)
        self._clean &= batch.valid(names.input_ids)
        self._leave_out(wrong if ids.nulls is None else wrong | ids.nulls)
        given = np.zeros(len(self._lengths), dtype=np.int64)
        for name, take in (
            (names.loss_mask, self._take_mask),
            (names.labels, self._take_labels),
            (names.prompt_length, self._take_prompts),
        ):
            if (there := batch.valid(name)).any():
                given += there
                take(batch, name, there & self._clean)
        self._clean &= given < 2
        if (names.loss_mask, names.labels, names.prompt_length) != MASKS:
            self._clean &= given > 0  # a mask that the job file names has to be there
        self._leave_out_padded(batch)
        self._bounds = list(zip(ids.starts.tolist(), ids.stops.tolist(), self._clean.tolist(), strict=True))

    def row(self, row: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | None:
        """int32 [tokens] and uint8 [tokens] of 0 and 1, parts of the batch's; None for a row to be looked at by itself."""
        start, stop, clean = self._bounds[row]
        return (self._ids[start:stop], self._mask[start:stop]) if clean else None

    def _leave_out(self, wrong: Bools) -> None:
        """Rows with one of these tokens are not clean."""
        if wrong.any():
            before = np.concatenate([[0], np.cumsum(wrong)])
            self._clean &= before[self._starts + self._lengths] == before[self._starts]

    def _leave_out_padded(self, batch: BatchColumns) -> None:
        """Rows whose attention mask has a 0 are not clean; one that is no list of numbers says nothing, as row by row."""
        if PADDING not in batch.index:
            return
        try:
            column = batch.numbers(PADDING)
        except Bad:
            return
        before = np.concatenate([[0], np.cumsum(column.flat == 0)])
        self._clean &= ~batch.valid(PADDING) | (before[column.stops] == before[column.starts])

    def _places(self, column: Numbers, rows: Bools) -> tuple[Places, Places]:
        """Where the tokens of some rows are among the ids, and where the same rows' values are in another column."""
        starts, lengths = self._starts[rows], self._lengths[rows]
        if rows.all() and np.array_equal(column.starts, starts) and np.array_equal(starts[1:], (starts + lengths)[:-1]):
            whole = slice(int(starts[0]), int(starts[-1] + lengths[-1])) if len(starts) else slice(0, 0)
            return whole, whole
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return within + np.repeat(starts, lengths), within + np.repeat(column.starts[rows], lengths)

    def _take(self, batch: BatchColumns, name: str, rows: Bools, *, labels: bool) -> None:
        column = batch.numbers(name)
        if labels and column.flags:
            self._clean &= ~rows
            return
        as_long = column.stops - column.starts == self._lengths
        self._clean &= ~rows | as_long
        at, there = self._places(column, rows & as_long)
        values = column.flat[there]
        counts = values != IGNORED if labels else values != 0
        right = ~counts | (values == (self._ids[at] if labels else 1))
        if column.nulls is not None:
            right &= ~column.nulls[there]
        self._mask[at] = counts
        if not right.all():
            wrong = np.zeros(len(self._mask), dtype=np.bool_)
            wrong[at] = ~right
            self._leave_out(wrong)

    def _take_mask(self, batch: BatchColumns, name: str, rows: Bools) -> None:
        self._take(batch, name, rows, labels=False)

    def _take_labels(self, batch: BatchColumns, name: str, rows: Bools) -> None:
        self._take(batch, name, rows, labels=True)

    def _take_prompts(self, batch: BatchColumns, name: str, rows: Bools) -> None:
        prompts = batch.whole(name)
        if prompts is None:
            self._clean &= ~rows
            return
        self._clean &= ~rows | ((prompts >= 0) & (prompts <= self._lengths))
        rows = rows & self._clean
        starts, prompts = self._starts[rows], np.where(rows, prompts, 0)[rows].astype(np.int64)
        within = np.arange(int(prompts.sum())) - np.repeat(np.cumsum(prompts) - prompts, prompts)
        self._mask[within + np.repeat(starts, prompts)] = 0
