"""Writing and reading shards: round trips, fallbacks, and every kind of damage."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx.core.layout import StoreLayout, shard_key
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.measure import measure
from hsx.stores.checksum import crc32c
from hsx.stores.shard import ShardWriter
from hsx.stores.shard_reader import ShardError, ShardFile
from hsx.testing.stores import payload, random_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.records import Payload

LAYOUT = StoreLayout(samples=4, max_tokens=200, states=2, hidden_size=32)
STORE = "11111111-1111-4111-8111-111111111111"
SPEC = CaptureSpec((1,), "post_norm")


def bits(tokens: int, layout: StoreLayout = LAYOUT) -> NDArray[np.uint16]:
    return random_bits(np.random.default_rng(tokens), tokens, layout.states, layout.hidden_size)


def writer(folder: Path, layout: StoreLayout = LAYOUT, *, direct: bool = True) -> ShardWriter:
    return ShardWriter(folder, "r", layout, store=STORE, spec=SPEC, direct=direct)


def of(states: NDArray[np.uint16], index: int = 1) -> Payload:
    return payload(Marker("deadbeef", index, 1, len(states)), states)


def write(folder: Path, states: NDArray[np.uint16], layout: StoreLayout = LAYOUT, *, direct: bool = True) -> Path:
    writer(folder, layout, direct=direct).write(of(states))
    return folder / shard_key(1)


def page_aligned(states: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The same states in a mapping, as a dump gives them."""
    copy = np.frombuffer(mmap.mmap(-1, states.nbytes), np.uint16).reshape(states.shape)
    copy[:] = states
    return copy


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("hidden_size", [7, 32, 96])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1500])
def test_states_come_back_bit_equal(tmp_path: Path, tokens: int, hidden_size: int, direct: bool) -> None:
    layout = StoreLayout(4, 1500, 3, hidden_size)
    states = page_aligned(bits(tokens, layout))
    receipt = writer(tmp_path, layout, direct=direct).write(of(states))
    path = tmp_path / shard_key(1)
    assert receipt.root == "r"
    assert receipt.nbytes == path.stat().st_size == layout.file_bytes(tokens)
    assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))
    with ShardFile(path, layout, tokens) as shard:
        found, crc = shard.read_all()
    assert np.array_equal(found, states)
    assert crc == receipt.crc32c


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_slices_are_slices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 200))
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    states = bits(tokens)
    path = write(tmp_path_factory.mktemp("shard"), states)
    for check in (True, False):
        with ShardFile(path, LAYOUT, tokens, check=check) as shard:
            assert np.array_equal(shard.read(start, stop), states[start:stop])


def test_one_writer_takes_samples_of_all_alignments(tmp_path: Path) -> None:
    # The scratch of a thread is used again: nothing of an earlier sample may show in a later one.
    shards = writer(tmp_path)
    for tokens in (200, 3, 128, 65, 1, 200):
        for states in (page_aligned(bits(tokens)), bits(tokens + 1)[:tokens]):
            shards.write(of(states))
            with ShardFile(tmp_path / shard_key(1), LAYOUT, tokens) as shard:
                assert np.array_equal(shard.read(), states)


def test_tmpfs_takes_shards_with_and_without_o_direct() -> None:
    shm = Path("/dev/shm")
    folder = shm / f"hsx-test-{os.getpid()}"
    folder.mkdir()
    try:
        states = page_aligned(bits(130))
        for direct in (True, False):
            with ShardFile(write(folder, states, direct=direct), LAYOUT, 130) as shard:
                assert np.array_equal(shard.read(), states)
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def test_reading_into_a_buffer_fills_it(tmp_path: Path) -> None:
    states = bits(100)
    out = np.empty_like(states)
    with ShardFile(write(tmp_path, states), LAYOUT, 100) as shard:
        assert shard.read(out=out) is out
        with pytest.raises(ValueError, match=r"out is uint16 \(100, 2, 32\); expected C-contiguous uint16 \(99, 2, 32\)"):
            shard.read(0, 99, out)
        with pytest.raises(ValueError, match="tokens 0 to 101 are asked for; the sample has 100"):
            shard.read(0, 101)
    assert np.array_equal(out, states)


def damage(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def problem(path: Path, tokens: int = 130) -> tuple[str, str]:
    with pytest.raises(ShardError) as caught, ShardFile(path, LAYOUT, tokens) as shard:
        shard.read()
    assert caught.value.kind == "store_invalid"
    assert str(path) in caught.value.message
    return caught.value.problem, caught.value.message


@pytest.mark.parametrize("offset", [0, 8191, LAYOUT.block_bytes + 5, 2 * LAYOUT.block_bytes + LAYOUT.chunk_bytes - 1])
def test_flipped_bit_in_a_payload_is_found(tmp_path: Path, offset: int) -> None:
    path = write(tmp_path, bits(130))
    damage(path, offset)
    kind, message = problem(path)
    assert kind == "chunk"
    assert f"chunk {offset // LAYOUT.block_bytes} has crc32c" in message


def test_flipped_bit_in_the_index_is_found(tmp_path: Path) -> None:
    path = write(tmp_path, bits(130))
    damage(path, -20)
    assert problem(path)[0] == "index"


@pytest.mark.parametrize(("size", "kind"), [(0, "truncated"), (10, "truncated"), (5000, "index"), (-1, "index")])
def test_cut_file_is_found(tmp_path: Path, size: int, kind: str) -> None:
    path = write(tmp_path, bits(130))
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    assert problem(path)[0] == kind


def test_preallocated_and_never_written_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / shard_key(1)
    path.write_bytes(bytes(LAYOUT.file_bytes(130)))
    assert problem(path)[0] == "index"


def test_missing_and_unreadable_files_are_told_apart(tmp_path: Path) -> None:
    assert problem(tmp_path / "c.7.0.0.0")[0] == "missing"
    (tmp_path / "c.8.0.0.0").mkdir()
    assert problem(tmp_path / "c.8.0.0.0")[0] == "unreadable"


@pytest.mark.parametrize("held", [1, 128, 129, 131, 193])
def test_shard_of_another_length_is_found(tmp_path: Path, held: int) -> None:
    kind, message = problem(write(tmp_path, bits(held)))
    assert kind == "tokens"
    assert "expected" in message


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    shards = writer(tmp_path)
    with pytest.raises(ValueError, match="expected C-contiguous uint16"):
        shards.write(of(bits(10)[::2]))
    with pytest.raises(ValueError, match=r"sample 4 has states \(10, 2, 32\); the store is \(4, 200, 2, 32\)"):
        shards.write(of(bits(10), 4))
    with pytest.raises(ValueError, match="sample has 201 tokens; expected 1 to 200"):
        shards.write(of(bits(201)))
    with pytest.raises(ValueError, match="is of 5 tokens; its payload has 6 rows and 6 ids"):
        shards.write(payload(Marker("deadbeef", 1, 1, 5), bits(6)))
    with pytest.raises(ValueError, match="is of 6 tokens; its payload has 6 rows and 5 ids"):
        shards.write(payload(Marker("deadbeef", 1, 1, 6), bits(6), np.arange(5, dtype=np.int32)))
    assert list(tmp_path.iterdir()) == []


def test_bytes_that_change_after_they_were_judged_contradict_their_shard(tmp_path: Path) -> None:
    states = bits(130)
    judged = replace(of(states), crcs=measure(states, of(states).input_ids, of(states).input_ids).crcs)
    states[70, 1, 3] ^= 0x100
    writer(tmp_path).write(judged)
    kind, message = problem(tmp_path / shard_key(1))
    assert kind == "chunk"
    assert "chunk 1 has crc32c" in message


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("chunk_tokens", [8, 16, 128, 256])
def test_inner_chunks_have_as_many_tokens_as_the_store_says(tmp_path: Path, chunk_tokens: int, judged: bool) -> None:
    layout = StoreLayout(4, 200, 2, 32, chunk_tokens=chunk_tokens)
    states = bits(130)
    sample = of(states)
    crcs = measure(states, sample.input_ids, sample.input_ids, chunk_tokens).crcs if judged else ()
    receipt = writer(tmp_path, layout).write(replace(sample, crcs=crcs))
    with ShardFile(tmp_path / shard_key(1), layout, 130) as shard:
        assert np.array_equal(shard.read_all()[0], states)
    assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))


def test_checksums_of_other_chunks_are_refused(tmp_path: Path) -> None:
    sample = of(bits(130))
    of_64 = replace(sample, crcs=measure(sample.states, sample.input_ids, sample.input_ids).crcs)
    with pytest.raises(ValueError, match="sample 1 has 3 checksums; its 130 tokens are 9 inner chunks of 16"):
        writer(tmp_path, StoreLayout(4, 200, 2, 32, chunk_tokens=16)).write(of_64)
    assert list(tmp_path.iterdir()) == []


def test_fill_is_not_read_where_rows_are_proved_without_it(tmp_path: Path) -> None:
    states = bits(130)
    path = write(tmp_path, states)
    damage(path, 2 * LAYOUT.block_bytes + 60 * LAYOUT.token_bytes)  # in the fill: rows 128 and 129 are the chunk's only ones
    with ShardFile(path, LAYOUT, 130, cached=True) as shard:
        found, crc = shard.read_all()
        assert np.array_equal(shard.read(129), states[129:])
    assert np.array_equal(found, states)
    assert crc == crc32c(states.reshape(-1).view(np.uint8))
    assert problem(path)[0] == "chunk"  # as other readers of Zarr would find it


@pytest.mark.parametrize(("held", "offset", "kind"), [(130, 2 * LAYOUT.block_bytes + 9, "chunk"), (140, None, "tokens")])
def test_reading_without_fill_finds_what_is_wrong(tmp_path: Path, held: int, offset: int | None, kind: str) -> None:
    path = write(tmp_path, bits(held))
    if offset is not None:
        damage(path, offset)
    with pytest.raises(ShardError) as caught, ShardFile(path, LAYOUT, 130, cached=True) as shard:
        shard.read()
    assert caught.value.problem == kind
