"""Disks that fill, run out of inodes or turn read-only under a running job: the others go on, and no sample is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_done, hsx_running, wait_until
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 12
ORDERLY = {"concurrency": 1, "commit_samples": 1}
"""One sample after the other, each committed by itself."""
NO_COPIES = {"backup_seconds": 0}
"""Disks that are this small have no room for the ledger as well."""


def mount(*arguments: str) -> None:
    """Calls mount(8)."""
    subprocess.run(["mount", *arguments], check=True, capture_output=True)


def unmount(folder: Path) -> None:
    """Takes a file system away; at once, even while something reads it."""
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def disk_at() -> Iterator[Callable[..., None]]:
    """Puts a small file system (a tmpfs) over a folder; unmounted at the end."""
    if os.geteuid() != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("mounting needs root")
    with ExitStack() as mounted:

        def put(folder: Path, options: str) -> None:
            done = subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False, capture_output=True, text=True
            )
            if done.returncode != 0:
                assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
                pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
            mounted.callback(unmount, folder)

        yield put


def shards(root: Path) -> int:
    """Shards on a root, each under its final name."""
    return sum(1 for path in root.rglob("c.*") if not path.name.endswith(".partial"))


def homes(job: TinyJob) -> Counter[str]:
    """Committed samples by root."""
    with job.ledger() as ledger:
        return Counter(row.root for row in ledger.committed())


def complete(job: TinyJob) -> None:
    """Every sample is committed, right, and proved by `hsx verify`."""
    with job.ledger() as ledger:
        counts = ledger.counts()
        assert ledger.failures_by_reason() == {}, "a full disk was held against a sample"
    assert (counts.committed, counts.pending, counts.quarantined) == (SAMPLES, 0, 0)
    assert wrong_samples(job.loaded) == []
    done = hsx_done(job.loaded.path, "verify")
    assert done.process.returncode == ExitCode.DONE, done.out.read_text()


def nothing_damaged(job: TinyJob) -> None:
    """What is committed so far is there, whole and shown."""
    report = json.loads(hsx_done(job.loaded.path, "verify", "--json").out.read_text())
    assert report["damage"] == []


async def hold_at(server: RunningServer, index: int) -> int:
    """Makes the server hold the first attempt of sample `index`; returns how often it has held before."""
    before = (await server.struck()).get("hold", 0)
    await server.fault("hold", count=-1, match=f"-{index}-1-")
    return before


async def held(server: RunningServer, before: int, job: TinyJob, committed: int) -> None:
    """Returns once it does, and what came before is committed."""
    while (await server.struck()).get("hold", 0) == before:  # noqa: ASYNC110 - the event is in another process
        await asyncio.sleep(0.01)
    wait_until(lambda: homes(job).total() == committed, f"{committed} committed samples")


def test_a_root_without_space_leaves_the_work_to_the_other(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY)
    # The one with the most room is taken first; this one says it has more than any, and runs out of inodes.
    disk_at(tmp_path / "root-b", "size=1000g,nr_inodes=10")
    with hsx_running(job.loaded.path, "run") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    errors = running.events("error.met")
    assert {error["kind"] for error in errors} == {"roots_full"}
    assert running.events("root.lost") == [], "a disk without inodes is not a broken one"
    assert "root b" in errors[0]["message"]
    assert "ENOSPC" in errors[0]["message"]
    assert set(homes(job)) == {"a", "b"}
    assert homes(job) == {"a": shards(tmp_path / "root-a"), "b": shards(tmp_path / "root-b")}
    complete(job)


def test_a_root_that_fills_up_is_left_alone_from_then_on(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline={"concurrency": 6}, storage=NO_COPIES)
    disk_at(tmp_path / "root-a", "size=352k")
    disk_at(tmp_path / "root-b", "size=64k")
    with hsx_running(job.loaded.path, "run") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    assert running.events("error.met") == [], "want of room is no error while another root has some"
    assert set(homes(job)) == {"a", "b"}
    complete(job)


async def test_a_root_that_turns_read_only_in_the_middle(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY)
    disk_at(tmp_path / "root-a", "size=64m")
    disk_at(tmp_path / "root-b", "size=1000g")  # nearly all the room there is: everything goes here
    before = await hold_at(server, 6)
    with hsx_running(job.loaded.path, "run") as running:
        await held(server, before, job, 6)
        mount("-o", "remount,ro", str(tmp_path / "root-b"))
        await server.clear_faults()
        assert running.wait() == ExitCode.DONE, running.error()
    (lost,) = running.events("root.lost")
    assert (lost["root"], lost["kind"]) == ("b", "root_unusable")
    assert "EROFS" in lost["message"]
    assert homes(job) == {"b": 6, "a": 6}
    complete(job)


def test_a_job_that_waits_for_room_can_be_stopped_and_continued(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY, storage=NO_COPIES)
    for root in ("root-a", "root-b"):
        disk_at(tmp_path / root, "size=64k")
    with hsx_running(job.loaded.path, "run") as running:
        paused = running.wait_for("intake.paused")
        assert (paused["kind"], "free at least" in paused["message"]) == ("roots_full", True)
        running.send(signal.SIGTERM)
        assert running.wait() == ExitCode.INTERRUPTED, running.error()
    assert running.events("error.met") == [], "nothing was written to a full disk"
    assert 0 < sum(homes(job).values()) < SAMPLES
    nothing_damaged(job)
    mount("-o", "remount,size=16m", str(tmp_path / "root-a"))
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    complete(job)


async def test_dumps_that_wait_for_room_outlive_a_drain_and_are_adopted(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY, storage=NO_COPIES)
    disk_at(tmp_path / "root-a", "size=16m")
    disk_at(tmp_path / "root-b", "size=16k")  # room for what says whose it is, and for no shard
    before = await hold_at(server, 6)
    with hsx_running(job.loaded.path, "run") as running:
        await held(server, before, job, 6)
        mount("-o", "remount,ro", str(tmp_path / "root-a"))
        await server.clear_faults()
        assert running.wait_for("intake.paused")["kind"] == "roots_full"
        wait_until(lambda: bool(list(server.folder.glob("hsx1-*-6-1-*.safetensors"))), "the dump of sample 6")
        dumps = list(server.folder.glob("hsx1-*-6-1-*.safetensors"))
        running.send(signal.SIGTERM)
        assert running.wait() == ExitCode.INTERRUPTED, running.error()
    assert len(dumps) == 1
    assert dumps[0].exists()
    mount("-o", "remount,rw", str(tmp_path / "root-a"))
    with hsx_running(job.loaded.path, "run") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    # The next one may have been at the server already.
    assert 6 in [line["index"] for line in running.events("sample.committed") if line["adopted"]]
    assert not dumps[0].exists()
    complete(job)


async def test_a_run_may_go_on_without_a_root_and_finds_its_samples_when_it_is_back(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    go_on = {"on_missing_root": "go_on", "backup_seconds": 0}
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY, storage=go_on)
    disk_at(tmp_path / "root-a", "size=64m")
    disk_at(tmp_path / "root-b", "size=1000g")
    before = await hold_at(server, 6)
    with hsx_running(job.loaded.path, "run") as running:
        await held(server, before, job, 6)
        running.kill()  # before the server goes on: nothing else gets to a root
    await server.clear_faults()
    (tmp_path / "elsewhere").mkdir()
    mount("--bind", str(tmp_path / "elsewhere"), str(tmp_path / "root-b"))  # the disk is hidden by an empty folder
    with hsx_running(job.loaded.path, "run") as running:
        assert running.wait() == ExitCode.DONE, running.error()
    (lost,) = running.events("root.lost")
    assert (lost["root"], "is not the root it was" in lost["message"]) == ("b", True)
    assert homes(job) == {"b": 6, "a": 6}
    unmount(tmp_path / "root-b")
    complete(job)


async def test_all_roots_lost_ends_the_job_and_their_return_continues_it(
    tmp_path: Path, server: RunningServer, disk_at: Callable[..., None]
) -> None:
    job = make_job(tmp_path, samples=SAMPLES, server=server, pipeline=ORDERLY)
    roots = [tmp_path / "root-a", tmp_path / "root-b"]
    for root in roots:
        disk_at(root, "size=16m")
    before = await hold_at(server, 6)
    with hsx_running(job.loaded.path, "run") as running:
        await held(server, before, job, 6)
        for root in roots:
            mount("-o", "remount,ro", str(root))
        await server.clear_faults()
        assert running.wait() == ExitCode.RUN_ERROR, running.log.read_text()[-2000:]
    assert running.error().startswith("[root_unusable]")
    assert "EROFS" in running.error()
    assert sum(homes(job).values()) == 6
    nothing_damaged(job)
    # While they are read-only the job is refused before it starts.
    assert hsx_done(job.loaded.path, "run").process.returncode == ExitCode.REFUSED
    for root in roots:
        mount("-o", "remount,rw", str(root))
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    complete(job)
