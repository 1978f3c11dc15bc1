"""Which samples are read when: orders and batches for training, the same on every rank, machine and version.

Everything follows from `(seed, epoch)` alone, through a hash and not through a library's random generator, whose stream may
change with its version. So a run that is continued elsewhere sees the same batches, whatever the number of workers. No torch
here; a `DataLoader` takes these as they are: `EpochSampler` as `sampler`, `TokenBudgetSampler` as `batch_sampler`.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

Batch = list[int]

OPEN_BINS: Final = 256
"""Batches being filled at the same time; the more, the fuller they get, and the less they are of one part of the order."""
WINDOW: Final = 4096
"""Samples that padded batches are sorted by length within."""


def epoch_order(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of 0 to `count - 1`, int64, which depends on nothing but its arguments."""
    (start,) = _mix(np.array([seed % 2**64], np.uint64))
    (start,) = _mix(np.array([(int(start) + epoch) % 2**64], np.uint64))
    keys = _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start)
    return np.argsort(keys, kind="stable").astype(np.int64)


class EpochSampler:
    """Positions of a dataset in an order of their own in each epoch, shared out among ranks.

    Every rank gets the same number: the order's first positions are repeated at its end where `count` is no multiple of
    `world_size`.

    Args:
        count: length of the dataset.
        seed: another seed gives other orders.
        shuffle: False for the dataset's own order.
        rank: of this process, from 0.
        world_size: number of processes.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, count: int, *, seed: int = 0, shuffle: bool = True, rank: int = 0, world_size: int = 1) -> None:
        _require(count >= 0, f"count is {count}; expected at least 0")
        _require_rank(rank, world_size)
        self._count = count
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order; call it before each epoch, on every rank alike."""
        self._epoch = epoch

    def __len__(self) -> int:
        return -(-self._count // self._world_size)

    def __iter__(self) -> Iterator[int]:
        order = epoch_order(self._count, self._seed, self._epoch) if self._shuffle else np.arange(self._count)
        return iter(
            np.resize(order, len(self) * self._world_size if self._count else 0)[self._rank :: self._world_size].tolist()
        )


class TokenBudgetSampler:
    """Batches of positions of a dataset, each within a budget of tokens, shared out among ranks.

    Every position comes once an epoch over all ranks together, and all ranks get the same number of batches: where that does
    not come out even, the batches with most samples are halved, and only with fewer samples than ranks are some repeated.

    Args:
        lengths: tokens of each position, at least 1; `HiddenStatesDataset.lengths`.
        max_tokens: a batch's budget: the sum of its lengths, or with `padded` its longest times its number.
        max_samples: so many samples a batch at most; default: no limit.
        padded: batches are for `collate_padded`: samples of like lengths come together.
        seed: another seed gives other batches.
        shuffle: False for the dataset's own order, in which neighbours share a batch.
        rank: of this process, from 0.
        world_size: number of processes.

    Raises:
        ValueError: an argument is out of range, or a sample is longer than the budget.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        max_tokens: int,
        *,
        max_samples: int | None = None,
        padded: bool = False,
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._lengths = np.asarray(lengths, np.int64)
        _require(self._lengths.ndim == 1, f"lengths have {self._lengths.ndim} dimensions; expected 1")
        _require(max_samples is None or max_samples >= 1, f"max_samples is {max_samples}; expected at least 1")
        _require_rank(rank, world_size)
        for wrong, expected in (
            (self._lengths < 1, "at least 1"),
            (self._lengths > max_tokens, f"at most max_tokens of a batch, {max_tokens}"),
        ):
            if wrong.any():
                position = int(np.argmax(wrong))
                raise ValueError(f"position {position} has {self._lengths[position]} tokens; expected {expected}")
        self._max_tokens = max_tokens
        self._max_samples = max_samples if max_samples is not None else len(self._lengths)
        self._padded = padded
        self._seed = seed
        self._shuffle = shuffle
        self._rank = rank
        self._world_size = world_size
        self._epoch = 0
        self._start = 0
        self._made: tuple[int, list[Batch]] | None = None

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Chooses the batches; call it before each epoch, on every rank alike.

        Args:
            epoch: number of the epoch.
            start: batches of this rank to leave out at the beginning, because an interrupted epoch has had them.
        """
        _require(start >= 0, f"start is {start}; expected at least 0")
        self._epoch = epoch
        self._start = start

    def __len__(self) -> int:
        return max(len(self._batches()) // self._world_size - self._start, 0)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches()[self._rank :: self._world_size][self._start :])

    def _batches(self) -> list[Batch]:
        """The epoch's batches of all ranks; kept, because a DataLoader asks for their number as well."""
        if self._made is None or self._made[0] != self._epoch:
            self._made = (self._epoch, self._make())
        return self._made[1]

    def _make(self) -> list[Batch]:
        count = len(self._lengths)
        order = epoch_order(count, self._seed, self._epoch) if self._shuffle else np.arange(count)
        if self._padded:
            batches = self._pad(order)
        elif self._shuffle:
            batches = self._pack(order)
        else:
            batches = self._cut(order)
        batches = _even(batches, self._world_size)
        if not self._shuffle:
            return batches
        return [batches[at] for at in epoch_order(len(batches), ~self._seed, self._epoch).tolist()]

    def _pack(self, order: NDArray[np.int64]) -> list[Batch]:
        """Each sample goes to the open batch that it fills best."""
        batches: list[Batch] = []
        spaces: list[tuple[int, int]] = []  # (room, batch) of the open ones, sorted
        for position, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            at = bisect_left(spaces, (length, -1))
            if at < len(spaces):
                room, number = spaces.pop(at)
            else:
                room, number = self._max_tokens, len(batches)
                batches.append([])
            batches[number].append(position)
            if room > length and len(batches[number]) < self._max_samples:
                insort(spaces, (room - length, number))
                if len(spaces) > OPEN_BINS:
                    del spaces[0]
        return batches

    def _cut(self, order: NDArray[np.int64]) -> list[Batch]:
        """Neighbours in the order share a batch while the budget lasts."""
        batches: list[Batch] = []
        used = longest = 0
        for position, length in zip(order.tolist(), self._lengths[order].tolist(), strict=True):
            longest = max(longest, length)
            cost = longest * (len(batches[-1]) + 1) if self._padded and batches else used + length
            if not batches or cost > self._max_tokens or len(batches[-1]) >= self._max_samples:
                batches.append([])
                used, longest = 0, length
            batches[-1].append(position)
            used += length
        return batches

    def _pad(self, order: NDArray[np.int64]) -> list[Batch]:
        """Samples of like lengths share a batch; without shuffling only neighbours do."""
        if not self._shuffle:
            return self._cut(order)
        windows = [order[start : start + WINDOW] for start in range(0, len(order), WINDOW)]
        return [batch for window in windows for batch in self._cut(window[np.argsort(self._lengths[window], kind="stable")])]


def _even(batches: list[Batch], ranks: int) -> list[Batch]:
    """Makes their number a multiple of `ranks`: see `TokenBudgetSampler`."""
    missing = -len(batches) % ranks if batches else 0
    batches = list(batches)
    largest = [(-len(batch), number) for number, batch in enumerate(batches)]
    heapq.heapify(largest)
    for _ in range(missing):
        size, number = heapq.heappop(largest)
        if size == -1:
            break
        half = -size // 2
        batches.append(batches[number][half:])
        batches[number] = batches[number][:half]
        heapq.heappush(largest, (-half, number))
        heapq.heappush(largest, (size + half, len(batches) - 1))
    whole = len(batches)
    return batches + [batches[at % whole] for at in range(-whole % ranks)] if batches else batches


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser: each bit of the result depends on each bit of the value, and no two values share a result."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _require_rank(rank: int, world_size: int) -> None:
    _require(0 <= rank < world_size, f"rank is {rank} of {world_size}; expected 0 to {world_size - 1}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
