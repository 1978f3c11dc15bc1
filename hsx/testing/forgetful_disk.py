"""Disks with a volatile cache and a memory of every write, so that a power cut can be made at any moment afterwards.

    python -m hsx.testing.forgetful_disk FOLDER LOG IMAGE...

mounts a file system (FUSE, spoken here directly) over FOLDER with one file for each IMAGE, under the same name; a loop device
on such a file is a disk. Every write and every flush that reaches it is appended to LOG before the kernel is answered, and
`images_at` makes of that what the disks hold after a power cut: all that was flushed, and of the rest some pages, in any order.
Disks break by what is written to the file `control` beside them: `break`, from then on every write and flush of all of them
fails with EIO; `spoil IMAGE OFFSET LENGTH`, reading that part fails with EIO until it is written; or `hang`: nobody who
asks FOLDER for its room (statvfs) gets an answer until `answer`. Ends with its parent.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.testing.mounts import unmount

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator, Sequence

PAGE: Final = 4096
_MOST: Final = 1 << 20
"""Bytes in one request at most."""
_IN: Final = struct.Struct("<IIQQIIII")
_OUT: Final = struct.Struct("<IiQ")
_INIT: Final = struct.Struct("<IIIIHHIIHHII24x")
_ATTR: Final = struct.Struct("<6Q10I")
_IO: Final = struct.Struct("<QQII")
_IO_BYTES: Final = 40
CONTROL: Final = "control"
_DIRECT_IO: Final = 1
"""What is opened so is not cached twice: every read and write reaches this process."""
_MAX_PAGES: Final = 1 << 22
_BIG_WRITES: Final = 1 << 5
_FOREVER: Final = 1 << 30
_ROOT: Final = 1
_STATFS: Final = 17
_RECORD: Final = struct.Struct("<BBxxIQ")
"""A record of the log: kind, disk, bytes of data that follow, offset on the disk."""
_WRITE: Final = 1
_FLUSH: Final = 2
_PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One thing that reached a disk.

    Attributes:
        disk: its number.
        flush: everything written to this disk before is safe from now on; else a write.
        offset: in bytes.
        data: what was written.
        end: bytes of the log up to and with this record: the moment of it.
    """

    disk: int
    flush: bool
    offset: int
    data: bytes
    end: int


def read_log(log: Path) -> list[Record]:
    """All whole records of a log."""
    content = log.read_bytes()
    records, position = [], 0
    while position + _RECORD.size <= len(content):
        kind, disk, size, offset = _RECORD.unpack_from(content, position)
        begin, position = position + _RECORD.size, position + _RECORD.size + size
        if position <= len(content):
            records.append(Record(disk, kind == _FLUSH, offset, content[begin:position], position))
    return records


def images_at(bases: Sequence[Path], records: Sequence[Record], moment: int, rng: random.Random | None) -> list[bytearray]:
    """What the disks hold after a power cut.

    Args:
        bases: what they held at first.
        records: of the log.
        moment: how many bytes of the log there were at the cut.
        rng: decides for each page that was written and not flushed whether it reached the disk; None: none did.
    """
    disks = [bytearray(base.read_bytes()) for base in bases]
    waiting: list[list[Record]] = [[] for _ in bases]
    for record in records:
        if record.end > moment:
            break
        if not record.flush:
            waiting[record.disk].append(record)
            continue
        for write in waiting[record.disk]:
            disks[record.disk][write.offset : write.offset + len(write.data)] = write.data
        waiting[record.disk].clear()
    if rng is not None:
        for disk, writes in zip(disks, waiting, strict=True):
            for write in writes:
                for at in range(0, len(write.data), PAGE):
                    if rng.random() < 0.5:
                        page = write.data[at : at + PAGE]
                        disk[write.offset + at : write.offset + at + len(page)] = page
    return disks


def write_image(path: Path, image: bytearray) -> None:
    """Writes a disk's content to an empty file, with holes where it is zero."""
    view, nothing = memoryview(image), bytes(_MOST)
    with path.open("wb") as file:
        file.truncate(len(image))
        for at in range(0, len(image), _MOST):
            if view[at : at + _MOST] != nothing[: len(image) - at]:
                file.seek(at)
                file.write(view[at : at + _MOST])


@dataclass(frozen=True, slots=True)
class ForgetfulDisks:
    """Disks that are there.

    Attributes:
        folder: where their files are, each under its image's name.
        bases: the images, as they were at first.
        log: of their writes and flushes.
        process: behind them.
    """

    folder: Path
    bases: list[Path]
    log: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    def now(self) -> int:
        """This moment, in bytes of the log: what was done before is in it."""
        return self.log.stat().st_size

    def break_down(self) -> None:
        """From now on writes and flushes fail with EIO."""
        (self.folder / CONTROL).write_text("break")

    def hang(self) -> None:
        """From now on whoever asks the folder for its room waits for `answer`; everything else goes on."""
        (self.folder / CONTROL).write_text("hang")

    def answer(self) -> None:
        """Answers everybody who has asked for the room, and who will."""
        (self.folder / CONTROL).write_text("answer")

    def spoil(self, name: str, content: bytes) -> None:
        """A bad sector: the first page of the disk with this content cannot be read any more, until it is written.

        Raises AssertionError where there is none.
        """
        disk = (self.folder / name).read_bytes()
        offset = disk.find(content)
        assert offset >= 0, f"disk {name} does not have that content"
        (self.folder / CONTROL).write_text(f"spoil {name} {offset // PAGE * PAGE} {PAGE}")


@contextmanager
def forgetful_disks(folder: Path, log: Path, bases: Sequence[Path]) -> Iterator[ForgetfulDisks]:
    """Mounts `bases`, files with distinct names, as files of forgetful disks over `folder`. The bases are not changed.

    To be left after whatever is mounted on them is unmounted.

    Raises:
        RuntimeError: the process behind it has ended, with its words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    command = [sys.executable, "-m", "hsx.testing.forgetful_disk", *map(str, (folder, log, *bases))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.readline()
            if said != b"mounted\n":
                raise RuntimeError(f"no forgetful disks: {(said + process.stdout.read()).decode(errors='replace')}")
            yield ForgetfulDisks(folder, list(bases), log, process)
    finally:
        unmount(folder)
        process.kill()
        process.wait()


class _Server:
    """Answers the kernel; one request after the other."""

    def __init__(self, fd: int, log: int, images: Sequence[Path]) -> None:
        self._fd = fd
        self._log = log
        self._names = {image.name: number for number, image in enumerate(images)}
        self._names[CONTROL] = len(images)
        self._disks = [bytearray(image.read_bytes()) for image in images]
        self._broken = False
        self._hanging: list[int] | None = None
        """Requests for the room that get no answer yet; None where they get one at once."""
        self._bad: list[tuple[int, int, int]] = []
        """(disk, begin, end) of what cannot be read."""
        self._handlers = {
            1: self._lookup,
            3: self._getattr,
            4: self._getattr,
            14: self._open,
            15: self._read,
            16: self._write,
            _STATFS: self._statfs,
            18: self._nothing,
            20: self._fsync,
            25: self._nothing,
            26: self._init,
            27: self._open,
            29: self._nothing,
            38: self._nothing,
        }
        """By the operation's number in the kernel's include/uapi/linux/fuse.h."""

    def serve(self) -> None:
        """Until the file system is unmounted."""
        room = bytearray(_MOST + 2 * PAGE)
        view = memoryview(room)
        while True:
            try:
                size = os.readv(self._fd, [room])
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in {errno.ENOENT, errno.EINTR}:
                    continue
                raise
            _, operation, unique, node, *_ = _IN.unpack_from(room)
            if operation in {2, 36, 42}:  # FORGET, INTERRUPT, BATCH_FORGET have no answer
                continue
            if operation == _STATFS and self._hanging is not None:
                self._hanging.append(unique)
                continue
            handler = self._handlers.get(operation)
            try:
                answer = handler(node, view[_IN.size : size]) if handler else errno.ENOSYS
            except OSError as error:
                answer = error.errno or errno.EIO
            body, status = (b"", -answer) if isinstance(answer, int) else (answer, 0)
            self._answer(unique, status, body)

    def _answer(self, unique: int, status: int, body: bytes) -> None:
        os.writev(self._fd, [_OUT.pack(_OUT.size + len(body), status, unique), body])

    def _init(self, _node: int, _body: memoryview) -> bytes:
        return _INIT.pack(7, 31, _MOST, _MAX_PAGES | _BIG_WRITES, 16, 12, _MOST, 1, _MOST // PAGE, 0, 0, 0)

    def _lookup(self, _node: int, body: memoryview) -> bytes:
        number = self._names.get(bytes(body).rstrip(b"\0").decode())
        if number is None:
            raise OSError(errno.ENOENT, "no such disk")
        node = number + _ROOT + 1
        return struct.pack("<QQQQII", node, 0, _FOREVER, _FOREVER, 0, 0) + self._attributes(node)

    def _getattr(self, node: int, _body: memoryview) -> bytes:
        return struct.pack("<QII", _FOREVER, 0, 0) + self._attributes(node)

    def _attributes(self, node: int) -> bytes:
        size = len(self._disks[node - _ROOT - 1]) if 0 < node - _ROOT <= len(self._disks) else 0
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o644
        return _ATTR.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, PAGE, 0)

    def _disk(self, node: int) -> bytearray:
        return self._disks[node - _ROOT - 1]

    def _open(self, node: int, _body: memoryview) -> bytes:
        return struct.pack("<QII", node, _DIRECT_IO if node != _ROOT else 0, 0)

    def _read(self, node: int, body: memoryview) -> bytes:
        _, offset, size, _ = _IO.unpack_from(body)
        for disk, begin, end in self._bad:
            if disk == node - _ROOT - 1 and offset < end and begin < offset + size:
                raise OSError(errno.EIO, "bad sector")
        return bytes(self._disk(node)[offset : offset + size])

    def _write(self, node: int, body: memoryview) -> bytes:
        _, offset, size, _ = _IO.unpack_from(body)
        data = body[_IO_BYTES : _IO_BYTES + size]
        if node - _ROOT - 1 == len(self._disks):
            self._obey(bytes(data).decode())
            return struct.pack("<II", size, 0)
        self._fail_if_broken()
        disk = node - _ROOT - 1
        # A disk puts another sector in the place of a bad one when that is written.
        self._bad = [bad for bad in self._bad if not (bad[0] == disk and offset <= bad[1] and bad[2] <= offset + size)]
        self._disk(node)[offset : offset + size] = data
        self._note(_WRITE, node, offset, data)
        return struct.pack("<II", size, 0)

    def _fsync(self, node: int, _body: memoryview) -> bytes:
        self._fail_if_broken()
        self._note(_FLUSH, node, 0, memoryview(b""))
        return b""

    def _obey(self, command: str) -> None:
        match command.split():
            case ["break"]:
                self._broken = True
            case ["hang"]:
                self._hanging = []
            case ["answer"]:
                waiting, self._hanging = self._hanging or [], None
                for unique in waiting:
                    with suppress(OSError):  # who was killed meanwhile waits no more
                        self._answer(unique, 0, self._statfs(_ROOT, memoryview(b"")))
            case ["spoil", name, offset, length] if name in self._names:
                self._bad.append((self._names[name], int(offset), int(offset) + int(length)))
            case _:
                raise OSError(errno.EINVAL, command)

    def _fail_if_broken(self) -> None:
        if self._broken:
            raise OSError(errno.EIO, "broken")

    def _note(self, kind: int, node: int, offset: int, data: memoryview) -> None:
        os.writev(self._log, [_RECORD.pack(kind, node - _ROOT - 1, len(data), offset), data])

    def _statfs(self, _node: int, _body: memoryview) -> bytes:
        return struct.pack("<5Q4I24x", 1 << 20, 1 << 20, 1 << 20, 0, 0, PAGE, 255, PAGE, 0)

    def _nothing(self, _node: int, _body: memoryview) -> bytes:
        return b""


def main() -> None:
    """Mounts, says so, and serves."""
    folder, log, *images = map(Path, sys.argv[1:])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"hsx-forgetful", bytes(folder), b"fuse", 0, options.encode()) != 0:
        sys.exit(f"FUSE over {folder}: {os.strerror(ctypes.get_errno())}")
    sys.stdout.write("mounted\n")
    sys.stdout.flush()
    _Server(fd, os.open(log, os.O_WRONLY | os.O_APPEND), images).serve()


if __name__ == "__main__":
    main()
