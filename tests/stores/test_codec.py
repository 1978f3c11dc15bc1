"""Compressed shards: round trips, other readers, and damage behind a sound checksum."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

import hsx
from hsx.core.layout import CRC_BYTES, PAGE, StoreLayout, shard_key
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.stores.checksum import crc32c
from hsx.stores.codec import make_codec
from hsx.stores.group import create_store, open_store
from hsx.stores.shard import ShardWriter
from hsx.stores.shard_reader import ShardError, ShardFile
from hsx.testing.stores import build_store, payload, random_bits, random_states

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

STORE = "11111111-1111-4111-8111-111111111111"
SPEC = CaptureSpec((1,), "post_norm")
CODECS = pytest.mark.parametrize("codec", ["blosc", "zstd"])


def write(folder: Path, states: NDArray[np.uint16], layout: StoreLayout) -> Path:
    writer = ShardWriter(folder, "r", layout, store=STORE, spec=SPEC)
    receipt = writer.write(payload(Marker("deadbeef", 1, 1, len(states)), states))
    path = folder / shard_key(1)
    assert receipt.nbytes == path.stat().st_size <= layout.file_bytes(len(states))
    assert receipt.nbytes % PAGE == 0
    assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))
    return path


@CODECS
@pytest.mark.parametrize("hidden_size", [7, 96])
@pytest.mark.parametrize("tokens", [1, 64, 65, 700])
def test_any_bits_come_back(tmp_path: Path, tokens: int, hidden_size: int, codec: str) -> None:
    # Random bits do not compress at all: blocks grow, and still fit where they may be.
    layout = StoreLayout(4, 700, 3, hidden_size, codec=codec)
    states = random_bits(np.random.default_rng(tokens), tokens, 3, hidden_size)
    path = write(tmp_path, states, layout)
    with ShardFile(path, layout, tokens, owner=(STORE, 1)) as shard:
        found, crc = shard.read_all()
        assert crc == shard.record().crc32c == crc32c(states.reshape(-1).view(np.uint8))
    assert np.array_equal(found, states)


@CODECS
def test_states_of_a_model_take_less(tmp_path: Path, codec: str) -> None:
    layout = StoreLayout(4, 300, 3, 512, codec=codec)
    states = random_states(np.random.default_rng(0), 300, 3, 512)
    assert write(tmp_path, states, layout).stat().st_size < 0.9 * replace(layout, codec="none").file_bytes(300)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_slices_are_slices(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    layout = StoreLayout(4, 200, 2, 32, codec=data.draw(st.sampled_from(["blosc", "zstd"])))
    tokens = data.draw(st.integers(1, 200))
    start = data.draw(st.integers(0, tokens))
    stop = data.draw(st.integers(start, tokens))
    states = random_states(np.random.default_rng(tokens), tokens, 2, 32)
    path = write(tmp_path_factory.mktemp("shard"), states, layout)
    for check in (True, False):
        with ShardFile(path, layout, tokens, check=check) as shard:
            assert np.array_equal(shard.read(start, stop), states[start:stop])


@CODECS
def test_zarr_and_tensorstore_read_what_is_compressed(tmp_path: Path, codec: str) -> None:
    states = [random_states(np.random.default_rng(tokens), tokens, 3, 40) for tokens in (1, 64, 150)]
    built = build_store(tmp_path, states, codec=codec)
    array = zarr.open_group(built.info.path, mode="r")["hidden_states"]
    assert isinstance(array, zarr.Array)
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(built.info.path / "hidden_states")}}
    theirs = tensorstore.open(spec, read=True).result()
    store = hsx.open(built.info.path)
    for index, sample in enumerate(states):
        assert np.array_equal(np.asarray(array[index, : len(sample)]), sample)
        assert np.array_equal(theirs[index, : len(sample)].read().result().view(np.uint16), sample)
        assert np.array_equal(store[index].hidden_states_numpy, sample)


def forge(path: Path, block: bytes, layout: StoreLayout) -> None:
    """Puts `block` in place of the first inner chunk, with a sound checksum and index."""
    content = bytearray(path.read_bytes())
    view = np.frombuffer(content, np.uint8)
    data = np.frombuffer(block, np.uint8)
    view[: data.size] = data
    view[data.size : data.size + CRC_BYTES].view("<u4")[0] = crc32c(data)
    index = view[-layout.index_bytes :]
    index[8:16].view("<u8")[0] = data.size + CRC_BYTES
    index[-CRC_BYTES:] = np.frombuffer(crc32c(index[:-CRC_BYTES]).to_bytes(CRC_BYTES, "little"), np.uint8)
    path.write_bytes(content)


@CODECS
@pytest.mark.parametrize("damage", ["other bytes", "another size", "cut", "flip"])
def test_damage_is_found(tmp_path: Path, codec: str, damage: str) -> None:
    layout = StoreLayout(4, 64, 2, 64, codec=codec)
    path = write(tmp_path, random_states(np.random.default_rng(0), 64, 2, 64), layout)
    compressor = make_codec(codec)
    assert compressor is not None
    short = compressor.encode(np.zeros(layout.chunk_bytes - 2, np.uint8))
    if damage == "flip":
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content)
    else:
        whole = compressor.encode(np.arange(layout.chunk_bytes // 4, dtype="<u4").view(np.uint8))
        forge(path, {"other bytes": bytes(range(200)), "another size": short, "cut": whole[:40]}[damage], layout)
    with pytest.raises(ShardError) as caught, ShardFile(path, layout, 64) as shard:
        shard.read()
    assert caught.value.problem == "chunk"
    assert ("has crc32c" if damage == "flip" else "chunk 0 cannot be decompressed") in caught.value.message


@CODECS
def test_impossible_sizes_in_the_index_are_found(tmp_path: Path, codec: str) -> None:
    layout = StoreLayout(4, 64, 2, 64, codec=codec)
    path = write(tmp_path, random_states(np.random.default_rng(0), 64, 2, 64), layout)
    for size in (CRC_BYTES, layout.encoded_bytes + 5, 2**63):
        content = bytearray(path.read_bytes())
        index = np.frombuffer(content, np.uint8)[-layout.index_bytes :]
        index[8:16].view("<u8")[0] = size
        index[-CRC_BYTES:] = np.frombuffer(crc32c(index[:-CRC_BYTES]).to_bytes(CRC_BYTES, "little"), np.uint8)
        path.write_bytes(content)
        with pytest.raises(ShardError, match="index has entries") as caught:
            ShardFile(path, layout, 64)
        assert caught.value.problem == "index"


def test_unknown_codec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="codec is 'gzip'; expected one of none, blosc, zstd"):
        StoreLayout(1, 2, 2, 8, codec="gzip")
    with pytest.raises(ValueError, match="codec is 'gzip'; expected none, blosc or zstd"):
        make_codec("gzip")
    create_store(tmp_path, StoreLayout(1, 2, 2, 8, codec="zstd"), SPEC, {})
    assert open_store(tmp_path).layout.codec == "zstd"
    document = tmp_path / "zarr.json"
    document.write_text(document.read_text().replace('"codec": "zstd"', '"codec": "gzip"'))
    with pytest.raises(RunError, match="codec is 'gzip'") as error:
        open_store(tmp_path)
    assert error.value.kind == "store_invalid"
