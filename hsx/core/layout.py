"""Where the bytes of a sample lie in its shard: pure arithmetic.

A shard is one file of a Zarr v3 array with the codec `sharding_indexed`: the states of one sample, cut into inner chunks of
`chunk_tokens` tokens, with an index at the end. hsx writes it as

    block 0 | block 1 | ... | record | zeros | index

where a block is the chunk's payload, its crc32c, and zeros up to a multiple of `PAGE`, so that every payload begins on a
page (O_DIRECT) and the file's size is a multiple of it too. With a codec, the payload is compressed and blocks differ in size.
The tail - record, zeros, index - begins on a page. The record (`hsx.core.shard_record`) says whose states these are; no Zarr
reader looks at it. The index has an (offset, nbytes) pair of little-endian uint64 for each inner chunk of the shard, `MISSING`
twice for those beyond the sample's tokens, and then its own crc32c.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from hsx.core.spec import BF16_BYTES

PAGE: Final = 4096
CHUNK_TOKENS: Final = 64
"""Tokens of an inner chunk, unless a store has others (`storage.chunk_tokens`)."""
LEAST_CHUNK_TOKENS: Final = 8
CRC_BYTES: Final = 4
ENTRY_BYTES: Final = 16
MISSING: Final = 2**64 - 1
NAN_BITS: Final = 0x7FC0
"""bf16 bits of the fill value, a quiet NaN; it fills the last inner chunk after the sample's last token."""
CODECS: Final = ("none", "blosc", "zstd")
"""What may compress inner chunks; how, says `hsx.stores.codec`."""
KEPT: Final = ("all", "loss")
"""Which tokens of a sample are stored: all, or those where the loss mask is set and their neighbours
(`hsx.stores.selection`)."""
DTYPES: Final = ("bf16", "fp8_e4m3")
"""What the values are stored as; fp8, with a scale for each row, is that of `hsx.stores.fp8`."""
SCALE_BYTES: Final = 4
FP8_NAN_BITS: Final = 0x7F7F
"""Two bytes of the fill value of fp8 stores, e4m3's NaN."""
_RECORD_BYTES: Final = 640
_REDUCED_BYTES: Final = 160
"""What the record of a reduced shard has more: `rows`, `kept`, `dtype`."""
_KEY = re.compile(r"c\.(0|[1-9][0-9]{0,17})\.0\.0\.0")  # an int64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def shard_key(index: int) -> str:
    """File name of sample `index`'s shard: the array's chunk key with separator "."."""
    return f"c.{index}.0.0.0"


def index_of_key(name: str) -> int | None:
    """The sample whose shard is named `name`; None where `name` is no shard's."""
    match = _KEY.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True)
class StoreLayout:
    """The shape of a store's `hidden_states`. What follows from it is computed once: reading a small sample asks thirty times.

    Attributes:
        samples: number of samples, the array's first dimension.
        max_tokens: tokens of the longest sample, the second.
        states: L, vectors per token, the third.
        hidden_size: H, the fourth.
        chunk_tokens: tokens of an inner chunk.
        codec: out of `CODECS`: how inner chunks are compressed.
        records: shards have a record; those of stores in the format `hsx-store-1` have none.
        kept: out of `KEPT`: which tokens have rows in their shard; a shard's rows are those tokens' in order.
        context: with `kept` "loss", how far from a token of the loss mask a token is stored, too.
        dtype: out of `DTYPES`.
    """

    samples: int
    max_tokens: int
    states: int
    hidden_size: int
    chunk_tokens: int = CHUNK_TOKENS
    codec: str = "none"
    records: bool = True
    kept: str = "all"
    context: int = 0
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens", "states", "hidden_size", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if self.codec not in CODECS:
            raise ValueError(f"codec is {self.codec!r}; expected one of {', '.join(CODECS)}")
        if self.kept not in KEPT or self.dtype not in DTYPES:
            raise ValueError(f"kept is {self.kept!r}, dtype {self.dtype!r}; expected one of {KEPT}, one of {DTYPES}")
        if self.context < 0 or (self.context and not self.selects):
            raise ValueError(f"context is {self.context} with kept {self.kept!r}; expected at least 0, and 0 where all is kept")
        if self.dtype != "bf16" and self.hidden_size % 2:
            raise ValueError(f"hidden_size is {self.hidden_size}; expected an even number for {self.dtype}")
        if self.reduced and not self.records:
            raise ValueError("shards without records hold all tokens as bf16")

    @cached_property
    def selects(self) -> bool:
        """Whether not every token has a row."""
        return self.kept != "all"

    @property
    def reduced(self) -> bool:
        """Whether less is stored than was captured: a selection of tokens, or fewer bits."""
        return self.selects or self.dtype != "bf16"

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one state of one token: H bf16 values; or H fp8 values and then their scale, a float32."""
        return self.hidden_size * BF16_BYTES if self.dtype == "bf16" else self.hidden_size + SCALE_BYTES

    @cached_property
    def row_words(self) -> int:
        """The same in 16-bit words, in which shards are read and written."""
        return self.row_bytes // 2

    @cached_property
    def fill_bits(self) -> int:
        """16 bits of the fill value."""
        return NAN_BITS if self.dtype == "bf16" else FP8_NAN_BITS

    @property
    def width(self) -> int:
        """Elements of one state of one token in the array: H of bf16; bytes (`row_bytes`) in an fp8 store."""
        return self.hidden_size if self.dtype == "bf16" else self.row_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the array: [samples, max_tokens, L, width]."""
        return (self.samples, self.max_tokens, self.states, self.width)

    @property
    def shard_shape(self) -> tuple[int, int, int, int]:
        """Shape of a shard: [1, max_tokens rounded up to whole inner chunks, L, width]."""
        return (1, round_up(self.max_tokens, self.chunk_tokens), self.states, self.width)

    @property
    def chunk_shape(self) -> tuple[int, int, int, int]:
        """Shape of an inner chunk: [1, chunk_tokens, L, width]."""
        return (1, self.chunk_tokens, self.states, self.width)

    @cached_property
    def shard_chunks(self) -> int:
        """Inner chunks of a shard, and entries of its index."""
        return self.shard_shape[1] // self.chunk_tokens

    @cached_property
    def token_bytes(self) -> int:
        """Payload bytes of one token."""
        return self.states * self.row_bytes

    @cached_property
    def chunk_bytes(self) -> int:
        """Payload bytes of an inner chunk, uncompressed and without its crc32c."""
        return self.chunk_tokens * self.token_bytes

    @cached_property
    def block_bytes(self) -> int:
        """Bytes from the beginning of one inner chunk to that of the next; with a codec, the most that it can be."""
        return round_up(self.encoded_bytes + CRC_BYTES, PAGE)

    @cached_property
    def encoded_bytes(self) -> int:
        """The most bytes that an inner chunk can take as it is stored, without its crc32c.

        What does not compress grows: by a header with blosc, by zstd's bound with zstd.
        """
        size = self.chunk_bytes
        if self.codec == "blosc":
            return size + 16
        if self.codec == "zstd":
            return size + (size >> 8) + (max((1 << 17) - size, 0) >> 11) + 64
        return size

    @cached_property
    def index_bytes(self) -> int:
        """Bytes of the index with its crc32c; they are the last of the file."""
        return self.shard_chunks * ENTRY_BYTES + CRC_BYTES

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of the record, with the zeros that fill it up; 0 where shards have none."""
        size = _RECORD_BYTES + 6 * self.states + (_REDUCED_BYTES if self.reduced else 0)
        return round_up(size, 512) if self.records else 0

    @cached_property
    def tail_bytes(self) -> int:
        """Bytes of what follows the blocks: record, zeros, index. It begins on a page and ends with the file."""
        return round_up(self.record_bytes + self.index_bytes, PAGE)

    def check_tokens(self, tokens: int) -> None:
        """Raises ValueError unless a sample of `tokens` fits a shard."""
        if not 1 <= tokens <= self.max_tokens:
            raise ValueError(f"sample has {tokens} tokens; expected 1 to {self.max_tokens}")

    def chunks(self, tokens: int) -> int:
        """Inner chunks that `tokens` rows fill, the last one perhaps partly."""
        return -(-tokens // self.chunk_tokens)

    def file_bytes(self, tokens: int) -> int:
        """Size of a shard file of `tokens` rows; with a codec, the most that it can be."""
        return self.chunks(tokens) * self.block_bytes + self.tail_bytes
