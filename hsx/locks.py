"""One hsx per job, per store and per dump directory, and turns in moving shards: advisory locks that die with their holder."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import socket
import sys
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.engines.process import boot_id, command_of, start_ticks
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hsx.config_load import LoadedConfig

_SHOWN: Final = 300
JOB_LOCK: Final = "job.lock"
"""Name of the job's lock file in its state folder."""
MOVE_LOCK: Final = "move.lock"
"""Name, there, of the lock of `hsx move`: one at a time, beside a run or at rest."""
HOMES_LOCK: Final = "homes.lock"
"""Name, there, of the lock file of `Homes`."""


def store_lock(store: Path) -> Path:
    """The store's lock file: beside it, where no Zarr reader sees it, and the same by whatever links the store is reached."""
    store = store.resolve()
    return store.with_name(f".{store.name}.lock")


@contextmanager
def locked(path: Path, what: str, kind: str = "ledger_failed") -> Iterator[None]:
    """Holds the lock file at `path` for the time of the block; the file names its holder and stays.

    Args:
        path: the lock file; its folder is made where it is missing.
        what: what is locked, for the message.
        kind: the error where the file cannot be made or written.

    Raises:
        RunError: `job_locked`, naming the holder, where another process has it; `kind` where its folder is full, read-only,
            on a file system without locks, or not to be used otherwise.
    """
    descriptor = -1
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = _take(path, what, kind)
        except OSError as error:
            user = f" (user id {os.geteuid()})" if isinstance(error, PermissionError) else ""
            raise RunError(kind, f"{what}: lock file {path} cannot be written: {error.strerror}{user}") from error
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def holder_of(path: Path) -> str:
    """Who holds the lock file at `path` now, in words; "" where nobody is seen to. Takes no lock, as `holder_pid` does."""
    with _looked_at(path) as descriptor:
        return _holder(descriptor) if descriptor >= 0 and _kernels_holder(descriptor) else ""


def holder_pid(path: Path) -> int:
    """The process that holds the lock file at `path`; 0 where none is seen to: nobody, or another host or pid namespace.

    Takes no lock, so that it keeps nobody from starting.
    """
    with _looked_at(path) as descriptor:
        return _kernels_holder(descriptor) if descriptor >= 0 else 0


@contextmanager
def _looked_at(path: Path) -> Iterator[int]:
    """A descriptor to read a lock file by; -1 where it cannot be opened."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield -1
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Homes:
    """The right to change where committed samples lie; implements the port `Homes`. It dies with its holder.

    Args:
        state_dir: the job's state folder.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / HOMES_LOCK

    def take(self) -> Callable[[], None]:
        """Waits until nobody else has it, thread or process; returns what gives it back. Raises RunError `ledger_failed`."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                # Of an open file of its own, so that two threads keep each other out as well.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise RunError("ledger_failed", f"lock file {self._path} cannot be locked: {error.strerror}") from error
        return partial(os.close, descriptor)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Holds it for the time of the block."""
        give = self.take()
        try:
            yield
        finally:
            give()


@contextmanager
def at_rest(loaded: LoadedConfig) -> Iterator[None]:
    """Keeps every other hsx off a job, its store and its roots. Raises RunError `job_locked`, naming who has them."""
    with ExitStack() as held:
        held.enter_context(locked(loaded.state_dir / JOB_LOCK, f"job {loaded.config.job.name}"))
        held.enter_context(locked(store_lock(loaded.store), f"store {loaded.store}", "store_unwritable"))
        held.enter_context(locked(loaded.state_dir / MOVE_LOCK, f"hsx move of job {loaded.config.job.name}"))
        held.enter_context(Homes(loaded.state_dir).held())
        yield


def _take(path: Path, what: str, kind: str) -> int:
    """Opens the file, locks it and writes this process' name into it; the descriptor holds the lock until it is closed."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path, what, kind)
            if _is(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _myself().encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # Somebody removed the file between open and lock: the lock of a file without a name keeps nobody out.
        os.close(descriptor)


def _lock(descriptor: int, path: Path, what: str, kind: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(descriptor)
        raise RunError("job_locked", f"{what} is held by {holder}; expected no other hsx on it (lock file {path})") from None
    except OSError as error:
        raise RunError(
            kind,
            f"{what}: {path} cannot be locked: {error.strerror}; expected a file system that supports flock"
            " (a local disk, or a network mount with its locks on)",
        ) from error


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _myself() -> str:
    """What a lock file says: JSON on one line."""
    pid = os.getpid()
    since = datetime.now(tz=UTC).isoformat(timespec="seconds")
    name = {"pid": pid, "host": socket.gethostname(), "boot_id": boot_id(), "start_ticks": start_ticks(pid)}
    return json.dumps({**name, "since": since, "command": shlex.join(sys.orig_argv)[:_SHOWN]}) + "\n"


def _holder(descriptor: int) -> str:
    """Who holds the lock, in words.

    The lock is the kernel's and its holder lives; the file may still name one that was killed, whose pid may have gone to
    another process. So what is written there counts only if that very process runs, or is another host's.
    """
    try:
        written = json.loads(os.pread(descriptor, 4096, 0))
        name = f"pid {written['pid']}, running since {written['since']}: {written['command']}"
        if written["host"] != socket.gethostname():
            return f"{name} (on host {written['host']})"
        if (written["boot_id"], written["start_ticks"]) == (boot_id(), start_ticks(int(written["pid"]))):
            return name
    except (ValueError, KeyError, TypeError):
        pass
    pid = _kernels_holder(descriptor)
    return f"pid {pid}: {command_of(pid)}" if pid else "a process that has not said its name"


def _kernels_holder(descriptor: int) -> int:
    """The pid of the lock's holder in the kernel's table; 0 where it is not there (network disks, other pid namespaces)."""
    found = os.fstat(descriptor)
    wanted = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        # number: FLOCK ADVISORY WRITE pid device:inode start end; waiting ones have an arrow after the number.
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5] == wanted:
            return max(int(fields[4]), 0)
    return 0
