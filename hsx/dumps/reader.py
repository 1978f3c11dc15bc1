"""Opens one published dump: its header alone, or a read-only mapping with its two tensors viewed in place."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.dump import ALIGNMENT, ID_BYTES, MAX_HEADER, DumpHeader, decode_header
from hsx.errors import SampleError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray


def read_header(path: Path) -> DumpHeader:
    """The header of the dump at `path`, without mapping it.

    Raises:
        SampleError: kind `dump_invalid` where header or size are not as the format demands.
        OSError: there is no such file, or it cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return decode_header(_beginning(descriptor), os.fstat(descriptor).st_size)[0]
    finally:
        os.close(descriptor)


def _beginning(descriptor: int) -> bytes:
    """The file's first page, or as much more as its header claims to have, within reason."""
    start = os.pread(descriptor, ALIGNMENT, 0)
    length = int.from_bytes(start[:8], "little")
    return os.pread(descriptor, 8 + length, 0) if ALIGNMENT < 8 + length <= 8 + MAX_HEADER else start


class MappedDump:
    """A dump, mapped. The views die with `close`.

    Attributes:
        header: the decoded header.
        states: bf16 bits as uint16, [tokens, L, H].
        input_ids: int32, [tokens].
    """

    def __init__(self, path: Path) -> None:
        """Maps the dump at `path`.

        Raises:
            SampleError: kind `dump_invalid`, naming the file, where header or size are not as the format demands.
            FileNotFoundError: there is no such file.
        """
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            try:
                self._header, start = decode_header(_beginning(descriptor), size)
            except SampleError as error:
                raise SampleError(error.kind, f"{path.name}: {error.message}") from error
            self._map: mmap.mmap | None = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor, self._start = descriptor, start
        header = self._header
        shape = (header.tokens, header.spec.states, header.hidden_size)
        self._states = np.frombuffer(self._map, np.uint16, header.states_bytes // 2, start).reshape(shape)
        self._ids = np.frombuffer(self._map, np.int32, header.tokens, header.data_bytes - header.tokens * ID_BYTES + start)

    @property
    def source(self) -> tuple[int, int] | None:
        """Descriptor of the file and the offset of `states` in it; None once closed."""
        return None if self._descriptor < 0 else (self._descriptor, self._start)

    @property
    def header(self) -> DumpHeader:
        """The decoded header."""
        return self._header

    @property
    def states(self) -> NDArray[np.uint16]:
        """bf16 bits, [tokens, L, H]."""
        return self._states

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [tokens]."""
        return self._ids

    def close(self) -> None:
        """Drops the views; the mapping goes with the last reference to them. The file stays."""
        self._states = np.empty((0, 0, 0), np.uint16)
        self._ids = np.empty(0, np.int32)
        self._map = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            os.close(self._descriptor)
