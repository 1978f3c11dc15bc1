"""One of two disks fails in the run, in each way that disks do: the other takes the rest, and what was committed stays."""

from __future__ import annotations

import json
import resource
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_done, hsx_running
from hsx.testing.forgetful_disk import forgetful_disks
from hsx.testing.holding import held_at
from hsx.testing.mounts import disk_that_loses_writes, ext4, filled, make_ext4, remount, unmount
from hsx.testing.power import recorded
from hsx.testing.promise import assert_kept, committed_rows, damages
from hsx.testing.servers import running_reference, tiny_config
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

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
ORDERLY: Final = {"concurrency": 1, "commit_samples": 1}
"""One sample after the other, each committed by itself."""
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
    # Want of room takes a root out of service for a while, anything else for the rest of the run. Copies of the ledger that
    # such a root does not take are told of too, and harm nothing.
    said = [line["message"] for name in ("root.lost", "error.met") for line in running.events(name)]
    return [message for message in said if not message.startswith("no copy of the ledger")]


@pytest.mark.parametrize("reason", WAYS)
def test_a_disk_fails_in_the_run(tmp_path: Path, shared_server: RunningServer, reason: str) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=shared_server, pipeline=ORDERLY)
    (tmp_path / "beside").mkdir()
    sound = ext4(make_ext4(tmp_path / "sound", MEGABYTES), job.loaded.roots[0].path)
    with sound, WAYS[reason](job.loaded.roots[1].path, tmp_path / "beside") as (fail, put_back):
        errors = run_until_it_fails(job, shared_server, fail)
        told = committed_rows(job.loaded)
        of_b = [error for error in errors if "root b" in error and reason in error]
        # One that is full is tried again after half a minute, which a busy machine may need for the rest of the job.
        assert len(of_b) >= 1 if reason == "ENOSPC" else len(of_b) == 1, errors
        assert {row.root for row in told.values() if row.index < BEFORE} == {"a", "b"}
        assert {row.root for row in told.values() if row.index >= BEFORE} == {"a"}
        put_back()
        assert_kept(job.loaded, SAMPLES, {index: row.marker for index, row in told.items()})


def test_the_disk_of_the_ledger_dies(tmp_path: Path, shared_server: RunningServer) -> None:
    """The run ends; from what that disk had kept until then, the job goes on."""
    job = make_job(tmp_path, samples=SAMPLES, server=shared_server, pipeline=ORDERLY)
    with recorded(tmp_path / "power", {"state": job.loaded.state_dir}) as recording:
        recording.begin()
        with hsx_running(job.loaded.path, "run") as running:
            with held_at(job, shared_server, BEFORE) as wait:
                wait()
                recording.disks.break_down()
                recording.end()
            assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
        assert running.error().startswith("[ledger_failed]")
    told = {line["index"]: line["marker"] for line in running.events("sample.committed")}
    assert len(told) == BEFORE
    with recording.cut(recording.records[-1].end):
        done = hsx_done(job.loaded.path, "run")
        assert done.process.returncode == ExitCode.DONE, done.error()
        assert_kept(job.loaded, SAMPLES, told)


def test_files_may_not_grow_as_long_as_a_shard(tmp_path: Path) -> None:
    """A limit of the process: the kernel writes what fits, and then fails. No disk is full, and none may be used."""
    job = make_job(tmp_path, samples=4, pipeline=ORDERLY)
    tiny_config(job.loaded.model, hidden_size=256)
    rows = [{"id": f"row-{tokens}", "input_ids": list(range(100, 100 + tokens))} for tokens in (10, 20, 400, 30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limit = 400 * 3 * 256 * 2  # the long one's states, without the rest of its shard; the ledger stays below
    port = job.loaded.config.engine.port
    with running_reference(job.loaded.dump_dir, LAYERS, model=job.loaded.model, port=port) as server:
        with hsx_running(job.loaded.path, "run") as running:
            with held_at(job, server, 0) as wait:  # nothing is written before the limit is there
                wait()
                resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
        assert running.error().startswith("[root_unusable]")
        assert "EFBIG" in running.error()
        told = {line["index"]: line["marker"] for line in running.events("sample.committed")}
        assert list(told) == [0, 1]
        assert damages(job.loaded) == []
        done = hsx_done(job.loaded.path, "run")
        assert done.process.returncode == ExitCode.DONE, done.error()
    assert_kept(job.loaded, len(rows), told)
