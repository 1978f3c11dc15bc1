"""kill -9 at the steps of a commit that has twins: nothing is lost, nothing is prefilled twice for it, and the rest follows.

hsx is killed as it makes a system call for the n-th time: a hard link (before the commit), an fsync (around it), a symlink
(after it: samples are shown), an unlink (a dump that is dropped).
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.testing.truth import wrong_samples
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.tiny_job import TinyJob

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("strace")]

KILLED = -9
MOMENTS = [("link", 1), ("link", 2), ("symlink", 1), ("symlink", 2), ("fsync", 24), ("rename", 14)]
GROUPS = ([0, 2, 5], [1, 4], [7, 8])


def hsx_run(job: TinyJob, *before: str) -> int:
    return subprocess.run([*before, sys.executable, "-m", "hsx", "run", str(job.folder / "job.toml")], check=False).returncode


def committed(job: TinyJob) -> dict[int, str]:
    """Marker of each committed sample."""
    if not (job.loaded.state_dir / FILE_NAME).exists():
        return {}
    with job.ledger() as ledger:
        return {row.index: row.marker for row in ledger.committed()}


@pytest.mark.parametrize(("call", "number"), MOMENTS)
def test_killed_at_a_system_call(twin_job_of: Callable[..., TinyJob], call: str, number: int) -> None:
    job = twin_job_of(pipeline={"commit_samples": 2, "concurrency": 2})
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=KILL:when={number}"]
    assert hsx_run(job, *strace) == KILLED
    before = committed(job)
    for group in GROUPS:
        assert len({before.get(index) for index in group}) == 1, "samples that share a shard are committed together"
    assert hsx_run(job) == ExitCode.DONE
    after = committed(job)
    assert before.items() <= after.items()
    assert sorted(after) == list(range(10))
    assert wrong_samples(job.loaded) == []
    with job.ledger() as ledger:
        report = verify(job.loaded.store, ledger)
        assert ledger.counts().shared == 4
        assert [ledger.sample(index).attempts for index in (2, 4, 5, 8)] == [0] * 4
    assert (report.ok, report.read, report.uncommitted) == (True, 10, 0)
    store = Store(job.loaded.store)
    assert len({store.shard_path(index).stat().st_ino for index in range(10)}) == 6
