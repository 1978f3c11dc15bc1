"""The capture side's own account of an epoch: `counter.json`, and the lock that makes it the only one who writes.

Each data-parallel rank has its own. Shared by the SGLang plugin and by the reference engine. The state is written after the
dumps that it counts, so it may lag behind the folder (by a tenth of a second under load, longer while the file system is full)
and is never ahead of it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path
from typing import Final

from hsx.capture.model import CaptureRefusedError
from hsx.core.dump import PART_SUFFIX
from hsx.core.epoch import COUNTS, CaptureState, lock_name, state_name, to_json

log = logging.getLogger(__name__)

_HOLDER_BYTES: Final = 100
_START_FIELD: Final = 19
"""Position of the start time in a stat line once pid and name are cut off."""


class Counter:
    """Holds the epoch's capture lock from its making to the end of the process, and counts. Thread-safe.

    Args:
        folder: `<dump_dir>/<epoch>`; it exists.
        epoch: the epoch's uuid.
        rank: the DP rank that is counted; 0 without data parallelism.

    Raises:
        CaptureRefusedError: another process captures into this epoch; the message names its pid.
        OSError: lock or state file cannot be written.
    """

    def __init__(self, folder: Path, epoch: str, rank: int = 0) -> None:
        self._lock_fd = _hold(folder / lock_name(rank), rank)
        self._path = os.fspath(folder / state_name(rank))
        self._part = self._path + PART_SUFFIX
        self._guard = threading.Lock()
        # Numbers in a plain mapping: they change with every dump, and a frozen record costs ten times as much.
        self._counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._whose = (epoch, os.getpid(), _own_start_ticks(), rank)
        self._saved: dict[str, int] = {}
        self._failing = False
        try:
            self._write()
        except OSError:
            self.close()
            raise

    @property
    def lock_fd(self) -> int:
        """The descriptor that holds the lock: whoever inherits it holds it, too."""
        return self._lock_fd

    @property
    def state(self) -> CaptureState:
        """What has been counted, saved or not."""
        epoch, pid, start_ticks, rank = self._whose
        return CaptureState(epoch=epoch, pid=pid, start_ticks=start_ticks, rank=rank, **self._counts)

    def add(self, *, sequence: int = 0, published: int = 0, failed: int = 0, foreign: int = 0, incomplete: int = 0) -> None:
        """Counts; `save` makes it known.

        Args:
            sequence: a number that was given; the largest counts. 0 where none was given.
            published: dumps that have their final name.
            failed: error files that have theirs.
            foreign: requests prefilled whose rid is no marker.
            incomplete: markers given up without an error file.
        """
        with self._guard:
            counts = self._counts
            counts["sequence"] = max(sequence, counts["sequence"])
            counts["published"] += published
            counts["failed"] += failed
            counts["foreign"] += foreign
            counts["incomplete"] += incomplete

    def gauge(self, *, staged_bytes: int, staged_peak_bytes: int, blocked_us: int, forward_us: int, forwards: int) -> None:
        """Notes what `CaptureState` tells of staging, as it is now; `save` makes it known."""
        with self._guard:
            self._counts.update(
                staged_bytes=staged_bytes,
                staged_peak_bytes=staged_peak_bytes,
                blocked_us=blocked_us,
                forward_us=forward_us,
                forwards=forwards,
            )

    def save(self) -> bool:
        """Publishes the state where it changed; whether what is published is all that was counted.

        Never raises: what cannot be written now is written by a later call.
        """
        with self._guard:
            if self._counts == self._saved:
                return True
            try:
                self._write()
            except OSError:
                if not self._failing:
                    log.exception("capture.state_failed")
                self._failing = True
            else:
                self._failing = False
            return not self._failing

    def close(self) -> None:
        """Lets go of the lock. For tests: a server keeps it to its death."""
        os.close(self._lock_fd)

    def _write(self) -> None:
        # Plain calls: this runs ten times a second, and text files and Path objects cost more than the write itself.
        descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            data = to_json(self.state).encode()
            if os.write(descriptor, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._part)
        finally:
            os.close(descriptor)
        os.rename(self._part, self._path)  # noqa: PTH104
        self._saved = dict(self._counts)


def _hold(path: Path, rank: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, _HOLDER_BYTES, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        rank_name = f" as DP rank {rank}" if rank else ""
        message = (
            f"{holder} already captures into this epoch{rank_name}: a second server was started with the same epoch record"
        )
        raise CaptureRefusedError(message) from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _own_start_ticks() -> int:
    # As in hsx.engines.process, which is not for this side to import.
    text = Path("/proc/self/stat").read_text(errors="replace")
    return int(text[text.rindex(")") + 2 :].split()[_START_FIELD])
