"""Every way of writing shards passes the contract of roots; hsx's own writes what zarr-python writes."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.stores.root import ShardRoot
from hsx.stores.shard_reader import ShardFile
from hsx.stores.zarr_root import ZarrRoot, encode_shard
from hsx.testing.root_contract import LENGTHS, Made, RootContract, make
from hsx.testing.roots import FailingRoot
from hsx.testing.stores import random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.core.layout import StoreLayout


class TestShardRoot(RootContract):
    """hsx's own writer, on whatever the temporary folder lies on."""

    @pytest.fixture(params=[7, 32, 96])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Widths at which chunks fill whole pages, and at which they do not."""
        return make(tmp_path, request.param)


class TestShardRootWithoutDirect(RootContract):
    """The same without O_DIRECT: sendfile."""

    @pytest.fixture(params=[7, 96])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """As above."""
        return make(tmp_path, request.param, direct=False)


class TestShardRootOnTmpfs(RootContract):
    """The same on a tmpfs."""

    @pytest.fixture
    def made(self) -> Iterator[Made]:
        """A root on /dev/shm."""
        folder = Path("/dev/shm", f"hsx-contract-{os.getpid()}")
        made = make(folder)
        yield made
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()


class TestShardRootWithOtherChunks(RootContract):
    """Inner chunks of other than 64 tokens."""

    @pytest.fixture(params=itertools.product([8, 32, 256], [7, 96]))
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Widths as above."""
        chunk_tokens, hidden_size = request.param
        return make(tmp_path, hidden_size, less={"chunk_tokens": chunk_tokens})


class TestCompressedRoot(RootContract):
    """With a codec."""

    @pytest.fixture(params=["blosc", "zstd"])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Either codec."""
        return make(tmp_path, codec=request.param)


class TestRelaxedRoot(RootContract):
    """Without a sync for each sample."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """`durability = "relaxed"`."""
        return make(tmp_path, durable=False)

    def test_a_root_that_is_gone_is_unusable(self, made: Made) -> None:
        """Its sync does nothing, and so does not tell."""
        made.folder.rename(made.folder.with_name("away"))
        made.root.sync()


class TestZarrRoot(RootContract):
    """The reference writer, with and without a codec."""

    @pytest.fixture(params=["none", "blosc", "zstd"])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Every codec."""
        made = make(tmp_path, codec=request.param, writer="zarr")
        assert isinstance(made.root, ZarrRoot)
        return made


class TestFailingRoot(RootContract):
    """The root of the fault tests, as long as it does not fail."""

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        """Around a real one."""
        made = make(tmp_path)
        return Made(made.info, FailingRoot(made.root), made.folder)


@pytest.mark.parametrize("codec", ["none", "blosc", "zstd"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_blocks_are_byte_for_byte_those_of_zarr(tmp_path: Path, tokens: int, codec: str) -> None:
    """What lies in the inner chunks is what the library would have put there: payload, compressed bytes, fill and checksum."""
    made = make(tmp_path, codec=codec)
    layout = made.info.layout
    states = random_bits(np.random.default_rng(tokens), tokens, layout.states, layout.hidden_size)
    made.write(states)
    ours = np.fromfile(made.shard(), np.uint8)
    theirs = encode_shard(0, states, layout)
    for mine, its in itertools.zip_longest(_chunks(ours, layout), _chunks(theirs, layout)):
        assert mine == its


def _chunks(shard: np.typing.NDArray[np.uint8], layout: StoreLayout) -> list[bytes]:
    entries = shard[-layout.index_bytes : -4].view("<u8").reshape(-1, 2)
    return [shard[offset : offset + size].tobytes() for offset, size in entries.tolist() if size != 2**64 - 1]


def test_a_root_changes_its_writer_between_runs(tmp_path: Path) -> None:
    """Shards of both lie side by side, and either root reads both."""
    made = make(tmp_path)
    zarrs = ZarrRoot("a", made.folder, made.info)
    states = random_bits(np.random.default_rng(0), 65, *made.info.layout.shape[2:])
    made.write(states, 0)
    Made(made.info, zarrs, made.folder).write(states, 1)
    assert isinstance(made.root, ShardRoot)
    for root, index in itertools.product((made.root, zarrs), (0, 1)):
        assert np.array_equal(root.read(index, 65), states)
    with ShardFile(made.shard(1), made.info.layout, 65) as shard:
        assert np.array_equal(shard.read(10, 65), states[10:])
