"""One hsx per job, per store and per dump directory: advisory locks that die with their holder."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JOB_LOCK: Final = "job.lock"
"""Name of the job's lock file in its state folder."""


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
        RunError: `job_locked`, naming the holder, where another process has it; `kind` where its folder is full, read-only or
            not to be used otherwise.
    """
    descriptor = -1
    try:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            _hold(descriptor, path, what)
        except OSError as error:
            raise RunError(kind, f"{what}: lock file {path} cannot be written: {error.strerror}") from error
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _hold(descriptor: int, path: Path, what: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "an unknown process"
        raise RunError("job_locked", f"{what} is held by {holder}; expected no other hsx on it (lock file {path})") from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
