"""The record inside a shard: whose states these are, in the shard's own words.

It lies in bytes that the sharding codec leaves unused, in front of the index, and no Zarr reader looks at it. With it a shard
proves itself: one that was copied under another sample's name is told at once, and a lost ledger is built again from the
shards (`hsx repair --rebuild-ledger`).

On disk: `MAGIC`, the length of the text (uint32, little endian), the text (JSON, UTF-8), the crc32c of all that (uint32, little
endian), zeros up to `StoreLayout.record_bytes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final

from hsx.core.marker import parse

MAGIC: Final = b"hsxshrd1"
_HEAD: Final = len(MAGIC) + 4
_CRC: Final = 4
_DEFAULTS: Final[dict[str, Any]] = {"rows": 0, "kept": "", "dtype": "bf16"}
"""Left out: records of stores that keep everything are as they were before there was anything else."""
_OPTIONAL: Final = tuple(name.encode() for name in _DEFAULTS)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """What a shard says of itself.

    Attributes:
        store: the store's uuid.
        index: the sample.
        marker: the attempt whose dump was stored.
        epoch: the life of the server that computed it.
        sequence: its number in that epoch.
        tokens: rows.
        ids: sha256 of the sample's ids (int32, little endian), 64 hex digits.
        layers: the k of each h_k.
        final: `post_norm` or `pre_norm`.
        hidden_size: H.
        crc32c: of the payload: all bytes of the rows, token-major, padding excluded.
        rows: rows that are stored, where less is stored than was captured; 0: `tokens`.
        kept: sha256 of the positions of these rows (int32, little endian), 64 hex digits; "": all.
        dtype: what they are stored as.
    """

    store: str
    index: int
    marker: str
    epoch: str
    sequence: int
    tokens: int
    ids: str
    layers: tuple[int, ...]
    final: str
    hidden_size: int
    crc32c: int
    rows: int = 0
    kept: str = ""
    dtype: str = "bf16"

    @property
    def stored_rows(self) -> int:
        """Rows in the shard."""
        return self.rows or self.tokens


_NAMES: Final = tuple(field.name for field in fields(ShardRecord))


def encode(record: ShardRecord, nbytes: int, checksum: Callable[[bytes], int]) -> bytes:
    """The record as `nbytes` bytes. Raises ValueError where it needs more.

    Args:
        record: see there.
        nbytes: `StoreLayout.record_bytes`.
        checksum: crc32c of bytes.
    """
    values = ((name, getattr(record, name)) for name in _NAMES)
    told = {name: value for name, value in values if name not in _DEFAULTS or value != _DEFAULTS[name]}
    text = json.dumps(told, separators=(",", ":")).encode()
    body = MAGIC + len(text).to_bytes(4, "little") + text
    whole = body + checksum(body).to_bytes(_CRC, "little")
    if len(whole) > nbytes:
        raise ValueError(f"the record of sample {record.index} has {len(whole)} bytes; expected at most {nbytes}")
    return whole.ljust(nbytes, b"\0")


def is_plainly_of(data: bytes, store: str, index: int, checksum: Callable[[bytes], int]) -> bool:
    """Whether `data` is plainly a sound record of that sample, all of whose tokens are stored as bf16.

    Tells the ordinary case, as `encode` writes it, by its first bytes and its checksum, far quicker than `decode`. False means
    nothing: `decode` tells.
    """
    end = _HEAD + int.from_bytes(data[len(MAGIC) : _HEAD], "little")
    begin = b'{"store":"%b","index":%d,"marker":' % (store.encode(), index)
    return (
        data.startswith(MAGIC)
        and data.startswith(begin, _HEAD)
        and end + _CRC <= len(data)
        and not any(b'"%b":' % name in data for name in _OPTIONAL)
        and checksum(data[:end]) == int.from_bytes(data[end : end + _CRC], "little")
    )


def decode(data: bytes, checksum: Callable[[bytes], int]) -> ShardRecord:
    """The record out of the bytes at its place. Raises ValueError, saying what was found, where there is no sound one."""
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"begins with {data[: len(MAGIC)]!r}; expected {MAGIC!r}")
    length = int.from_bytes(data[len(MAGIC) : _HEAD], "little")
    end = _HEAD + length
    if end + _CRC > len(data):
        raise ValueError(f"says that it has {length} bytes of text; expected at most {len(data) - _HEAD - _CRC}")
    recorded, crc = int.from_bytes(data[end : end + _CRC], "little"), checksum(data[:end])
    if recorded != crc:
        raise ValueError(f"has crc32c {crc:08x}; expected {recorded:08x}")
    try:
        fields: dict[str, Any] = json.loads(data[_HEAD:end])
        fields["layers"] = tuple(map(int, fields["layers"]))
        record = ShardRecord(**fields)
        marker = parse(record.marker)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"cannot be understood: {type(error).__name__}: {error}") from error
    if marker is None or (marker.index, marker.tokens) != (record.index, record.tokens):
        raise ValueError(f"names marker {record.marker}; expected one of sample {record.index} with {record.tokens} tokens")
    return record
