"""hsx killed at each step of a commit, by the kernel's own count of its system calls: the next run ends it, and asks little.

strace puts SIGKILL into one system call on one file: the process dies on entering it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from hsx.core.dump import SUFFIX
from hsx.core.layout import shard_key
from hsx.core.marker import Marker
from hsx.prepare import prepare
from hsx.stores.attach import attach_roots
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.view import UnionView
from hsx.testing.commands import log_lines
from hsx.testing.fault_matrix import run_logged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

pytestmark = pytest.mark.slow

SAMPLES, VICTIM = 40, 5


@dataclass(frozen=True)
class Step:
    """One step of a commit: the system call, on which of `paths`' files, and the how-manieth on it by one thread."""

    call: str
    on: str
    when: int = 1


STEPS = {
    "killed_at_preallocation": Step("fallocate", "partial"),
    "killed_at_write": Step("pwritev2", "partial"),
    "killed_at_data_sync": Step("fdatasync", "partial"),
    "killed_at_rename": Step("rename", "partial"),
    "killed_at_folder_sync": Step("fsync", "root"),
    "killed_at_ledger_sync": Step("fdatasync", "ledger", when=25),
    "killed_at_view_link": Step("symlink", "view"),
    "killed_at_dump_removal": Step("unlink", "dump"),
}


def paths(job: TinyJob, server: RunningServer) -> dict[str, list[Path]]:
    """Opens the job, and tells which files its first run will use for the sample that it is killed at."""
    opened = prepare(job.loaded, lambda _rows, _tokens: None)
    store, roots = attach_roots(opened.store, {root.name: root.path for root in job.loaded.roots})
    with job.ledger() as ledger:
        marker = Marker(ledger.run, VICTIM, 1, ledger.sample(VICTIM).tokens)
    name = shard_key(VICTIM)
    return {
        "partial": [root.folder / f"{name}.{marker}.partial" for root in roots],
        "root": [root.folder for root in roots],
        "ledger": [job.loaded.state_dir / f"{FILE_NAME}-wal"],
        "view": [UnionView(store).path(VICTIM)],
        "dump": [server.folder / f"{marker}{SUFFIX}"],
    }


def run_killed(job: TinyJob, step: Step, files: list[Path]) -> Path:
    """Runs hsx until it is killed at `step`; its log."""
    inject = ["strace", "-f", "-qq", "-o", str(job.folder / "trace"), "-e", f"trace={step.call}"]
    inject += [word for file in files for word in ("-P", str(file))]
    inject += ["-e", f"inject={step.call}:signal=SIGKILL:when={step.when}"]
    log = job.folder / "killed.log"
    with log.open("wb") as errors:
        done = subprocess.run(
            [*inject, sys.executable, "-m", "hsx", "run", str(job.loaded.path)], check=False, stdout=errors, stderr=errors
        )
    assert done.returncode == -signal.SIGKILL, log.read_text()[-4000:]
    return log


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("row", STEPS)
async def test_hsx_killed_at_a_step_of_a_commit(
    row: str, job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    step = STEPS[row]
    # A sync of the ledger for every sample or two, so that the one that is struck is in the middle of the work.
    job = job_of(samples=SAMPLES, pipeline={"commit_samples": 2, "concurrency": 2 if step.on == "ledger" else 8})
    files = paths(job, server)
    killed = run_killed(job, step, files[step.on])
    with job.ledger() as ledger:
        before = {entry.index: entry.marker for entry in ledger.committed()}
    assert len(before) < SAMPLES
    known = step.on not in {"root", "ledger"}  # there nobody knows which samples it was about
    if known:
        assert (VICTIM in before) == (step.on in {"view", "dump"})
    _, log = await run_logged(job)
    seen(row, job.loaded, log=[*log_lines(killed), *log], events=("epoch.began",))
    with job.ledger() as ledger:
        after = {entry.index: entry.marker for entry in ledger.committed()}
        assert before.items() <= after.items()
        assert ledger.failures_by_reason() == {}
        if known:
            victim = ledger.sample(VICTIM)
            assert (victim.attempts, victim.adopted) == (1, VICTIM not in before)
        assert all(ledger.sample(index).attempts <= 2 for index in range(SAMPLES))
    (began,) = [line for line in log if line["event"] == "epoch.began"]
    assert began["continued"]
    assert list(server.folder.glob(f"hsx1-*{SUFFIX}")) == []
