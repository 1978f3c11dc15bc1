"""What a job will take: tokens, bytes per root, staging, hours. Arithmetic on the samples' lengths; nothing is written."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.amounts import in_words, in_words_and_bytes
from hsx.core.dump import ID_BYTES
from hsx.core.layout import CHUNK_TOKENS, LEAST_CHUNK_TOKENS, PAGE, StoreLayout, round_up
from hsx.core.placement import Shares
from hsx.core.spec import CaptureSpec, bytes_per_token
from hsx.index import bucket_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from hsx.core.placement import RootSpace

TB: Final = 10**12
TIB: Final = 2**40


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples of `lower` to `upper` tokens."""

    lower: int
    upper: int
    samples: int
    tokens: int


@dataclass(frozen=True, slots=True)
class RootPlan:
    """One root's part; sizes in bytes.

    Attributes:
        name: the root.
        free: free on its file system now.
        reserve: what must stay free.
        samples: shards that placement gives it.
        nbytes: their files, with checksums and padding.
    """

    name: str
    free: int
    reserve: int
    samples: int
    nbytes: int

    @property
    def left(self) -> int:
        """Bytes above the reserve when the job is done."""
        return self.free - self.reserve - self.nbytes


@dataclass(frozen=True, slots=True)
class Plan:
    """The forecast of a job; sizes in bytes.

    Attributes:
        samples: to be extracted.
        tokens: of all of them.
        longest: tokens of the longest.
        rejected: bad rows left out.
        buckets: samples and tokens by length, shortest first.
        stored_tokens: those of them that are stored.
        bytes_per_token: payload of one stored token.
        payload_bytes: payload of all of them.
        file_bytes: shard files of all samples, with checksums, padding and indexes.
        roots: each root's part.
        unplaced: samples that no root has room for.
        dump_bytes: the largest dump.
        staging_bytes: the budget for dumps.
        tokens_per_s: the rate that `hours` is reckoned with, if one is known.
        rate_source: where that rate comes from: `given`, `measured` or "".
        codec: how inner chunks are compressed; what that saves is not known before, and file sizes are the most that can be.
        dtype: what values are stored as.
        shared: further samples, in none of these numbers, whose prompts are identical with another one's: they take nothing.
        shared_tokens: their tokens, which are not prefilled.
        shared_bytes: what their shard files would take.
        chunk_tokens: tokens of an inner chunk; a shard is filled up to a multiple.
        smaller_chunks: bytes of all shard files with fewer, by how many; only those that take less than with any more.
    """

    samples: int
    tokens: int
    longest: int
    rejected: int
    buckets: tuple[Bucket, ...]
    stored_tokens: int
    bytes_per_token: int
    payload_bytes: int
    file_bytes: int
    roots: tuple[RootPlan, ...]
    unplaced: int
    dump_bytes: int
    staging_bytes: int
    tokens_per_s: float | None
    rate_source: str
    codec: str
    dtype: str = "bf16"
    shared: int = 0
    shared_tokens: int = 0
    shared_bytes: int = 0
    chunk_tokens: int = CHUNK_TOKENS
    smaller_chunks: Mapping[int, int] = field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Every sample has a root, and the largest dump is within the staging budget."""
        return self.unplaced == 0 and self.dump_bytes <= self.staging_bytes

    @property
    def hours(self) -> float | None:
        """Time that all tokens take at the rate; None without one."""
        return self.tokens / self.tokens_per_s / 3600 if self.tokens_per_s else None

    def problems(self) -> list[str]:
        """Sentences on what does not fit; empty when everything does."""
        found = []
        if self.unplaced:
            room = sum(max(0, root.free - root.reserve) for root in self.roots)
            found.append(
                f"the roots have room for {self.samples - self.unplaced} of {self.samples} samples: "
                f"{in_words(self.file_bytes)} are needed, {in_words(room)} are free above the reserves"
            )
        if self.dump_bytes > self.staging_bytes:
            found.append(
                f"staging.max_bytes is {in_words(self.staging_bytes)}; the longest sample ({self.longest} tokens) has a dump "
                f"of {in_words_and_bytes(self.dump_bytes)}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """The plan as JSON values, with what is derived from it."""
        return {
            **asdict(self),
            "roots": [{**asdict(root), "left": root.left} for root in self.roots],
            "payload_tb": self.payload_bytes / TB,
            "payload_tib": self.payload_bytes / TIB,
            "file_tb": self.file_bytes / TB,
            "file_tib": self.file_bytes / TIB,
            "hours": self.hours,
            "fits": self.fits,
            "problems": self.problems(),
        }


def plan(
    lengths: NDArray[np.int64],
    capture: CaptureSpec,
    hidden_size: int,
    roots: Sequence[RootSpace],
    staging_bytes: int,
    *,
    rejected: int = 0,
    tokens_per_s: float | None = None,
    rate_source: str = "",
    codec: str = "none",
    dtype: str = "bf16",
    chunk_tokens: int = CHUNK_TOKENS,
    rows: NDArray[np.int64] | None = None,
    shared: NDArray[np.int64] | None = None,
    shared_rows: NDArray[np.int64] | None = None,
) -> Plan:
    """Plans a job.

    Args:
        lengths: int64 [samples], tokens of each sample in the order of the store; at least one sample.
        capture: what is taken of each token.
        hidden_size: H of the model.
        roots: name, free bytes and reserve of each root; `pending` is 0 for a fresh job.
        staging_bytes: `staging.max_bytes`.
        rejected: bad rows that were left out.
        tokens_per_s: a rate, if one is known.
        rate_source: `given` or `measured`.
        codec: `storage.codec`.
        dtype: `storage.dtype`.
        chunk_tokens: `storage.chunk_tokens`.
        rows: int64 [samples], tokens of each sample that are stored; None: all.
        shared: tokens of the samples that are committed with another one, whose prompt is the same; not among `lengths`.
        shared_rows: those of them that would be stored; None: all.
    """
    longest = int(lengths.max())
    layout = StoreLayout(
        len(lengths), longest, capture.states, hidden_size, chunk_tokens=chunk_tokens, codec=codec, dtype=dtype
    )
    stored = lengths if rows is None else rows
    shards = _shards(layout, stored)
    saved = np.empty(0, np.int64) if shared is None else shared
    placed, unplaced = _place(roots, shards)
    token_bytes = layout.token_bytes
    dump_bytes = bytes_per_token(capture, hidden_size) + ID_BYTES
    return Plan(
        samples=len(lengths),
        tokens=int(lengths.sum()),
        longest=longest,
        rejected=rejected,
        buckets=_buckets(lengths),
        stored_tokens=int(stored.sum()),
        bytes_per_token=token_bytes,
        payload_bytes=int(stored.sum()) * token_bytes,
        file_bytes=sum(shards),
        chunk_tokens=chunk_tokens,
        smaller_chunks=_smaller_chunks(layout, stored),
        roots=placed,
        unplaced=unplaced,
        # a page of header, the states, and the ids, on whole pages of the tmpfs
        dump_bytes=PAGE + round_up(longest * dump_bytes, PAGE),
        staging_bytes=staging_bytes,
        tokens_per_s=tokens_per_s,
        rate_source=rate_source if tokens_per_s else "",
        codec=codec,
        dtype=dtype,
        shared=len(saved),
        shared_tokens=int(saved.sum()),
        shared_bytes=sum(_shards(layout, saved if shared_rows is None else shared_rows)),
    )


def _shards(layout: StoreLayout, lengths: NDArray[np.int64]) -> list[int]:
    """Size of each shard file: it depends on its number of inner chunks alone."""
    chunks = -(-lengths // layout.chunk_tokens)
    sizes = {count: _shard(layout, count) for count in np.unique(chunks).tolist()}
    return [sizes[count] for count in chunks.tolist()]


def _shard(layout: StoreLayout, chunks: int) -> int:
    return layout.file_bytes(min(chunks * layout.chunk_tokens, layout.max_tokens))  # a whole last one would pass the longest


def _total(layout: StoreLayout, lengths: NDArray[np.int64]) -> int:
    """Bytes of all shard files."""
    chunks, counts = np.unique(-(-lengths // layout.chunk_tokens), return_counts=True)
    return sum(_shard(layout, each) * count for each, count in zip(chunks.tolist(), counts.tolist(), strict=True))


def _smaller_chunks(layout: StoreLayout, lengths: NDArray[np.int64]) -> dict[int, int]:
    """Bytes of all shards with fewer tokens to an inner chunk, by how many, where they take less than with any more.

    Half as many need not: 40 tokens are filled up to 64 with 64 and with 32, and to 48 with 16. None with a codec, which leaves
    next to nothing of the fill.
    """
    found: dict[int, int] = {}
    least, chunk_tokens = _total(layout, lengths), layout.chunk_tokens // 2
    while chunk_tokens >= LEAST_CHUNK_TOKENS and layout.codec == "none":
        nbytes = _total(replace(layout, chunk_tokens=chunk_tokens), lengths)
        if nbytes < least:
            found[chunk_tokens] = least = nbytes
        chunk_tokens //= 2
    return found


def _place(roots: Sequence[RootSpace], shards: list[int]) -> tuple[tuple[RootPlan, ...], int]:
    """Deals the shards out one after the other, as a run does while every disk is as fast as the others."""
    shares = Shares()
    spaces = {root.name: root for root in roots}
    count, nbytes = Counter[str](), Counter[str]()
    unplaced = 0
    for size in shards:
        name = shares.choose(spaces.values(), size)
        if name is None:
            unplaced += 1
            continue
        spaces[name] = replace(spaces[name], pending=spaces[name].pending + size)
        count[name] += 1
        nbytes[name] += size
    return tuple(RootPlan(root.name, root.free, root.reserve, count[root.name], nbytes[root.name]) for root in roots), unplaced


def _buckets(lengths: NDArray[np.int64]) -> tuple[Bucket, ...]:
    distinct, counts = np.unique(lengths, return_counts=True)
    samples: dict[int, int] = {}
    tokens: dict[int, int] = {}
    for length, count in zip(distinct.tolist(), counts.tolist(), strict=True):
        upper = bucket_of(length)
        samples[upper] = samples.get(upper, 0) + count
        tokens[upper] = tokens.get(upper, 0) + length * count
    return tuple(Bucket(upper // 2 + 1 if upper > 1 else 1, upper, samples[upper], tokens[upper]) for upper in sorted(samples))
