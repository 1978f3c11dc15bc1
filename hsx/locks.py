"""One hsx per job, and one per dump directory: advisory locks that die with their holder."""

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


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Holds the lock file at `path` for the time of the block; the file names its holder and stays.

    Args:
        path: the lock file; its folder is made where it is missing.
        what: what is locked, for the message.

    Raises:
        RunError: kind `job_locked`, naming the holder, where another process has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunError("staging_failed", f"{what}: lock file {path} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 100, 0).decode(errors="replace").strip() or "an unknown process"
            raise RunError(
                "job_locked", f"{what} is held by {holder}; expected no other hsx on it (lock file {path})"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
