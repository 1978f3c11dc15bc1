"""Small files that survive a power cut, and what a failed system call on a disk means."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def root_error(error: OSError, root: str, path: Path) -> RunError:
    """What a failed operation on a root means for the job: `roots_full` for want of space, `root_unusable` otherwise."""
    reason = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"
    if error.errno in FULL:
        return RunError("roots_full", f"root {root}: no space for {path} ({reason})")
    return RunError("root_unusable", f"root {root}: {path} cannot be used ({reason})")


def store_error(error: OSError, path: Path) -> RunError:
    """The same for the store's own folder: always `store_unwritable`."""
    reason = f"{errno.errorcode.get(error.errno or 0, '?')}: {error.strerror}"
    return RunError("store_unwritable", f"store: {path} cannot be written ({reason})")


def write_all(fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Writes all buffers, one after the other, at `offset`; goes on after short writes. Returns the offset behind them.

    An O_DIRECT descriptor for which the file system turns out to refuse O_DIRECT (EINVAL) becomes an ordinary one.
    Raises OSError.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    while views:
        try:
            written = os.pwritev(fd, views, offset)
        except OSError as error:
            if error.errno == errno.EINVAL and disable_direct(fd):
                continue
            raise
        if written == 0:
            raise OSError(errno.EIO, "the file system wrote 0 bytes")
        offset += written
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
    return offset


def send_all(fd: int, source: int, start: int, nbytes: int, offset: int) -> int:
    """Copies `nbytes` at `start` of the file `source` to `offset`, within the kernel. Returns the offset behind them.

    Raises OSError.
    """
    os.lseek(fd, offset, os.SEEK_SET)
    end = start + nbytes
    while start < end:
        sent = os.sendfile(fd, source, start, min(end - start, 8 << 20))
        if sent == 0:
            raise OSError(errno.EIO, "the file system took 0 bytes")
        start += sent
    return offset + nbytes


def disable_direct(fd: int) -> bool:
    """Takes O_DIRECT off a descriptor; False where it was not set."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flags & os.O_DIRECT:
        return False
    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    return True


def sync_folder(path: Path) -> None:
    """Makes the names in a folder durable. Raises OSError; a failure must not be retried, it would report success."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file_system(fd: int) -> None:
    """Makes everything on the file system of an open file durable (syncfs).

    Raises OSError, also for writes in the background that failed since `fd` was opened; a failure must not be retried.
    """
    if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def make_folder(path: Path) -> None:
    """Creates a folder, durably; one that is there is fine. The parent must exist. Raises OSError."""
    with suppress(FileExistsError):
        path.mkdir()
        sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Replaces a small file at once and durably: temporary name, fsync, rename, fsync of the folder. Raises OSError.

    One writer at a time. What a killed one left under the temporary name, the next one takes over.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            write_all(fd, [data], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def to_json(document: object) -> bytes:
    """A JSON document as it is written, indented for people."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def write_json(path: Path, document: object) -> None:
    """`write_file` of a JSON document."""
    write_file(path, to_json(document))
