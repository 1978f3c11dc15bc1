"""Orders and batches: complete, within their budget, the same everywhere."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.stores.samplers import EpochSampler, TokenBudgetSampler, epoch_order

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS = st.lists(st.integers(1, 50), max_size=120)


def test_the_order_never_changes_with_versions() -> None:
    """Written down, because a run that is continued years later on another machine must find its place."""
    assert epoch_order(8, seed=1, epoch=0).tolist() == [1, 6, 0, 2, 7, 5, 3, 4]
    assert epoch_order(8, seed=1, epoch=1).tolist() == [6, 0, 7, 4, 3, 1, 2, 5]
    assert epoch_order(8, seed=-5, epoch=3).tolist() == [4, 2, 6, 1, 3, 0, 7, 5]
    assert list(TokenBudgetSampler([3, 5, 2, 7, 4, 1, 6, 2], 8, seed=1)) == [[3], [6, 2], [1, 0], [7, 5, 4]]


@given(st.integers(0, 300), st.integers(), st.integers(0, 5))
def test_an_order_is_a_permutation(count: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(count, seed, epoch).tolist()) == list(range(count))


def test_orders_differ_between_epochs_and_seeds_and_are_no_rotation_of_each_other() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed in range(4) for epoch in range(4)]
    fixed = np.array([[np.mean(a == b) for b in orders] for a in orders])
    assert (fixed[~np.eye(16, dtype=bool)] < 0.02).all()
    assert abs(np.corrcoef(orders[0], np.arange(1000))[0, 1]) < 0.1


@given(st.integers(0, 50), st.integers(1, 6), st.booleans())
def test_ranks_share_an_epoch(count: int, ranks: int, shuffle: bool) -> None:
    samplers = [EpochSampler(count, seed=3, shuffle=shuffle, rank=rank, world_size=ranks) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(2)
    parts = [list(sampler) for sampler in samplers]
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers] == [-(-count // ranks)] * ranks
    together = list(chain.from_iterable(zip(*parts, strict=True)))
    assert sorted(together[:count]) == list(range(count))
    assert together[count:] == [together[at % max(count, 1)] for at in range(len(together) - count)]


@given(
    LENGTHS,
    st.integers(50, 200),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), st.integers(1, 7)),
    st.integers(0, 3),
)
def test_batches_hold_every_sample_once_within_the_budget(
    lengths: list[int], budget: int, ranks: int, padded: bool, shuffle: bool, most: int | None, epoch: int
) -> None:
    samplers = [
        TokenBudgetSampler(
            lengths, budget, max_samples=most, padded=padded, seed=7, shuffle=shuffle, rank=rank, world_size=ranks
        )
        for rank in range(ranks)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    parts = [list(sampler) for sampler in samplers]
    assert len({len(part) for part in parts}) == 1
    assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
    batches = list(chain.from_iterable(parts))
    for batch in batches:
        sizes = [lengths[position] for position in batch]
        assert 0 < (max(sizes) * len(sizes) if padded else sum(sizes)) <= budget
        assert most is None or len(batch) <= most
    seen = sorted(chain.from_iterable(batches))
    if len(lengths) >= ranks:
        assert seen == list(range(len(lengths)))
    else:
        assert set(seen) == set(range(len(lengths)))


def test_packed_batches_are_nearly_full() -> None:
    lengths = np.random.default_rng(0).integers(16, 2048, 4000)
    batches = list(TokenBudgetSampler(lengths, 8192))
    filled = np.array([lengths[batch].sum() for batch in batches]) / 8192
    assert filled.mean() > 0.98


def test_padded_batches_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(16, 2048, 8000)
    batches = list(TokenBudgetSampler(lengths, 16384, padded=True))
    real = sum(int(lengths[batch].sum()) for batch in batches)
    assert real / sum(int(lengths[batch].max()) * len(batch) for batch in batches) > 0.95


def test_epochs_differ_and_come_again() -> None:
    sampler = TokenBudgetSampler(list(range(1, 60)), 64, seed=1)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_without_shuffling_neighbours_share_a_batch() -> None:
    assert list(TokenBudgetSampler([4, 4, 4, 2, 9], 10, shuffle=False)) == [[0, 1], [2, 3], [4]]
    assert list(TokenBudgetSampler([1, 4, 4, 2, 9], 10, shuffle=False, padded=True)) == [[0, 1], [2, 3], [4]]


def test_an_interrupted_epoch_goes_on_where_it_was() -> None:
    for rank in range(2):
        sampler = TokenBudgetSampler(list(range(1, 60)), 64, rank=rank, world_size=2)
        sampler.set_epoch(4)
        whole = list(sampler)
        sampler.set_epoch(4, start=5)
        assert list(sampler) == whole[5:]
        assert len(sampler) == len(whole) - 5
        sampler.set_epoch(5)
        assert len(list(sampler)) == len(sampler) > 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: EpochSampler(-1), "count is -1; expected at least 0"),
        (lambda: EpochSampler(5, rank=2, world_size=2), "rank is 2 of 2; expected 0 to 1"),
        (lambda: TokenBudgetSampler([1], 8, rank=-1), "rank is -1 of 1; expected 0 to 0"),
        (lambda: TokenBudgetSampler([4, 0], 8), "position 1 has 0 tokens; expected at least 1"),
        (lambda: TokenBudgetSampler([4, 9], 8), "position 1 has 9 tokens; expected at most max_tokens of a batch, 8"),
        (lambda: TokenBudgetSampler([4], 8, max_samples=0), "max_samples is 0; expected at least 1"),
        (lambda: TokenBudgetSampler(np.ones((2, 2), np.int64), 8), "lengths have 2 dimensions; expected 1"),
        (lambda: TokenBudgetSampler([4], 8).set_epoch(0, start=-1), "start is -1; expected at least 0"),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
