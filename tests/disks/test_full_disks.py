"""Disks fill up under a running job: it waits for room, says how much, goes on by itself, and loses nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_running, wait_until
from hsx.testing.holding import held_at
from hsx.testing.mounts import ext4, filled, make_ext4, tmpfs
from hsx.testing.promise import assert_kept, committed_rows
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.testing.commands import HsxProcess
    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES: Final = 16
BEFORE: Final = 6
MEGABYTES: Final = 64
LEAVE: Final = 192 << 10
"""Room for a few shards."""
ORDERLY: Final = {"concurrency": 1, "commit_samples": 1}


def finished(job: TinyJob, running: HsxProcess) -> None:
    """The job ends well, and want of room was held against no sample."""
    assert running.wait() == ExitCode.DONE, running.error()
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
    told = {line["index"]: line["marker"] for line in running.events("sample.committed")}
    assert_kept(job.loaded, SAMPLES, told)


def test_a_root_of_64_mb_fills_up_and_the_other_takes_the_rest(tmp_path: Path, shared_server: RunningServer) -> None:
    """Somebody else fills it, after a shard was promised room on it."""
    job = make_job(tmp_path, samples=SAMPLES, longest=300, server=shared_server, pipeline=ORDERLY)
    a, b = (root.path for root in job.loaded.roots)
    with ext4(make_ext4(tmp_path / "a", MEGABYTES), a), ext4(make_ext4(tmp_path / "b", MEGABYTES), b):
        with hsx_running(job.loaded.path, "run") as running:
            with held_at(job, shared_server, BEFORE) as wait:
                wait()
                filled(a)
            finished(job, running)
        rows = committed_rows(job.loaded)
        assert {row.root for row in rows.values() if row.index < BEFORE} == {"a", "b"}
        assert {row.root for row in rows.values() if row.index >= BEFORE} == {"b"}
        assert running.events("root.lost") == [], "a full root is not a broken one"


def test_all_roots_full_is_waited_out(tmp_path: Path, shared_server: RunningServer) -> None:
    job = make_job(tmp_path, samples=SAMPLES, longest=300, server=shared_server, pipeline={"concurrency": 4})
    roots = [root.path for root in job.loaded.roots]
    with ext4(make_ext4(tmp_path / "a", MEGABYTES), roots[0]), ext4(make_ext4(tmp_path / "b", MEGABYTES), roots[1]):
        for root in roots:
            filled(root, leave=LEAVE)
        with hsx_running(job.loaded.path, "run") as running:
            paused = running.wait_for("intake.paused")
            assert paused["kind"] == "roots_full"
            assert "free at least" in paused["message"]
            # It may pause before the first is committed, where that takes a while: what has room goes on.
            wait_until(lambda: len(committed_rows(job.loaded)) > 0, "a committed sample")
            assert len(committed_rows(job.loaded)) < SAMPLES
            (roots[1] / "filler").unlink()
            finished(job, running)
        assert running.events("intake.resumed")
        # The intake stopped before a disk was full; only the copy of the ledger found no room on the one that still is.
        assert all("no copy of the ledger on root a" in error["message"] for error in running.events("error.met"))


def test_a_full_dump_tmpfs_is_waited_out(tmp_path: Path) -> None:
    """Somebody else fills it while a prompt is worked on: its dump cannot be written, nor the reason why."""
    staging = {"dump_dir": str(tmp_path / "dumps"), "max_bytes": "1MiB"}
    job = make_job(tmp_path, samples=SAMPLES, longest=300, staging=staging, pipeline=ORDERLY)
    dumps = job.loaded.dump_dir
    port = job.loaded.config.engine.port
    with (
        tmpfs(dumps, "size=2m"),
        running_reference(dumps, LAYERS, model=job.loaded.model, port=port, chunk=32) as server,
        hsx_running(job.loaded.path, "run") as running,
    ):
        with held_at(job, server, BEFORE) as wait:
            wait()
            filled(dumps)
        paused = running.wait_for("intake.paused")
        assert paused["kind"] == "staging_full"
        (dumps / "filler").unlink()
        finished(job, running)
