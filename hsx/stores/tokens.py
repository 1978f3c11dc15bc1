"""The token index of a store: token ids, loss masks and ids of all samples, as plain Zarr arrays.

In the group: `input_ids` (int32) and `loss_mask` (uint8) hold all samples one after the other, `offsets` (int64 [samples + 1])
says where each begins. Ids are text, as `sample_ids` (uint8, UTF-8, one after the other) and `sample_id_offsets` (int64
[samples + 1]): Zarr's `string` type is unknown to tensorstore, and reading one such string decodes a whole chunk.

Chunks are uncompressed (codecs bytes little + crc32c), so a sample is a `pread` of a chunk file. The arrays are written beside
the group and renamed into it, `offsets` last: the index exists once `offsets` does.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.layout import CRC_BYTES
from hsx.errors import RunError
from hsx.stores import metadata
from hsx.stores.checksum import crc32c_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

CHUNK: Final = 1 << 20  # elements of a chunk
OPEN_CHUNKS: Final = 32  # chunk files kept open per array
FORMAT: Final = "1"
ATTRIBUTE: Final = "hsx_index"
ARRAYS: Final[dict[str, np.dtype[Any]]] = {
    "input_ids": np.dtype("<i4"),
    "loss_mask": np.dtype("u1"),
    "sample_ids": np.dtype("u1"),
    "sample_id_offsets": np.dtype("<i8"),
    "offsets": np.dtype("<i8"),
}
"""The arrays in the order in which they are renamed into the group; the last one makes the index complete."""
SEPARATOR: Final = "/"
"""Between `c` and a chunk's number: chunk 3 of an array is the file `c/3`."""


def crc_bytes(payload: bytes) -> bytes:
    """The crc32c of a chunk as its codec stores it."""
    return crc32c_bytes(payload).to_bytes(CRC_BYTES, "little")


class _Chunk:
    """One open chunk file. Closed when the last user lets go of it, so a reader in another thread is never cut off."""

    def __init__(self, path: Path, nbytes: int, *, prove: bool) -> None:
        self.fd = -1
        self.path = path
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RunError("store_invalid", f"{path}: {error.strerror or error}") from error
        if not prove:
            return
        content = self.read(nbytes + CRC_BYTES, 0)
        if crc_bytes(content[:nbytes]) != content[nbytes:]:
            raise RunError("store_invalid", f"{path}: its crc32c does not match its content")

    def read(self, nbytes: int, offset: int) -> bytes:
        content = os.pread(self.fd, nbytes, offset)
        if len(content) != nbytes:
            raise RunError("store_invalid", f"{self.path}: {len(content)} bytes at {offset}; expected {nbytes}")
        return content

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class _Array:
    """Slices of one 1-D array, read from its chunk files; each chunk's crc32c is checked when it is first opened.

    Its metadata is read without zarr, whose background event loop has no place in a run.
    """

    def __init__(self, group: Path, name: str) -> None:
        self._folder = group / name
        self._dtype = ARRAYS[name]
        try:
            document: Any = json.loads((self._folder / metadata.METADATA).read_bytes())
            (self.length,) = document["shape"]
            (self._chunk,) = document["chunk_grid"]["configuration"]["chunk_shape"]
            self.attributes: dict[str, Any] = dict(document["attributes"])
            wanted = metadata.vector(self.length, self._dtype.name, self.attributes, chunk=self._chunk, separator=SEPARATOR)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError(
                "store_invalid", f"{self._folder}: no readable Zarr array: {type(error).__name__}: {error}"
            ) from error
        differing = [key for key in wanted if document.get(key) != wanted[key]]
        if differing:
            found = {key: document.get(key) for key in differing}
            expected = {key: wanted[key] for key in differing}
            raise RunError("store_invalid", f"{self._folder}: array has {found}; expected {expected}")
        self._open: OrderedDict[int, _Chunk] = OrderedDict()
        self._proved: set[int] = set()  # a large store has more chunks than are kept open

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Elements [start, stop), read-only. Raises RunError `store_invalid`."""
        first, last = start // self._chunk, (stop - 1) // self._chunk
        if first >= last:
            return self._piece(first, start, stop)
        bounds = [start, *(number * self._chunk for number in range(first + 1, last + 1)), stop]
        return np.concatenate([self._piece(first + i, bounds[i], bounds[i + 1]) for i in range(len(bounds) - 1)])

    def _piece(self, number: int, start: int, stop: int) -> NDArray[Any]:
        chunk = self._open.get(number)
        if chunk is None:
            nbytes = self._chunk * self._dtype.itemsize
            chunk = _Chunk(self._folder / "c" / str(number), nbytes, prove=number not in self._proved)
            self._proved.add(number)
            self._open[number] = chunk
            while len(self._open) > OPEN_CHUNKS:
                with contextlib.suppress(KeyError):  # another thread was faster
                    self._open.popitem(last=False)
        size = self._dtype.itemsize
        return np.frombuffer(chunk.read((stop - start) * size, (start - number * self._chunk) * size), dtype=self._dtype)


class TokenTable:
    """The token index, opened for reading; implements `ports.Samples`. May be used from several threads and after a fork.

    Reading one sample takes microseconds; memory is 16 bytes a sample, 32 once `index_of` was used.

    Raises:
        RunError: `store_invalid` where the group has no complete index.
    """

    def __init__(self, group: Path) -> None:
        if not is_complete(group):
            raise RunError("store_invalid", f"{group} has no complete token index; expected the array 'offsets' in it")
        self._arrays = {name: _Array(group, name) for name in ARRAYS}
        offsets = self._arrays["offsets"]
        record = offsets.attributes.get(ATTRIBUTE)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise RunError("store_invalid", f"{group}/offsets lacks the attribute {ATTRIBUTE!r} of format {FORMAT}")
        self.record: dict[str, Any] = record
        self.offsets: NDArray[np.int64] = offsets.read(0, offsets.length)
        self._id_offsets: NDArray[np.int64] = self._arrays["sample_id_offsets"].read(0, offsets.length)
        self._hashes: tuple[NDArray[np.uint64], NDArray[np.int64]] | None = None

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(self.offsets) - 1

    @property
    def total_tokens(self) -> int:
        """Tokens of all samples."""
        return int(self.offsets[-1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [samples]: tokens of each sample."""
        return np.diff(self.offsets)

    @property
    def dataset(self) -> dict[str, str]:
        """The fingerprint of the dataset that was indexed."""
        return {str(key): str(value) for key, value in self.record["dataset"].items()}

    def tokens(self, index: int) -> int:
        """Prompt length of sample `index`. Raises RunError `sample_unknown`, as do the methods below."""
        start, stop = self._bounds(index)
        return stop - start

    def input_ids(self, index: int) -> NDArray[np.int32]:
        """int32 [tokens] of sample `index`, read-only."""
        return self._arrays["input_ids"].read(*self._bounds(index))

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """uint8 [tokens] of 0 and 1 of sample `index`, read-only."""
        return self._arrays["loss_mask"].read(*self._bounds(index))

    def loss_masks(self, first: int, last: int) -> NDArray[np.uint8]:
        """uint8: the loss masks of samples `first` up to `last`, one after the other; at least one sample."""
        return self._arrays["loss_mask"].read(self._bounds(first)[0], self._bounds(last - 1)[1])

    def sample_id(self, index: int) -> str:
        """The dataset's id of sample `index`."""
        self._bounds(index)
        return (
            self._arrays["sample_ids"].read(int(self._id_offsets[index]), int(self._id_offsets[index + 1])).tobytes().decode()
        )

    def index_of(self, sample_id: str) -> int:
        """The sample of that id. The first call reads all ids (0.2 s for a million). Raises RunError `sample_unknown`."""
        if self._hashes is None:
            hashes = self._hash_all()
            order = np.argsort(hashes, kind="stable")
            self._hashes = hashes[order], order
        wanted = np.frombuffer(sample_id.encode("utf-8", "replace"), dtype=np.uint8)
        sums, order = self._hashes
        if len(wanted):
            (key,) = _hash(wanted, np.zeros(1, dtype=np.int64))
            for at in range(int(np.searchsorted(sums, key)), len(sums)):
                if sums[at] != key:
                    break
                if self.sample_id(int(order[at])) == sample_id:
                    return int(order[at])
        raise RunError("sample_unknown", f"no sample has the id {sample_id!r}")

    def _bounds(self, index: int) -> tuple[int, int]:
        if not 0 <= index < self.count:
            raise RunError("sample_unknown", f"sample {index} does not exist; expected 0 to {self.count - 1}")
        return int(self.offsets[index]), int(self.offsets[index + 1])

    def _hash_all(self) -> NDArray[np.uint64]:
        pieces = []
        for start in range(0, self.count, CHUNK // 16):
            bounds = self._id_offsets[start : start + CHUNK // 16 + 1]
            text = self._arrays["sample_ids"].read(int(bounds[0]), int(bounds[-1]))
            pieces.append(_hash(text, bounds[:-1] - bounds[0]))
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint64)


def is_complete(group: Path) -> bool:
    """Whether the group holds a complete token index."""
    return (group / "offsets" / "zarr.json").is_file()


def _hash(text: NDArray[np.uint8], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """uint64 for each of the non-empty texts that begin at `starts`: bytes times powers of an odd number, summed.

    Collisions do no harm, because the texts are compared, but equal sums must stay rare for a search to be short.
    """
    lengths = np.diff(np.append(starts, len(text)))
    position = np.arange(len(text)) - np.repeat(starts, lengths)
    powers = np.cumprod(np.full(int(lengths.max(initial=1)), 0x9E3779B97F4A7C15, dtype=np.uint64))
    sums: NDArray[np.uint64] = np.add.reduceat((text.astype(np.uint64) + np.uint64(1)) * powers[position], starts)
    return sums
