"""Which tokens of a sample are stored: those where the loss mask is set, and those within `context` tokens of one on either
side.

The positions follow from the loss mask, which the store has whole; so they are stored nowhere else, and a shard's record has
their digest.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from hsx.stores.tokens import CHUNK

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Protocol

    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout
    from hsx.stores.tokens import TokenTable

    class Masks(Protocol):
        """The loss masks of all samples; `hsx.ports.Samples` has them."""

        def loss_mask(self, index: int) -> NDArray[np.uint8]:
            """uint8 [tokens] of sample `index`."""
            ...


def kept_positions(loss_mask: NDArray[np.uint8], context: int) -> NDArray[np.int64]:
    """Positions that are stored, rising: int64 [rows].

    Args:
        loss_mask: uint8 [tokens] of 0 and 1.
        context: how far from a token of the mask a token is stored, too.
    """
    return np.flatnonzero(_near(loss_mask, context, np.array([0, len(loss_mask)])))


def kept_counts(loss_mask: NDArray[np.uint8], offsets: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """How many tokens of each sample are stored: int64 [samples].

    Args:
        loss_mask: uint8, of samples one after the other; none is empty.
        offsets: int64 [samples + 1], where each begins.
        context: see `kept_positions`.
    """
    return np.add.reduceat(_near(loss_mask, context, offsets), offsets[:-1], dtype=np.int64)


def stored_counts(table: TokenTable, layout: StoreLayout) -> NDArray[np.int64]:
    """Rows of each sample's shard: int64 [samples]. Reads all loss masks, where not every token is stored."""
    if not layout.selects:
        return table.lengths
    counts = []
    first = 0
    while first < table.count:
        last = max(int(np.searchsorted(table.offsets, table.offsets[first] + CHUNK, "right")) - 1, first + 1)
        counts.append(
            kept_counts(table.loss_masks(first, last), table.offsets[first : last + 1] - table.offsets[first], layout.context)
        )
        first = last
    return np.concatenate(counts)


def digest(positions: NDArray[np.int64] | NDArray[np.int32]) -> str:
    """What a shard's record says of the positions of its rows: sha256 of them as int32, little endian, in hex."""
    return hashlib.sha256(np.ascontiguousarray(positions, "<i4").tobytes()).hexdigest()


def as_stored(
    input_ids: NDArray[np.int32], loss_mask: NDArray[np.uint8], kept: str, context: int
) -> NDArray[np.int32] | NDArray[np.int64]:
    """What two samples have to have in common for one shard to be that of both: ids, and the tokens that are kept of them.

    The ids alone where all are kept; otherwise the ids, -1, and the positions.
    """
    if kept == "all":
        return input_ids
    return np.concatenate([input_ids, [-1], kept_positions(loss_mask, context)])


class StoredPrompts:
    """The samples of a table as `as_stored` sees them; for `hsx.twins`.

    Args:
        table: the samples.
        layout: says which of their tokens are kept.
    """

    def __init__(self, table: TokenTable, layout: StoreLayout) -> None:
        self._table = table
        self._layout = layout

    @property
    def count(self) -> int:
        """Number of samples."""
        return self._table.count

    def input_ids(self, index: int) -> NDArray[np.int32]:
        """What decides whose twin sample `index` is, int32."""
        layout, mask = self._layout, np.empty(0, np.uint8)
        if layout.selects:
            mask = self._table.loss_mask(index)
        return as_stored(self._table.input_ids(index), mask, layout.kept, layout.context).astype(np.int32, copy=False)


def kept_of(table: Masks, layout: StoreLayout) -> Callable[[int], NDArray[np.int64] | None]:
    """What gives the positions that are stored of a sample, for its `Payload`; None where that is all of them."""

    def kept(index: int) -> NDArray[np.int64] | None:
        return kept_positions(table.loss_mask(index), layout.context) if layout.selects else None

    return kept


def _near(mask: NDArray[np.uint8], context: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each token is within `context` of one of the mask in its own sample."""
    if not context:
        return mask.astype(np.bool_)
    at = np.flatnonzero(mask)
    own = np.searchsorted(offsets, at, "right") - 1
    begins = np.bincount(np.maximum(at - context, offsets[own]), minlength=len(mask) + 1)
    ends = np.bincount(np.minimum(at + context + 1, offsets[own + 1]), minlength=len(mask) + 1)
    return np.cumsum(begins - ends)[:-1] > 0
