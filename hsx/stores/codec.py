"""How inner chunks are compressed: by numcodecs, as Zarr's codecs of the same names do it.

bf16 values have noisy low bits and few exponents, so a shuffle of bits before a fast compressor saves about a fifth, for two to
three times the processor time of an uncompressed write; numcodecs lets go of the interpreter lock meanwhile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

BLOSC: Final = {"cname": "lz4", "clevel": 5, "shuffle": "bitshuffle", "typesize": 2, "blocksize": 0}
ZSTD: Final = {"level": 1, "checksum": False}


class Codec(Protocol):
    """Compresses an inner chunk and back. Called from several threads at once."""

    def encode(self, data: NDArray[np.uint8]) -> bytes:
        """The compressed bytes of `data`, uint8, 1-D."""
        ...

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Fills `out` (uint8, 1-D) with what `data` was made of.

        Raises ValueError or RuntimeError where `data` is no compressed chunk, or one of another size.
        """
        ...


class Compressor(Protocol):
    """What is used of numcodecs, which has no types."""

    def encode(self, buf: NDArray[np.uint8]) -> bytes:
        """Compressed bytes."""
        ...

    def decode(self, buf: NDArray[np.uint8], out: NDArray[np.uint8]) -> object:
        """Fills `out`."""
        ...


class _Numcodecs:
    """One of numcodecs' compressors, checked for the size of what it gives."""

    def __init__(self, codec: Compressor, size: Callable[[NDArray[np.uint8]], int]) -> None:
        self._codec = codec
        self._size = size

    def encode(self, data: NDArray[np.uint8]) -> bytes:
        return self._codec.encode(data)

    def decode(self, data: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        size = self._size(data)
        if size != out.size:
            raise ValueError(f"is of {size} bytes; expected {out.size}")
        self._codec.decode(data, out)


def _blosc_size(data: NDArray[np.uint8]) -> int:
    """What a blosc chunk is decompressed to, by its header."""
    return int.from_bytes(data[4:8].tobytes(), "little") if data.size >= 16 else 0


def _zstd_size(data: NDArray[np.uint8]) -> int:
    """What a zstd frame is decompressed to, by its header (RFC 8878, 3.1.1.1); 0 where it does not tell."""
    head = data[:18].tobytes().ljust(18, b"\0")
    if head[:4] != b"\x28\xb5\x2f\xfd":
        return 0
    descriptor = head[4]
    single_segment = descriptor >> 5 & 1
    nbytes = (single_segment, 2, 4, 8)[descriptor >> 6]
    at = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(head[at : at + nbytes], "little")
    return size + 256 if nbytes == 2 else size


def metadata(name: str) -> list[dict[str, Any]]:
    """What stands for the codec in an array's metadata, between `bytes` and `crc32c`: a list of none or one."""
    configurations = {"none": None, "blosc": BLOSC, "zstd": ZSTD}
    configuration = configurations[name]
    return [] if configuration is None else [{"name": name, "configuration": dict(configuration)}]


@lru_cache(maxsize=8)
def make_codec(name: str) -> Codec | None:
    """The codec of that name, out of `hsx.core.layout.CODECS`; None for `none`."""
    if name == "none":
        return None
    # Only stores that are compressed need them; they take a tenth of a second to import.
    if name == "zstd":
        from numcodecs.zstd import Zstd

        return _Numcodecs(Zstd(**ZSTD), _zstd_size)
    if name != "blosc":
        raise ValueError(f"codec is {name!r}; expected none, blosc or zstd")
    from numcodecs.blosc import BITSHUFFLE, Blosc

    settings = {key: BLOSC[key] for key in ("cname", "clevel", "blocksize")}
    return _Numcodecs(Blosc(**settings, shuffle=BITSHUFFLE, typesize=BLOSC["typesize"]), _blosc_size)
