"""A shard says whose it is: its record, what is refused by it, and stores from before there were records."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hsx
from hsx.core.layout import PAGE, StoreLayout, shard_key
from hsx.core.shard_record import MAGIC, ShardRecord, decode, encode, is_plainly_of
from hsx.stores.checksum import crc32c_bytes, ids_digest
from hsx.stores.shard_reader import ShardError, ShardFile, read_record
from hsx.testing.stores import EPOCH, BuiltStore, build_store, random_states

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LENGTHS = (70, 70, 5)


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Three samples on one root, the first two of one length."""
    rng = np.random.default_rng(3)
    return build_store(tmp_path, [random_states(rng, tokens, 3, 32) for tokens in LENGTHS], roots=["a"])


def layout_of(states: int) -> StoreLayout:
    return StoreLayout(2**40, 2**24, states, 2**20)


@given(
    st.integers(0, 2**40 - 1),
    st.integers(1, 2**24),
    st.lists(st.integers(1, 9999), max_size=40, unique=True).map(sorted).map(tuple),
    st.integers(0, 2**63),
)
def test_any_record_fits_its_place_and_comes_back(index: int, tokens: int, layers: tuple[int, ...], sequence: int) -> None:
    marker = f"hsx1-deadbeef-{index}-4000000-{tokens}"
    record = ShardRecord(EPOCH, index, marker, EPOCH, sequence, tokens, "f" * 64, layers, "post_norm", 2**20, 2**32 - 1)
    data = encode(record, layout_of(len(layers) + 1).record_bytes, crc32c_bytes)
    assert len(data) % 512 == 0
    assert decode(data, crc32c_bytes) == record
    assert is_plainly_of(data, EPOCH, index, crc32c_bytes)
    assert not is_plainly_of(data, EPOCH, index + 1, crc32c_bytes)
    assert not is_plainly_of(data, EPOCH, index // 10, crc32c_bytes) or index < 1


@pytest.mark.parametrize("change", [{"store": "x"}, {"rows": 3}, {"kept": "0"}, {"dtype": "fp8_e4m3"}])
def test_only_the_ordinary_record_is_plain(built: BuiltStore, change: dict[str, str | int]) -> None:
    record = read_record(built.shard(1), built.info.layout)
    data = encode(replace(record, **change), 1024, crc32c_bytes)  # type: ignore[arg-type]
    assert not is_plainly_of(data, record.store, 1, crc32c_bytes)
    data = encode(record, 1024, crc32c_bytes)
    assert is_plainly_of(data, record.store, 1, crc32c_bytes)
    for at in (0, 9, 20, 99, data.index(b"}")):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert not is_plainly_of(bytes(damaged), record.store, 1, crc32c_bytes)
    assert not is_plainly_of(data[:100], record.store, 1, crc32c_bytes)


def test_shard_says_whose_states_it_holds(built: BuiltStore) -> None:
    info = built.info
    for index, row in enumerate(built.rows):
        record = read_record(built.shard(index), info.layout)
        with ShardFile(built.shard(index), info.layout, row.tokens, owner=(info.store_id, index)) as shard:
            assert shard.record() == record
        ids = ids_digest(built.input_ids[index])
        identity = (info.store_id, index, row.marker, EPOCH, index + 1, row.tokens, ids)
        assert record == ShardRecord(*identity, (1, 2), "post_norm", 32, row.crc32c)


def test_record_lies_on_a_page_in_front_of_the_index(built: BuiltStore) -> None:
    content = built.shard(0).read_bytes()
    assert content.index(MAGIC) == len(content) - built.info.layout.tail_bytes
    assert content.index(MAGIC) % PAGE == 0


def test_another_samples_shard_is_told_by_itself(built: BuiltStore) -> None:
    built.shard(1).write_bytes(built.shard(0).read_bytes())
    with pytest.raises(ShardError, match=f"is sample 0 of store {built.info.store_id}; expected sample 1 of") as caught:
        built.roots[0].read(1, 70)
    assert (caught.value.kind, caught.value.problem) == ("store_invalid", "record")


def test_another_stores_shard_is_told_by_itself(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = build_store(tmp_path / "other", built.states, roots=["a"])
    built.shard(1).write_bytes(other.shard(1).read_bytes())
    with pytest.raises(ShardError, match=f"is sample 1 of store {other.info.store_id}") as caught:
        built.roots[0].read(1, 70)
    assert caught.value.problem == "record"


@pytest.mark.parametrize(("at", "words"), [(0, "begins with"), (9, "bytes of text"), (40, "has crc32c")])
def test_damaged_record_is_found(built: BuiltStore, at: int, words: str) -> None:
    content = bytearray(built.shard(0).read_bytes())
    content[len(content) - built.info.layout.tail_bytes + at] ^= 0x40
    built.shard(0).write_bytes(content)
    with pytest.raises(ShardError, match=words) as caught:
        read_record(built.shard(0), built.info.layout)
    assert caught.value.problem == "record"
    with pytest.raises(ShardError, match=words):
        built.roots[0].read(0, 70)
    with ShardFile(built.shard(0), built.info.layout, 70) as shard:  # the states are sound all the same
        assert np.array_equal(shard.read(), built.states[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: replace(r, marker="req_7"), "names marker req_7"),
        (lambda r: replace(r, tokens=71), "expected one of sample 0 with 71 tokens"),
        (lambda r: replace(r, layers=("x",)), "cannot be understood: ValueError"),
    ],
)
def test_record_that_makes_no_sense_is_refused(
    built: BuiltStore, change: Callable[[ShardRecord], ShardRecord], words: str
) -> None:
    record = change(read_record(built.shard(0), built.info.layout))
    with pytest.raises(ValueError, match=words):
        decode(encode(record, 1024, crc32c_bytes), crc32c_bytes)


def test_too_long_a_record_is_refused(built: BuiltStore) -> None:
    record = replace(read_record(built.shard(0), built.info.layout), epoch="e" * 900)
    with pytest.raises(ValueError, match=r"the record of sample 0 has 1\d\d\d bytes; expected at most 1024"):
        encode(record, 1024, crc32c_bytes)


def test_files_without_a_record_are_told_apart(tmp_path: Path) -> None:
    layout = StoreLayout(4, 64, 2, 8)
    path = tmp_path / shard_key(0)
    for content, problem in ((None, "missing"), (b"short", "truncated"), (bytes(9000), "record")):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ShardError) as caught:
            read_record(path, layout)
        assert caught.value.problem == problem
    path.unlink()
    path.mkdir()
    with pytest.raises(ShardError) as caught:
        read_record(path, layout)
    assert caught.value.problem == "unreadable"


def test_stores_of_the_first_format_are_still_read(built: BuiltStore) -> None:
    first = replace(built.info.layout, records=False)
    for index in range(3):  # as they were written: blocks, zeros, index
        content = built.shard(index).read_bytes()
        tail = content[-first.index_bytes :].rjust(first.tail_bytes, b"\0")
        built.shard(index).write_bytes(content[: -built.info.layout.tail_bytes] + tail)
    document = json.loads((built.info.path / "zarr.json").read_bytes())
    document["attributes"]["hsx"]["format"] = "hsx-store-1"
    del document["attributes"]["hsx"]["codec"]
    (built.info.path / "zarr.json").write_text(json.dumps(document))
    store = hsx.open(built.info.path)
    assert store.metadata == document["attributes"]["hsx"]
    assert store.info.layout == first
    for index, states in enumerate(built.states):
        assert np.array_equal(store[index].hidden_states_numpy, states)
        with ShardFile(built.shard(index), first, len(states), owner=(built.info.store_id, index)) as shard:
            assert np.array_equal(shard.read(), states)
    asks: list[Callable[[], ShardRecord]] = [
        lambda: read_record(built.shard(0), first),
        lambda: ShardFile(built.shard(0), first, 70).record(),
    ]
    for ask in asks:
        with pytest.raises(ShardError, match="has no record"):
            ask()
