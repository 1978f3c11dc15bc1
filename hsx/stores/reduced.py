"""Between gate and shard: what a store that keeps less writes of a dump, and what its readers make of it again.

The dump is captured and judged whole. Then each of its inner chunks that has a token to be kept is copied, the copy is proved
to be the bytes that were judged, and the rows to be kept are taken out of it and, in an fp8 store, converted. Memory is a few
chunks, whatever the length of the sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.errors import SampleError
from hsx.stores.checksum import crc32c
from hsx.stores.fp8 import dequantise, quantise

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout
    from hsx.records import Payload


def reduced_chunks(payload: Payload, layout: StoreLayout) -> Iterator[NDArray[np.uint8]]:
    """The bytes of the rows of each inner chunk of a shard, in order: uint8 [rows * token_bytes], valid until the next.

    Args:
        payload: a whole sample; where it has `crcs`, no row is taken out of bytes that do not match them.
        layout: the store's shape.

    Raises:
        SampleError: `dump_invalid`, the dump changed after it was judged.
    """
    kept = np.arange(len(payload.states)) if payload.kept is None else payload.kept
    out = np.empty((layout.chunk_tokens, layout.states, layout.row_bytes), np.uint8)
    filled = 0
    for number, first in enumerate(range(0, len(payload.states), layout.chunk_tokens)):
        low, high = np.searchsorted(kept, (first, first + layout.chunk_tokens)).tolist()
        if low == high:
            continue
        source = _judged(payload, number, layout.chunk_tokens)
        wanted = kept[low:high] - first
        while wanted.size:
            count = min(layout.chunk_tokens - filled, wanted.size)
            _convert(source[wanted[:count]], layout, out[filled : filled + count])
            filled += count
            wanted = wanted[count:]
            if filled == layout.chunk_tokens:
                yield out.reshape(-1)
                filled = 0
    if filled:
        yield out[:filled].reshape(-1)


def decode(stored: NDArray[np.uint16], layout: StoreLayout, out: NDArray[np.uint16] | None = None) -> NDArray[np.uint16]:
    """Rows of a shard, uint16 [rows, L, row_words], as bf16 bits [rows, L, H]; those of a bf16 store as they are.

    `out`, uint16 of the result's shape, is filled and returned if given.
    """
    if layout.dtype == "bf16":
        if out is None:
            return stored
        out[...] = stored
        return out
    if out is None:
        out = np.empty((*stored.shape[:-1], layout.hidden_size), np.uint16)
    raw = stored.view(np.uint8)
    for first in range(0, len(stored), layout.chunk_tokens):
        dequantise(raw[first : first + layout.chunk_tokens], out[first : first + layout.chunk_tokens])
    return out


def _judged(payload: Payload, number: int, chunk_tokens: int) -> NDArray[np.uint16]:
    """A copy of an inner chunk of the dump. Raises SampleError where it is not what was judged."""
    source = np.array(payload.states[number * chunk_tokens : (number + 1) * chunk_tokens])
    if payload.crcs:
        crc, judged = crc32c(source.reshape(-1).view(np.uint8)), payload.crcs[number]
        if crc != judged:
            message = f"{payload.marker}: chunk {number} of the dump has crc32c {crc:08x}; expected {judged:08x} as judged"
            raise SampleError("dump_invalid", message)
    return source


def _convert(rows: NDArray[np.uint16], layout: StoreLayout, out: NDArray[np.uint8]) -> None:
    if layout.dtype == "bf16":
        out.view(np.uint16)[...] = rows
    else:
        quantise(rows, out)
