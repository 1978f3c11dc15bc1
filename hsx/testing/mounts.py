"""Real disks for tests, in a mount namespace of their own: small, full, failing and vanishing ones. Needs root.

A namespace ends with its last process, and every mount and loop device in it with it: nothing is left on the machine even where
the tests are killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

CLONE_FS: Final = 0x00000200
CLONE_NEWNS: Final = 0x00020000
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
DEVICES: Final = ("/dev/loop-control", "/dev/fuse")
TOOLS: Final = ("mount", "umount", "mkfs.ext4", "strace")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def obstacle() -> str:
    """Why disks cannot be made here; "" where they can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing"
    lacking = [device for device in DEVICES if not Path(device).exists()]
    if lacking:
        return f"the kernel has no {', '.join(lacking)}"
    try:
        with private_mounts():
            pass
    except OSError as error:
        return f"a mount namespace is refused: {error}"
    return ""


def _call(name: str, *arguments: object) -> None:
    """A call of the C library that answers 0. Raises OSError."""
    if getattr(_LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


@contextmanager
def private_mounts() -> Iterator[None]:
    """Puts this thread, and the threads and processes that it starts, into a mount namespace of their own.

    What is mounted inside is seen by nobody else, and is taken away on leaving. For the main thread of a test: threads that
    were there before stay outside.

    Raises:
        OSError: no namespace may be made here.
    """
    folder = Path.cwd()
    outside = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("unshare", CLONE_NEWNS)
        before = set(_mount_points())
        try:
            # Else what is mounted here would appear outside too.
            mount("--make-rprivate", "/")
            yield
        finally:
            # A thread of some pool may stay in the namespace, and would keep what is mounted.
            for point in reversed(_mount_points()):
                if point not in before:
                    unmount(Path(point))
            # Threads that were started inside share this thread's working folder, and then it may not leave.
            _call("unshare", CLONE_FS)
            _call("setns", outside, CLONE_NEWNS)
            os.chdir(folder)
    finally:
        os.close(outside)


def _run(tool: str, *arguments: str | Path) -> None:
    """One of `TOOLS`, to its end. Raises OSError with its words."""
    words = [shutil.which(tool) or tool, *map(str, arguments)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _mount_points() -> list[str]:
    return [line.split(" ")[4] for line in Path("/proc/thread-self/mountinfo").read_text().splitlines()]


def mount(*arguments: str | Path) -> None:
    """Calls mount(8). Raises OSError with its words."""
    _run("mount", *arguments)


def remount(folder: Path, options: str) -> None:
    """Changes the options of a mounted file system, such as `ro` or `size=16m`."""
    mount("-o", f"remount,{options}", folder)


def unmount(folder: Path) -> None:
    """Takes a file system away at once, even while something uses it; harmless where there is none."""
    with suppress(OSError):
        _run("umount", "--lazy", folder)


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A tmpfs over `folder`, which is made if need be; `options` such as `size=1m,nr_inodes=10`."""
    folder.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", options, "tmpfs", folder)
    try:
        yield folder
    finally:
        unmount(folder)


def make_ext4(image: Path, megabytes: int) -> Path:
    """Makes a sparse file with an empty ext4 in it, of 4096-byte blocks and with the smallest journal; 16 MB at least.

    Everything is written now: no kernel thread goes on with it after the mount.
    """
    with image.open("wb") as file:
        file.truncate(megabytes << 20)
    layout = ["-b", "4096", "-J", "size=4", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard"]
    _run("mkfs.ext4", "-q", "-F", *layout, image)
    return image


@contextmanager
def ext4(image: Path, folder: Path, options: str = "") -> Iterator[Path]:
    """Mounts the ext4 in a file, by a loop device that goes with the mount, over `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    mount("-o", ",".join(["loop", *([options] if options else [])]), image, folder)
    try:
        yield folder
    finally:
        unmount(folder)


@contextmanager
def boot(identity: str, folder: Path) -> Iterator[None]:
    """The machine was started anew: its boot id is another, for everybody in this namespace.

    Args:
        identity: the boot id, a uuid.
        folder: an existing folder for a file that says it.
    """
    file = folder / f"boot-{identity}"
    file.write_text(identity + "\n")
    mount("--bind", file, BOOT_ID)
    try:
        yield
    finally:
        unmount(BOOT_ID)


@contextmanager
def disk_that_loses_writes(folder: Path, beside: Path, promised: int = 64, real: int = 6) -> Iterator[Path]:
    """An ext4 of `promised` MB over `folder` that has only `real` MB: beyond them fsync is EIO, as on a dying disk.

    Nobody is told at the write: it is the writeback that fails.

    Args:
        folder: where it is mounted; made if need be.
        beside: an empty folder for what is behind it; made if need be.
        promised: its size, in MB.
        real: how much of that there is, in MB, what mkfs writes included.
    """
    with ExitStack() as stack:
        stack.enter_context(tmpfs(beside, f"size={real}m"))
        image = make_ext4(beside / "image", promised)
        yield stack.enter_context(ext4(image, folder))


def filled(folder: Path, leave: int = 0) -> int:
    """Fills a file system up to the last block but for `leave` bytes with a file `filler`; returns its size in bytes."""
    filler = folder / "filler"
    block = bytes(1 << 16)
    with filler.open("wb", buffering=0) as file:
        for size in (len(block), 4096):
            with suppress(OSError):
                while True:
                    file.write(block[:size])
        size = file.tell()
        if leave:
            size = max(size - leave, 0)
            file.truncate(size)
        with suppress(OSError):
            os.fsync(file.fileno())
    return size
