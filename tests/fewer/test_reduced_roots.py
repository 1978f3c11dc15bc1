"""Every way of writing shards passes the contract of stores that keep less than was captured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from hsx.testing.root_contract import Made, ReducedRootContract, make

if TYPE_CHECKING:
    from pathlib import Path

LOSS: Final[dict[str, Any]] = {"kept": "loss", "context": 2}
FP8: Final[dict[str, Any]] = {"dtype": "fp8_e4m3"}
CHUNKS: Final[dict[str, Any]] = {"chunk_tokens": 16}
NAMES: Final = ["loss", "fp8", "both", "both-16"]


class TestShardRoot(ReducedRootContract):
    """hsx's own writer."""

    @pytest.fixture(params=[LOSS, FP8, LOSS | FP8, LOSS | FP8 | CHUNKS], ids=NAMES)
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Each way of keeping less."""
        return make(tmp_path, 32, less=request.param)


class TestShardRootWithoutDirect(ReducedRootContract):
    """The same without O_DIRECT, at a width that fills no page."""

    @pytest.fixture(params=[LOSS, LOSS | FP8], ids=["loss", "both"])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """As above."""
        return make(tmp_path, 6, less=request.param, direct=False)


class TestCompressedRoot(ReducedRootContract):
    """With a codec."""

    @pytest.fixture(params=[("zstd", LOSS), ("blosc", LOSS | FP8)], ids=["zstd-loss", "blosc-both"])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """Each codec once."""
        codec, less = request.param
        return make(tmp_path, 32, codec, less)


class TestZarrRoot(ReducedRootContract):
    """zarr-python's writer."""

    @pytest.fixture(params=[LOSS, LOSS | FP8], ids=["loss", "both"])
    def made(self, tmp_path: Path, request: pytest.FixtureRequest) -> Made:
        """As above."""
        return make(tmp_path, 32, less=request.param, writer="zarr")
