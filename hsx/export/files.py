"""Files that appear whole or not at all, with a checksum of what was written; and the two containers that trainers read."""

from __future__ import annotations

import json
import os
import secrets
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, cast

import torch
from awscrt import checksums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PARTIAL: Final = ".partial"
_PIECE: Final = 1 << 20
"""So much is written, and then looked at while it is in the processor's cache."""
_DTYPES: Final = {torch.bfloat16: "BF16", torch.int64: "I64"}


class CheckedFile:
    """A file that is written front to back, and remembers how much of what.

    Attributes:
        nbytes: bytes so far.
        crc32c: of them.
        failure: the error of the file system that ended the writing.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.nbytes = 0
        self.crc32c = 0
        self.failure: OSError | None = None

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Appends all of `data`; returns its length. Raises OSError."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _PIECE):
            piece = view[at : at + _PIECE]
            try:
                self._file.write(piece)
            except OSError as error:
                self.failure = error
                raise
            self.crc32c = cast("int", checksums.crc32c(piece, self.crc32c))
        self.nbytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Passes on what is buffered; torch asks for it."""
        self._file.flush()


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[CheckedFile]:
    """A file that has its name only once it is complete and on the disk: temporary name, fdatasync, rename.

    The folder must exist. One writer at a time for each path, unless it is `shared`: then several processes may write the same.
    Raises OSError.
    """
    own = f".{secrets.token_hex(4)}" if shared else ""  # not the process id: in containers they are all alike
    temporary = path.with_name(f".{path.name}{own}{PARTIAL}")
    try:
        with temporary.open("wb") as file:
            yield CheckedFile(file)
            file.flush()
            os.fdatasync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_torch(file: CheckedFile, content: Mapping[str, Any]) -> None:
    """`torch.save` of a dictionary. Its tensors must have memory of their own: a view would take along all that it views.

    Raises OSError.
    """
    try:
        torch.save(dict(content), cast("IO[bytes]", file))
    except RuntimeError:
        # Of a disk that was full for one write and not for the next, torch says that it is at an unexpected place.
        if file.failure is None:
            raise
        raise file.failure from None


def write_safetensors(file: CheckedFile, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """A safetensors file of contiguous tensors of int64 and bfloat16."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)
