"""Shard arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.layout import PAGE, StoreLayout, index_of_key, shard_key

sizes = st.integers(1, 5000)


@given(samples=sizes, max_tokens=sizes, states=st.integers(1, 8), hidden=sizes, tokens=sizes)
def test_blocks_lie_on_pages_and_hold_their_chunk(samples: int, max_tokens: int, states: int, hidden: int, tokens: int) -> None:
    layout = StoreLayout(samples, max_tokens, states, hidden)
    tokens = min(tokens, max_tokens)
    assert layout.block_bytes % PAGE == 0
    assert layout.block_bytes >= layout.chunk_bytes + 4
    assert layout.shard_shape[1] - 64 < max_tokens <= layout.shard_shape[1]
    assert layout.chunks(tokens) * 64 - 64 < tokens <= layout.chunks(tokens) * 64
    assert layout.file_bytes(tokens) % PAGE == 0
    assert layout.file_bytes(tokens) >= layout.chunks(tokens) * layout.block_bytes + layout.index_bytes


def test_reference_job_is_as_large_as_reckoned() -> None:
    layout = StoreLayout(37312, 8192, 4, 7168)
    assert layout.token_bytes == 57344
    assert layout.index_bytes == 128 * 16 + 4
    assert layout.file_bytes(8192) / (8192 * 57344) < 1.002


@given(st.integers(0, 10**9))
def test_key_names_its_sample(index: int) -> None:
    assert index_of_key(shard_key(index)) == index


@pytest.mark.parametrize(
    "name",
    ["zarr.json", "c.1.0.0.0.hsx1-deadbeef-1-1-5.partial", "c.01.0.0.0", "c.1.0.0", f"c.1{'0' * 18}.0.0.0", "hsx-root.json"],
)
def test_other_names_are_no_shards(name: str) -> None:
    assert index_of_key(name) is None


@pytest.mark.parametrize("tokens", [0, 101])
def test_sample_that_does_not_fit_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match=f"sample has {tokens} tokens; expected 1 to 100"):
        StoreLayout(1, 100, 2, 8).check_tokens(tokens)


def test_empty_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="samples is 0; expected at least 1"):
        StoreLayout(0, 100, 2, 8)
