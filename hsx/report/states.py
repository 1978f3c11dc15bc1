"""What stored states look like: norms, outlier channels and heat maps of a drawn share of the samples, in bounded memory.

Read through `hsx.stores.reader.Store`, so every inner chunk is proved by its crc32c and every shard by its own record. The draw
depends on the seed and on which samples are committed, and on nothing else.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hsx.stores.reader import Store

CHUNKS: Final = 8
"""Inner chunks that are read of each drawn sample: its first one, and others by chance."""
HEAT_MAPS: Final = 4
HEAT_TOKENS: Final = 16_384
"""Tokens of a heat map at most: the first ones of a longer sample."""
MOST_SAMPLES: Final = 4096
TRIES: Final = 4
"""So many times the samples asked for are tried, where shards cannot be read."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A committed sample that was drawn and could not be read; kind and message of the error."""

    index: int
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Heat:
    """Norms of one sample.

    Attributes:
        index: the sample.
        tokens: its whole length.
        stored: how many of its tokens have states in the store.
        norms: float32 [rows, L], of the first of those; 0 for one that is not finite.
    """

    index: int
    tokens: int
    stored: int
    norms: NDArray[np.float32]


@dataclass(slots=True)
class DrawnStates:
    """What was read.

    Attributes:
        names: of the L states.
        samples: indices of the samples that were read, in the order of the draw.
        unreadable: those that could not be.
        norms: float32 [n, L]: Euclidean norms of all rows read, but for each sample's first token.
        first: float32 [m, L]: norms of the first tokens, one of each sample that has it stored.
        mean_square: float64 [L, H]: per channel, over the rows of `norms`.
        largest: float32 [L, H]: largest absolute value, over the same rows.
        nbytes: payload bytes that were read.
        heats: a few samples in full.
        not_finite: rows with a norm that is not finite; they are in no other number.
    """

    names: tuple[str, ...]
    samples: list[int]
    unreadable: list[Unreadable]
    norms: NDArray[np.float32]
    first: NDArray[np.float32]
    mean_square: NDArray[np.float64]
    largest: NDArray[np.float32]
    nbytes: int = 0
    heats: list[Heat] = field(default_factory=list)
    not_finite: int = 0


def memory_bound(store: Store, samples: int) -> int:
    """Bytes that `draw_states` holds at most, about: it does not depend on the length of samples or on their number."""
    layout = store.info.layout
    chunk = (CHUNKS + 12) * layout.chunk_bytes  # the bits of a sample, and of one chunk float32 and what is reckoned from it
    norms = 4 * layout.states * samples * (CHUNKS * layout.chunk_tokens + 1)
    return chunk + 2 * norms + 12 * layout.states * layout.hidden_size + 4 * layout.states * HEAT_TOKENS * HEAT_MAPS


def draw_states(store: Store, samples: int, seed: int) -> DrawnStates:
    """Reads up to `samples` committed samples, drawn by `seed`.

    A sample that cannot be read is listed, and another one drawn in its place, up to `TRIES` times as many in all.
    """
    totals = _Totals(store)
    committed = store.committed
    order = random.Random(seed).sample(range(len(committed)), min(len(committed), samples * TRIES))
    for position in order:
        if len(totals.samples) == samples:
            break
        index = int(committed[position])
        try:
            # All of a sample or nothing of it: one that breaks off in the middle would weigh less than it says.
            totals.add(index, list(_drawn_chunks(store, index, seed)))
        except RunError as error:
            totals.unreadable.append(Unreadable(index, error.kind, error.message))
    found = totals.result()
    found.heats = _heat_maps(store, found)
    return found


class _Totals:
    """Adds up rows, sample by sample."""

    def __init__(self, store: Store) -> None:
        layout = store.info.layout
        self.names = store.state_names
        self.samples: list[int] = []
        self.unreadable: list[Unreadable] = []
        self._norms: list[NDArray[np.float32]] = []
        self._first: list[NDArray[np.float32]] = []
        self._squares = np.zeros((layout.states, layout.hidden_size))
        self._largest = np.zeros((layout.states, layout.hidden_size), np.float32)
        self._rows = self._nbytes = self._not_finite = 0

    def add(self, index: int, chunks: list[tuple[int, NDArray[np.uint16]]]) -> None:
        for start, bits in chunks:
            self._nbytes += bits.nbytes
            values = _floats(bits)
            norms = norms_of(values)
            sound = np.logical_and.reduce(np.isfinite(norms), axis=1)
            self._not_finite += int((~sound).sum())
            if start == 0 and sound[0]:
                self._first.append(norms[:1])
            if start == 0:
                sound[0] = False
            kept = values[sound]
            self._norms.append(norms[sound])
            for row in range(self._squares.shape[0]):  # state by state: float64 of one state at a time
                column = kept[:, row].astype(np.float64)
                self._squares[row] += np.einsum("th,th->h", column, column)
            if len(kept):
                np.maximum(self._largest, np.abs(kept).max(axis=0), out=self._largest)
            self._rows += len(kept)
        self.samples.append(index)

    def result(self) -> DrawnStates:
        empty = np.empty((0, len(self.names)), np.float32)
        return DrawnStates(
            names=self.names,
            samples=self.samples,
            unreadable=self.unreadable,
            norms=np.concatenate([empty, *self._norms]),
            first=np.concatenate([empty, *self._first]),
            mean_square=self._squares / max(self._rows, 1),
            largest=self._largest,
            nbytes=self._nbytes,
            not_finite=self._not_finite,
        )


def _drawn_chunks(store: Store, index: int, seed: int) -> Iterator[tuple[int, NDArray[np.uint16]]]:
    """(first token, bits) of the inner chunks that are read of a sample."""
    size, positions = store.info.layout.chunk_tokens, store.positions_numpy(index)
    count = store.info.layout.chunks(len(positions))
    others = random.Random(f"{seed}-{index}").sample(range(1, count), min(CHUNKS, count) - 1)
    for chunk in [0, *sorted(others)]:
        tokens = positions[chunk * size : (chunk + 1) * size]
        yield int(tokens[0]), _bits_of(store, index, tokens)


def _bits_of(store: Store, index: int, tokens: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The rows of `tokens`, of which one follows the other in the store: bf16 bits [rows, L, H]."""
    return store.hidden_states_numpy(index, int(tokens[0]), int(tokens[-1]) + 1)


def _heat_maps(store: Store, found: DrawnStates) -> list[Heat]:
    """Samples of different lengths out of those that were read."""
    by_length = sorted(found.samples, key=lambda index: (store.tokens(index), index))
    count = min(HEAT_MAPS, len(by_length))
    heats = []
    for number in range(count):
        index = by_length[(2 * number + 1) * len(by_length) // (2 * count)]
        try:
            heats.append(_heat(store, index))
        except RunError as error:  # a chunk that was not read before, or a sample that a run has just taken back
            found.unreadable.append(Unreadable(index, error.kind, error.message))
    return heats


def _heat(store: Store, index: int) -> Heat:
    positions, size = store.positions_numpy(index), store.info.layout.chunk_tokens
    shown = positions[:HEAT_TOKENS]
    norms = np.empty((len(shown), store.info.layout.states), np.float32)
    for start in range(0, len(shown), size):
        norms[start : start + size] = norms_of(_floats(_bits_of(store, index, shown[start : start + size])))
    norms[~np.isfinite(norms)] = 0.0
    return Heat(index, store.tokens(index), len(positions), norms)


def _floats(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def norms_of(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Euclidean norm of each row: float32 [tokens, L] from float32 [tokens, L, H]; the squares of bf16 need float64.

    Infinite where it is beyond float32, and NaN where a value is.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        squares = [np.square(values[:, row], dtype=np.float64).sum(axis=1) for row in range(values.shape[1])]
        found: NDArray[np.float32] = np.sqrt(np.stack(squares, axis=1)).astype(np.float32)
    return found
