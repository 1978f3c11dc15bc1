"""Which tokens are kept: by a definition that looks at each pair of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hsx.stores.selection import StoredPrompts, digest, kept_counts, kept_positions, stored_counts
from hsx.stores.tokens import TokenTable
from hsx.testing.stores import build_store, random_states
from hsx.twins import find_twins

if TYPE_CHECKING:
    from pathlib import Path

MASK = st.lists(st.integers(0, 1), min_size=1, max_size=40)
CONTEXT = st.integers(0, 50)


def near(mask: list[int], context: int) -> list[int]:
    return [at for at in range(len(mask)) if any(mask[other] and abs(other - at) <= context for other in range(len(mask)))]


@given(MASK, CONTEXT)
def test_positions_are_those_near_the_mask(mask: list[int], context: int) -> None:
    assert kept_positions(np.array(mask, np.uint8), context).tolist() == near(mask, context)


@given(st.lists(MASK, min_size=1, max_size=8), CONTEXT)
def test_counts_never_reach_into_another_sample(masks: list[list[int]], context: int) -> None:
    offsets = np.cumsum([0, *map(len, masks)])
    found = kept_counts(np.concatenate([np.array(mask, np.uint8) for mask in masks]), offsets, context)
    assert found.tolist() == [len(near(mask, context)) for mask in masks]


def test_a_digest_is_of_the_positions() -> None:
    assert digest(np.array([1, 5])) == digest(np.array([1, 5], np.int32)) != digest(np.array([1, 6]))


def test_samples_with_one_prompt_and_other_masks_share_no_shard(tmp_path: Path) -> None:
    """Unless the very same tokens are kept of them."""
    rng, ids = np.random.default_rng(0), np.arange(9, dtype=np.int32)
    masks = [np.array([at in kept for at in range(9)], np.uint8) for kept in ((3,), (5,), (2, 4), (3,), (3, 4, 5))]
    states = [random_states(rng, 9, 2, 8) for _ in masks]
    built = build_store(tmp_path, states, input_ids=[ids] * 5, masks=masks, kept="loss", context=1)
    table, layout = TokenTable(built.info.path), built.info.layout
    assert stored_counts(table, layout).tolist() == [3, 3, 5, 3, 5]
    assert find_twins(table).tolist() == [0] * 5
    assert find_twins(StoredPrompts(table, layout)).tolist() == [0, -1, -1, 0, -1]
