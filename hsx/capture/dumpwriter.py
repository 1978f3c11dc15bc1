"""Dump files: preallocated, filled by offset, published by rename.

A dump grows as `<marker>.part` and becomes `<marker>.safetensors` at one `rename`; a reader therefore never sees half a
dump under its final name. `posix_fallocate` reserves the whole file first: a full tmpfs is then a clean ENOSPC at `begin`,
where a hole written later (or a mapping of it) would be SIGBUS for the whole server.

A dump that is there in one piece is written by `write_whole`, in four calls to the kernel instead of seven. Names are strings
here: most of the time for a small dump would go into Path objects. Where there is no writer process, the thread that runs the
model waits for much of what is done here, at the interpreter lock.

The writer checks no coverage: what has arrived is `assembly.py`'s business. It is shared by the SGLang plugin, whose writer
process has no use for torch, and by the reference engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.dump import (
    ERROR_SUFFIX,
    ID_BYTES,
    MAX_HEADER,
    PART_SUFFIX,
    SUFFIX,
    DumpHeader,
    decode_header,
    encode_header,
)
from hsx.core.spec import BF16_BYTES
from hsx.errors import SampleError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.core.marker import Marker
    from hsx.core.spec import CaptureSpec

_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
_LARGEST_SEQUENCE: Final = 10**18
"""Stands in for the sequence until publication, so that the room left for the header is always enough."""


@dataclass(frozen=True, slots=True)
class _Open:
    """One `.part` file: its descriptor and where its two tensors begin."""

    fd: int
    states_at: int
    ids_at: int


class DumpWriter:
    """Writes the dumps of one epoch into its folder.

    Calls for one marker come from one thread at a time; calls for different markers may come from several threads.

    Args:
        folder: `<dump_dir>/<epoch>`; it exists.
        epoch: the epoch's uuid.
        spec: layers and final state, as read back from the model.
        hidden_size: H.
        model: model name or path as the server was given it.
        engine: engine name and version, such as `sglang 0.5.23`.
        rank: the DP rank that it writes for; 0 without data parallelism.
    """

    def __init__(
        self, folder: Path, epoch: str, spec: CaptureSpec, hidden_size: int, model: str, engine: str, rank: int = 0
    ) -> None:
        self._folder = os.fspath(folder)
        self._epoch = epoch
        self._spec = spec
        self._hidden_size = hidden_size
        self._model = model
        self._engine = engine
        self._rank = rank
        self._open: dict[Marker, _Open] = {}
        self._sequence = 0
        self._publishing = threading.Lock()

    @property
    def sequence(self) -> int:
        """The sequence of the last dump published; 0 before the first."""
        return self._sequence

    def go_on(self, sequence: int) -> None:
        """Numbers go on behind `sequence`, from 0: another writer has given those up to it, or may have."""
        self._sequence = sequence

    def described(self) -> dict[str, str | int | list[int]]:
        """What another process needs to make a writer like this one."""
        return {
            "folder": self._folder,
            "epoch": self._epoch,
            "layers": list(self._spec.layers),
            "final": self._spec.final,
            "hidden_size": self._hidden_size,
            "model": self._model,
            "engine": self._engine,
            "rank": self._rank,
        }

    def begin(self, marker: Marker) -> None:
        """Opens and preallocates the `.part` file. On a marker already open: starts again, what was written is void.

        Raises OSError (ENOSPC when the dump directory is full); the `.part` file is gone then.
        """
        if marker in self._open:
            return
        header = self._header(marker, _LARGEST_SEQUENCE)
        states_at = len(encode_header(header))
        path = self._path(marker, PART_SUFFIX)
        fd = os.open(path, _CREATE, 0o600)
        try:
            os.posix_fallocate(fd, 0, states_at + header.data_bytes)
        except OSError:
            os.close(fd)
            _unlink(path)
            raise
        self._open[marker] = _Open(fd, states_at, states_at + header.states_bytes)

    def write(self, marker: Marker, offset: int, states: NDArray[np.uint16], input_ids: NDArray[np.int32]) -> None:
        """Writes n tokens of a marker that has begun, the first of them being token `offset` of its prompt.

        Args:
            marker: whose tokens they are.
            offset: index of the first token, from 0.
            states: bits of bf16, uint16 [n, L, H].
            input_ids: int32 [n].

        Raises:
            ValueError: a wrong shape or dtype, tokens past the marker's end, or no beginning; nothing is written then.
            OSError: the file cannot be written.
        """
        bits = self._checked(marker, offset, states, input_ids)
        opened = self._begun(marker)
        row = self._spec.states * self._hidden_size * BF16_BYTES
        _write_all(opened.fd, [_bytes(bits)], opened.states_at + offset * row)
        _write_all(opened.fd, [_bytes(input_ids)], opened.ids_at + offset * ID_BYTES)

    def write_whole(self, marker: Marker, states: NDArray[np.uint16], input_ids: NDArray[np.int32]) -> int:
        """Writes and publishes all tokens of a marker at once; of one that has begun, what was written before is void.

        Nothing is reserved first: with nothing to come, a full file system is as clean an error at the only write.

        Args:
            marker: whose tokens they are.
            states: bits of bf16, uint16 [tokens, L, H].
            input_ids: int32 [tokens].

        Returns:
            The dump's sequence, as `publish` does.

        Raises:
            ValueError: a wrong shape or dtype; nothing is written then.
            OSError: it cannot be written, or not renamed; the `.part` file is gone then, and the sequence is not used up.
        """
        bits = self._checked(marker, 0, states, input_ids)
        if len(bits) != marker.tokens:
            raise ValueError(f"{marker}: {len(bits)} tokens; expected all {marker.tokens}")
        if marker in self._open:
            self.drop(marker)
        part = self._path(marker, PART_SUFFIX)
        with self._publishing:
            sequence = self._sequence + 1
            head = encode_header(self._header(marker, sequence))
            try:
                fd = os.open(part, _CREATE, 0o600)
                try:
                    _write_all(fd, [memoryview(head), _bytes(bits), _bytes(input_ids)], 0)
                finally:
                    os.close(fd)  # before it has its name: what a close refuses is no dump
                os.rename(part, self._path(marker, SUFFIX))  # noqa: PTH104 - names are strings here
            except BaseException:
                _unlink(part)
                raise
            self._sequence = sequence
        return sequence

    def publish(self, marker: Marker) -> int:
        """Writes the header, renames the file to its final name and returns its sequence (1 for the epoch's first).

        Raises OSError, or ValueError for a marker that has not begun; the sequence is not used up then, and the `.part` file is
        gone.
        """
        opened = self._begun(marker)
        part = self._path(marker, PART_SUFFIX)
        with self._publishing:
            sequence = self._sequence + 1
            head = encode_header(self._header(marker, sequence), at_least=opened.states_at)
            try:
                _write_all(opened.fd, [memoryview(head)], 0)
                del self._open[marker]
                os.close(opened.fd)  # before it has its name, as in `write_whole`
                os.rename(part, self._path(marker, SUFFIX))  # noqa: PTH104 - names are strings here
            except BaseException:
                self.drop(marker)
                raise
            self._sequence = sequence
        return sequence

    def published(self, marker: Marker) -> int:
        """The sequence of the marker's dump, where it lies under its name; 0 where it does not, or cannot be read."""
        try:
            with open(self._path(marker, SUFFIX), "rb") as file:  # noqa: PTH123 - names are strings here
                return decode_header(file.read(8 + MAX_HEADER), os.fstat(file.fileno()).st_size)[0].sequence
        except (OSError, SampleError):
            return 0

    def fail(self, marker: Marker, reason: str, errno: int = 0) -> None:
        """Drops the marker's partial file and leaves `<marker>.error`: a JSON object with marker, epoch, reason and errno.

        On a tmpfs without a single free page the note is empty, which says as much.

        Raises OSError where not even a name can be made.
        """
        self.drop(marker)
        note = {"marker": str(marker), "epoch": self._epoch, "reason": reason, "errno": errno}
        part = Path(self._path(marker, ERROR_SUFFIX + PART_SUFFIX))
        try:
            part.write_text(json.dumps(note))
        except OSError:
            part.write_bytes(b"")
        part.rename(self._path(marker, ERROR_SUFFIX))

    def drop(self, marker: Marker) -> None:
        """Forgets a marker and unlinks its `.part` file, be it another process's that is gone; harmless where there is none."""
        opened = self._open.pop(marker, None)
        if opened is not None:
            os.close(opened.fd)
        _unlink(self._path(marker, PART_SUFFIX))

    def _begun(self, marker: Marker) -> _Open:
        opened = self._open.get(marker)
        if opened is None:
            raise ValueError(f"{marker}: its dump has not begun; expected `begin` first")
        return opened

    def _checked(
        self, marker: Marker, offset: int, states: NDArray[np.uint16], input_ids: NDArray[np.int32]
    ) -> NDArray[np.uint16]:
        """The states, contiguous. Raises ValueError where they, or the ids, are not what belongs to these tokens."""
        bits = np.ascontiguousarray(states)
        count = len(input_ids)
        expected = (count, self._spec.states, self._hidden_size)
        if bits.dtype != np.uint16:
            raise ValueError(f"{marker}: states have dtype {bits.dtype}; expected uint16 (the bits of bf16)")
        if bits.shape != expected or input_ids.dtype != np.int32:
            raise ValueError(f"{marker}: states are {bits.shape}, ids {input_ids.dtype}; expected {expected} and int32")
        if not 0 <= offset <= offset + count <= marker.tokens:
            raise ValueError(f"{marker}: tokens {offset} to {offset + count}; expected at most {marker.tokens}")
        return bits

    def _path(self, marker: Marker, suffix: str) -> str:
        return f"{self._folder}/{marker}{suffix}"

    def _header(self, marker: Marker, sequence: int) -> DumpHeader:
        return DumpHeader(marker, self._epoch, sequence, self._spec, self._hidden_size, self._model, self._engine, self._rank)


def _bytes(data: NDArray[np.uint16] | NDArray[np.int32]) -> memoryview:
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8).data


def _write_all(fd: int, buffers: list[memoryview], offset: int) -> None:
    """pwritev until everything is written: a full file system may take part of a call and fail the next one."""
    while buffers:
        done = os.pwritev(fd, buffers, offset)
        offset += done
        while buffers and done >= len(buffers[0]):
            done -= len(buffers.pop(0))
        if buffers:
            buffers[0] = buffers[0][done:]


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108 - names are strings here
