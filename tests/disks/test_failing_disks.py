"""One of two disks fails in the run, in each way that disks do: the other takes the rest, and what was committed stays."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_running
from hsx.testing.forgetful_disk import forgetful_disks
from hsx.testing.holding import held_at
from hsx.testing.mounts import disk_that_loses_writes, ext4, filled, make_ext4, remount, unmount
from hsx.testing.promise import assert_kept, committed_rows
from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES: Final = 16
BEFORE: Final = 8
"""So many are committed when the disk fails."""
MEGABYTES: Final = 64
Disk = tuple["Callable[[], object]", "Callable[[], object]"]
"""What makes it fail, and what has to be done before it can be read again."""


def nothing() -> None:
    """It can be read all the time."""


@contextmanager
def turning_read_only(folder: Path, beside: Path) -> Iterator[Disk]:
    with ext4(make_ext4(beside / "image", MEGABYTES), folder):
        yield lambda: remount(folder, "ro"), nothing


@contextmanager
def unmounted(folder: Path, beside: Path) -> Iterator[Disk]:
    """Its mount point is an empty folder then."""
    with ExitStack() as mounted:

        def put_back() -> None:
            mounted.enter_context(ext4(beside / "image", folder))

        mounted.enter_context(ext4(make_ext4(beside / "image", MEGABYTES), folder))
        yield lambda: unmount(folder), put_back


@contextmanager
def dying(folder: Path, beside: Path) -> Iterator[Disk]:
    """It answers each write and flush with EIO; what it has can be read."""
    base = make_ext4(beside / "image", MEGABYTES)
    with forgetful_disks(beside / "disks", beside / "log", [base]) as disks, ext4(disks.folder / base.name, folder):
        yield disks.break_down, nothing


@contextmanager
def overbooked(folder: Path, beside: Path) -> Iterator[Disk]:
    """It has less than it promises: a write is taken, and fdatasync says that it is lost."""
    with disk_that_loses_writes(folder, beside / "real", promised=MEGABYTES, real=16):
        yield lambda: filled(beside / "real"), nothing


WAYS: Final[dict[str, Callable[[Path, Path], AbstractContextManager[Disk]]]] = {
    "EROFS": turning_read_only,
    "ENOENT": unmounted,
    "EIO": dying,
    "ENOSPC": overbooked,
}
"""By what the log says of it."""


def run_until_it_fails(job: TinyJob, server: RunningServer, fail: Callable[[], object]) -> list[str]:
    """Runs the job, has the disk fail when `BEFORE` samples are committed, and lets it end; what was said of roots."""
    with hsx_running(job.loaded.path, "run") as running:
        with held_at(job, server, BEFORE) as wait:
            wait()
            fail()
        assert running.wait() == ExitCode.DONE, running.error()
    # Want of room takes a root out of service for a while, anything else for the rest of the run.
    return [line["message"] for name in ("root.lost", "error.met") for line in running.events(name)]


@pytest.mark.parametrize("reason", WAYS)
def test_a_disk_fails_in_the_run(tmp_path: Path, shared_server: RunningServer, reason: str) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=shared_server, pipeline={"concurrency": 1, "commit_samples": 1})
    (tmp_path / "beside").mkdir()
    sound = ext4(make_ext4(tmp_path / "sound", MEGABYTES), job.loaded.roots[0].path)
    with sound, WAYS[reason](job.loaded.roots[1].path, tmp_path / "beside") as (fail, put_back):
        errors = run_until_it_fails(job, shared_server, fail)
        told = committed_rows(job.loaded)
        assert len([error for error in errors if "root b" in error and reason in error]) == 1, errors
        assert {row.root for row in told.values() if row.index < BEFORE} == {"a", "b"}
        assert {row.root for row in told.values() if row.index >= BEFORE} == {"a"}
        put_back()
        assert_kept(job.loaded, SAMPLES, {index: row.marker for index, row in told.items()})
