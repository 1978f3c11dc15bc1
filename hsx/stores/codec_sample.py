"""What each codec would make of states that are there: measured on a few inner chunks of a store or of dumps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import CODECS
from hsx.stores.codec import make_codec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CHUNKS: Final = 12
"""Chunks that are tried: states of one model are alike, and a chunk of the reference job takes 10 ms."""


@dataclass(frozen=True, slots=True)
class CodecTrial:
    """What one codec made of the chunks.

    Attributes:
        codec: its name.
        ratio: payload bytes over stored bytes.
        write_s_per_gb: processor seconds that compressing a GB of payload took.
        read_s_per_gb: the same for decompressing it.
    """

    codec: str
    ratio: float
    write_s_per_gb: float
    read_s_per_gb: float


def try_codecs(chunks: Sequence[NDArray[np.uint16]]) -> list[CodecTrial]:
    """Compresses each chunk, bf16 bits of any shape, with each codec, and back. At least one chunk is needed."""
    return [_try(name, chunks) for name in CODECS]


def _try(name: str, chunks: Sequence[NDArray[np.uint16]]) -> CodecTrial:
    codec = make_codec(name)
    if codec is None:
        return CodecTrial(name, 1.0, 0.0, 0.0)
    payload = stored = 0
    writing = reading = 0.0
    for chunk in chunks:
        raw = chunk.reshape(-1).view(np.uint8)
        out = np.empty_like(raw)
        start = time.thread_time()
        encoded = codec.encode(raw)
        between = time.thread_time()
        codec.decode(np.frombuffer(encoded, np.uint8), out)
        end = time.thread_time()
        payload += raw.size
        stored += len(encoded)
        writing += between - start
        reading += end - between
    return CodecTrial(name, payload / stored, writing / payload * 1e9, reading / payload * 1e9)
