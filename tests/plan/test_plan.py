"""The plan: the reference job's numbers, placement, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.commands.plan import describe
from hsx.core.layout import StoreLayout
from hsx.core.placement import RootSpace, Shares
from hsx.core.spec import CaptureSpec
from hsx.plan import TB, TIB, Bucket, plan

SPEC = CaptureSpec((4, 32, 60), "post_norm")
BIG = RootSpace("a", free=10**14, reserve=0, pending=0)


def lengths(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def test_reference_job() -> None:
    """37,312 samples of up to 8,192 tokens, 87.8 M tokens in all, four states of 7,168 in bf16."""
    samples, tokens = 37_312, 87_800_000
    body = np.full(samples, tokens // samples, dtype=np.int64)
    body[0], body[1] = 8192, body[1] - (8192 - tokens // samples)
    body[2 : 2 + tokens - int(body.sum())] += 1
    made = plan(body, SPEC, 7168, [BIG], 16 * 2**30)
    assert (made.samples, made.tokens, made.longest) == (samples, tokens, 8192)
    assert made.bytes_per_token == 57_344
    assert made.payload_bytes == 87_800_000 * 4 * 7168 * 2
    assert round(made.payload_bytes / TB, 2) == 5.03
    assert round(made.payload_bytes / TIB, 2) == 4.58
    # Padding of the last inner chunk, checksums and indexes: under three per cent at this length.
    assert 1.0 < made.file_bytes / made.payload_bytes < 1.03
    assert made.fits
    assert made.problems() == []


def test_files_are_what_the_layout_says() -> None:
    values = lengths(1, 63, 64, 65, 200)
    made = plan(values, SPEC, 8, [BIG], 2**30)
    layout = StoreLayout(5, 200, 4, 8)
    assert made.file_bytes == sum(layout.file_bytes(int(value)) for value in values)
    assert made.roots[0].nbytes == made.file_bytes
    assert made.roots[0].left == 10**14 - made.file_bytes


def test_buckets() -> None:
    assert plan(lengths(1, 2, 3, 4, 4, 5, 1000), SPEC, 8, [BIG], 2**30).buckets == (
        Bucket(1, 1, 1, 1),
        Bucket(2, 2, 1, 2),
        Bucket(3, 4, 3, 11),
        Bucket(5, 8, 1, 5),
        Bucket(513, 1024, 1, 1000),
    )


def test_roots_too_small() -> None:
    size = StoreLayout(3, 64, 4, 8).file_bytes(64)
    roots = [RootSpace("a", free=size + 10, reserve=10, pending=0), RootSpace("b", free=size, reserve=1, pending=0)]
    made = plan(lengths(64, 64, 64), SPEC, 8, roots, 2**30)
    assert (made.unplaced, [root.samples for root in made.roots]) == (2, [1, 0])
    assert not made.fits
    assert "room for 1 of 3 samples" in made.problems()[0]


def test_no_usable_root_takes_nothing() -> None:
    made = plan(lengths(1), SPEC, 8, [RootSpace("a", free=10**9, reserve=0, pending=0, usable=False)], 2**30)
    assert (made.unplaced, made.fits) == (1, False)


def test_staging_smaller_than_the_longest_dump() -> None:
    made = plan(lengths(10, 1000), SPEC, 7168, [BIG], 50_000_000)
    assert made.dump_bytes == 4096 + -(-1000 * (57_344 + 4) // 4096) * 4096
    assert not made.fits
    assert "staging.max_bytes is 50 MB" in made.problems()[0]


def test_hours_at_a_rate() -> None:
    assert plan(lengths(3600), SPEC, 8, [BIG], 2**30).hours is None
    made = plan(lengths(3600, 3600), SPEC, 8, [BIG], 2**30, tokens_per_s=2.0, rate_source="given")
    assert (made.hours, made.rate_source) == (1.0, "given")


def test_plan_is_json() -> None:
    made = plan(lengths(5, 70), SPEC, 8, [BIG], 2**30, rejected=2, tokens_per_s=10.0, rate_source="measured")
    document = json.loads(json.dumps(made.as_json()))
    assert document["rejected"] == 2
    assert document["fits"] is True
    assert document["problems"] == []
    assert document["roots"][0]["name"] == "a"
    assert document["payload_tb"] == 75 * 64 / TB


def test_smaller_chunks_are_told_where_they_take_less() -> None:
    layout = StoreLayout(3, 100, 4, 1024)
    made = plan(lengths(18, 18, 100), SPEC, 1024, [BIG], 2**30)
    assert made.chunk_tokens == 64
    for chunk_tokens, nbytes in made.smaller_chunks.items():
        smaller = replace(layout, chunk_tokens=chunk_tokens)
        assert nbytes == 2 * smaller.file_bytes(18) + smaller.file_bytes(100) < made.file_bytes
    assert list(made.smaller_chunks) == [32, 16, 8]
    as_made = plan(lengths(18, 18, 100), SPEC, 1024, [BIG], 2**30, chunk_tokens=32)
    assert as_made.file_bytes == made.smaller_chunks[32]
    # 16 have most of what there is to be had.
    saved = f"{1 - made.smaller_chunks[16] / made.file_bytes:.0%} less"
    assert f"with storage.chunk_tokens = 16 they would take 1.5 MB, {saved}" in describe(made, None)
    assert "chunk_tokens" not in describe(plan(lengths(1000, 2000), SPEC, 1024, [BIG], 2**30), None)
    # Chunks of 32 tokens would take as much for samples of 40 as those of 64, which says nothing of smaller ones.
    of_40 = plan(lengths(40, 40), SPEC, 1024, [BIG], 2**30)
    assert list(of_40.smaller_chunks) == [16, 8]
    assert "with storage.chunk_tokens = 8 they would take" in describe(of_40, None)
    # A codec leaves nothing of the fill, and whole chunks have none.
    assert plan(lengths(18, 18, 100), SPEC, 1024, [BIG], 2**30, codec="zstd").smaller_chunks == {}
    assert plan(lengths(64, 128), SPEC, 1024, [BIG], 2**30).smaller_chunks == {}


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=60),
    rooms=st.lists(st.tuples(st.integers(0, 300_000), st.integers(0, 5000), st.booleans()), min_size=1, max_size=4),
)
def test_shares_are_those_of_the_placement_rule(sizes: list[int], rooms: list[tuple[int, int, bool]]) -> None:
    roots = [RootSpace(str(i), free, reserve, 0, usable) for i, (free, reserve, usable) in enumerate(rooms)]
    made = plan(lengths(*sizes), SPEC, 8, roots, 2**30)
    layout = StoreLayout(len(sizes), max(sizes), 4, 8)
    pending = dict.fromkeys((root.name for root in roots), 0)
    unplaced = 0
    shares = Shares()
    for size in sizes:
        now = [RootSpace(root.name, root.free, root.reserve, pending[root.name], root.usable) for root in roots]
        name = shares.choose(now, layout.file_bytes(size))
        if name is None:
            unplaced += 1
        else:
            pending[name] += layout.file_bytes(size)
    assert {root.name: root.nbytes for root in made.roots} == pending
    assert made.unplaced == unplaced


@pytest.mark.parametrize("values", [lengths(1), lengths(8192)])
def test_one_sample(values: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    made = plan(values, SPEC, 8, [BIG], 2**30)
    assert (made.samples, made.tokens, made.roots[0].samples) == (1, int(values[0]), 1)
