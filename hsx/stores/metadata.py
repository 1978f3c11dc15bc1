"""The Zarr v3 metadata documents that hsx writes, as plain dictionaries.

Written by hand, not through zarr-python, so that they are durable, the same under every version of zarr, and there without
importing it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hsx.stores import codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hsx.core.layout import StoreLayout

METADATA: Final = "zarr.json"
HIDDEN_STATES: Final = "hidden_states"
DIMENSIONS: Final = ("sample", "token", "state", "channel")
_PLAIN: Final = ({"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"})

Document = dict[str, Any]


def group(attributes: Mapping[str, Any]) -> Document:
    """A group's document."""
    return {"zarr_format": 3, "node_type": "group", "attributes": dict(attributes)}


def hidden_states(layout: StoreLayout, attributes: Mapping[str, Any]) -> Document:
    """The document of a `hidden_states` array, the group's and each root's: bfloat16, one shard per sample.

    That of an fp8 store is of bytes (`hsx.stores.fp8`).
    """
    data_type, fill_value = ("bfloat16", "NaN") if layout.dtype == "bf16" else ("uint8", layout.fill_bits & 0xFF)
    to_bytes, checksum = _PLAIN
    sharding = {
        "chunk_shape": list(layout.chunk_shape),
        "codecs": [to_bytes, *codec.metadata(layout.codec), checksum],
        "index_codecs": list(_PLAIN),
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(layout.shard_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill_value,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "dimension_names": list(DIMENSIONS),
        "attributes": dict(attributes),
        "storage_transformers": [],
    }


def vector(
    length: int, data_type: str, attributes: Mapping[str, Any], *, chunk: int | None = None, separator: str = "."
) -> Document:
    """The document of a 1-D array whose chunks are raw little-endian values and their crc32c.

    Args:
        length: number of elements.
        data_type: Zarr's name of their type.
        attributes: JSON values.
        chunk: elements of a chunk; default: one chunk holds all.
        separator: between `c` and the chunk's number in its key.
    """
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [length],
        "data_type": data_type,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [length if chunk is None else chunk]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": separator}},
        "fill_value": 0,
        "codecs": list(_PLAIN),
        "attributes": dict(attributes),
        "storage_transformers": [],
    }
