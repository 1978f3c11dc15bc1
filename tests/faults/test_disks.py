"""Disks that fill, fail or disappear under a running job; the other tests of real disks are in tests/disks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_running, log_lines
from hsx.testing.holding import held_at
from hsx.testing.mounts import filled, remount, tmpfs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("private_disks")]

ORDERLY = {"concurrency": 1, "commit_samples": 1}
HELD = 5
LEAVE = 96 << 10
"""Room for two or three shards."""


@pytest.fixture
def run_on_disks(job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]) -> Callable[..., None]:
    """Runs a job over two small disks, does something to them while it holds at a sample, and reports the row."""

    def go(row: str, during: Callable[[Path, Path], None], after: Callable[[Path, Path], None] | None, **told: Any) -> None:
        job = job_of(pipeline=ORDERLY)
        a, b = (root.path for root in job.loaded.roots)
        with tmpfs(a, "size=16m"), tmpfs(b, "size=16m"), hsx_running(job.loaded.path, "run") as running:
            with held_at(job, server, HELD) as wait:
                wait()
                during(a, b)
            if after is not None:
                running.wait_for("intake.paused")
                after(a, b)
            assert running.wait() == ExitCode.DONE, running.error()
            seen(row, job.loaded, log=log_lines(running.log), **told)

    return go


def test_a_root_that_fills_up(run_on_disks: Callable[..., None]) -> None:
    run_on_disks("root_full", lambda _a, b: filled(b), None)


def test_all_roots_that_fill_up(run_on_disks: Callable[..., None]) -> None:
    def fill(a: Path, b: Path) -> None:
        filled(a, leave=LEAVE)
        filled(b)

    run_on_disks("roots_full", fill, lambda a, _b: (a / "filler").unlink(), events=("intake.paused", "intake.resumed"))


def test_a_root_that_turns_read_only(run_on_disks: Callable[..., None]) -> None:
    run_on_disks("root_read_only", lambda a, _b: remount(a, "ro"), None, events=("root.lost",))
