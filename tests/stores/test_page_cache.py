"""Reading through a mapping, and what becomes of files that fail meanwhile."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hsx
from hsx.errors import RunError
from hsx.stores.page_cache import WORTH_WHILE, CachedFile, is_missing
from hsx.stores.shard_reader import ShardError, ShardFile
from hsx.testing.stores import BuiltStore, build_store, random_bits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def content(tmp_path: Path) -> np.typing.NDArray[np.uint8]:
    """Five pages and a bit of random bytes, in the file `data`."""
    content = np.random.default_rng(0).integers(0, 256, 5 * 4096 + 17, np.uint8)
    content.tofile(tmp_path / "data")
    return content


def opened(path: Path) -> CachedFile:
    fd = os.open(path, os.O_RDONLY)
    try:
        return CachedFile(fd, path.stat().st_size)
    finally:
        os.close(fd)


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 8000])
def test_buffers_are_filled_one_behind_the_other(content: np.typing.NDArray[np.uint8], tmp_path: Path, offset: int) -> None:
    file = opened(tmp_path / "data")
    first, second = np.zeros(5000, np.uint8), np.zeros(7, np.uint8)
    assert file.fill([first, second], offset)
    assert np.array_equal(np.concatenate([first, second]), content[offset : offset + 5007])
    file.close()
    file.close()


def test_what_is_not_in_the_file_is_not_read(content: np.typing.NDArray[np.uint8], tmp_path: Path) -> None:
    file = opened(tmp_path / "data")
    assert file.fill([np.empty(17, np.uint8)], len(content) - 17)
    assert not file.fill([np.empty(18, np.uint8)], len(content) - 17)
    file.close()


def test_a_file_that_is_cut_off_is_no_end_of_the_process(content: np.typing.NDArray[np.uint8], tmp_path: Path) -> None:
    """The same as with a disk's error: touching the mapping would be SIGBUS."""
    file = opened(tmp_path / "data")
    os.truncate(tmp_path / "data", 4096)
    assert not file.fill([np.empty(100, np.uint8)], 4096)
    file.close()


def drop(path: Path) -> bool:
    """Has a file thrown out of the page cache; False where it stays there, as on a tmpfs, or the kernel does not tell."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return is_missing(fd, 0)
    finally:
        os.close(fd)


def test_what_is_brought_is_in_the_cache(content: np.typing.NDArray[np.uint8], tmp_path: Path) -> None:
    if not drop(tmp_path / "data"):
        pytest.skip("files stay in the cache here, or the kernel does not tell")
    fd = os.open(tmp_path / "data", os.O_RDONLY)
    file = opened(tmp_path / "data")
    assert not file.bring(0, len(content) + 1)
    assert is_missing(fd, 0)
    assert file.bring(5, len(content) - 5)
    assert not is_missing(fd, 0)
    assert not is_missing(fd, len(content) - 1)
    file.close()
    os.close(fd)


@pytest.mark.parametrize("tokens", [60, 200])
def test_samples_that_are_not_in_the_cache_are_the_same(tmp_path: Path, tokens: int) -> None:
    built = build_store(tmp_path, [random_bits(np.random.default_rng(0), tokens, 3, 2000)], roots=["a"])
    assert built.shard(0).stat().st_size < WORTH_WHILE
    for start, stop in ((0, tokens), (7, tokens - 3)):
        drop(built.shard(0))
        assert np.array_equal(hsx.open(built.info.path).hidden_states_numpy(0, start, stop), built.states[0][start:stop])


def build(folder: Path) -> BuiltStore:
    """One sample that is worth a mapping, with an odd number of tokens."""
    built = build_store(folder, [random_bits(np.random.default_rng(0), 301, 3, 9600)], roots=["a"])
    assert built.shard(0).stat().st_size > WORTH_WHILE
    return built


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    """Such a store, for tests that leave it alone."""
    return build(tmp_path_factory.mktemp("large"))


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Such a store, for one test."""
    return build(tmp_path)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (1, 300), (64, 128), (299, 301), (7, 7)])
def test_large_samples_are_the_same_through_the_mapping(shared: BuiltStore, start: int, stop: int | None, check: bool) -> None:
    store = hsx.open(shared.info.path, check=check)
    assert np.array_equal(store.hidden_states_numpy(0, start, stop), shared.states[0][start:stop])
    assert np.array_equal(store.hidden_states_numpy(0, start, stop, states=["h_2"]), shared.states[0][start:stop, [1]])


def test_damage_is_seen_through_the_mapping(built: BuiltStore) -> None:
    content = bytearray(built.shard(0).read_bytes())
    content[built.info.layout.block_bytes + 9] ^= 1
    built.shard(0).write_bytes(content)
    with pytest.raises(RunError, match="chunk 1 has crc32c") as error:
        hsx.open(built.info.path).sample(0)
    assert error.value.kind == "store_invalid"


def test_a_shard_that_is_cut_off_while_it_is_open_is_named(built: BuiltStore) -> None:
    with ShardFile(built.shard(0), built.info.layout, 301, cached=True) as shard:
        os.truncate(built.shard(0), 4096)
        with pytest.raises(ShardError, match="ends at byte") as error:
            shard.read()
    assert error.value.problem == "truncated"
