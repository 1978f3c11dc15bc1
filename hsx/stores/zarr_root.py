"""The reference writer: shards whose blocks zarr-python has encoded.

For comparison, not for speed: it takes a sample several times through memory, and the interpreter lock for tenths of a second.
What makes a shard safe is the same code as in hsx's own writer - preallocation, sync, rename - and so is its record, which is
put in front of the index that zarr-python has written. The two pass one contract suite (`hsx.testing.root_contract`).
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import zarr
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from hsx.core.layout import ENTRY_BYTES, PAGE, round_up, shard_key
from hsx.stores import metadata
from hsx.stores.bfloat16 import Buffer
from hsx.stores.checksum import crc32c
from hsx.stores.durable import write_all
from hsx.stores.reduced import reduced_chunks
from hsx.stores.root import ShardRoot
from hsx.stores.shard import ShardWriter, judged_crcs, make_record, rows_of, write_tail

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout
    from hsx.records import Payload

_CONFIG: Final = {"array.write_empty_chunks": True}
"""A chunk of nothing but fill is stored like any other: absent never means empty."""
_opening: Final = threading.Lock()  # the setting is the whole process's, and an array keeps what it found when it was opened


class ZarrRoot(ShardRoot):
    """A root that is written through zarr-python; implements the port `Root` as `ShardRoot` does."""

    def _make_writer(self, *, direct: bool) -> ShardWriter:
        info = self._info
        return ZarrShardWriter(
            self._folder,
            self._name,
            info.layout,
            store=info.store_id,
            spec=info.spec,
            direct=False,
            durable=self._durable,
        )


class ZarrShardWriter(ShardWriter):
    """As `ShardWriter`, with blocks by zarr-python: one after the other, without padding between them."""

    def _fill(self, fd: int, payload: Payload) -> tuple[int, int]:
        layout = self._layout
        if layout.reduced:
            stored = np.concatenate([rows.copy() for rows in reduced_chunks(payload, layout)])
            crc = crc32c(stored)
        else:
            stored = payload.states.reshape(-1).view(np.uint8)
            _, crc = judged_crcs(payload, layout)
        rows = stored.reshape(-1, layout.states, layout.row_bytes)
        shard = encode_shard(payload.marker.index, rows.view(np.uint16) if layout.dtype == "bf16" else rows, layout)
        blocks, index = shard[: -layout.index_bytes], shard[-layout.index_bytes :]
        chunks = layout.chunks(rows_of(payload))
        entries = index[: chunks * ENTRY_BYTES].view("<u8").reshape(-1, 2)
        tail = np.empty(layout.tail_bytes, np.uint8)
        record = make_record(payload, self._store, self._spec, layout, crc)
        write_tail(tail, layout, record, [(offset, nbytes) for offset, nbytes in entries.tolist()])
        write_all(fd, [blocks.data], 0)
        return crc, write_all(fd, [tail.data], round_up(blocks.size, PAGE))


def encode_shard(index: int, states: NDArray[np.uint16] | NDArray[np.uint8], layout: StoreLayout) -> NDArray[np.uint8]:
    """A sample's shard as zarr-python makes it: uint8, the index at its end.

    Args:
        index: the sample.
        states: rows as they are stored: bf16 bits [rows, L, H], or uint8 [rows, L, H + 4].
        layout: the store's shape.
    """
    document = json.dumps(metadata.hidden_states(layout, {})).encode()
    store = MemoryStore({metadata.METADATA: Buffer.from_bytes(document)})
    with _opening, zarr.config.set(_CONFIG):
        array = zarr.open_array(store, mode="r+")
    array[index, : len(states)] = states
    shard = zarr.core.sync.sync(store.get(shard_key(index), default_buffer_prototype()))
    assert shard is not None
    return shard.as_numpy_array().view(np.uint8)
