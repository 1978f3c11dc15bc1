"""`hsx repair` is killed in the middle, at a chosen system call; the same command again puts everything right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hsx.core.marker import parse
from hsx.stores.ledger_reader import LedgerReader
from hsx.testing.kept_job import SAMPLES, KeptJob
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
KILLED = -9


@pytest.fixture(autouse=True)
def _strace(tmp_path: Path) -> None:
    words = ["strace", "-f", "-qq", "-o", str(tmp_path / "probe"), "true"]
    if shutil.which("strace") is None or subprocess.run(words, check=False, capture_output=True).returncode != 0:
        assert os.environ.get("CI") != "true", "CI runs every test: as root, with mount and strace"
        pytest.skip("strace is missing, or may not trace")


def command(job: KeptJob, *arguments: str, call: str = "", when: int = 0) -> int:
    """Calls `hsx repair`, killed at the `when`th system call `call`, if given; returns how it ended."""
    words = [sys.executable, "-m", "hsx", "repair", str(job.file), *arguments]
    if call:
        inject = f"inject={call}:signal=KILL:when={when}"
        words = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject, *words]
    return subprocess.run(words, check=False, capture_output=True).returncode


def is_whole(job: KeptJob) -> bool:
    with LedgerReader(job.ledger) as reader:
        report = verify(job.loaded.store, reader)
        # Every marker is of one attempt: none was used twice.
        markers = [parse(row.marker) for row in reader.committed()]
    return report.ok and report.uncommitted == 0 and len(set(markers)) == SAMPLES and job.wrong() == []


@pytest.mark.parametrize(("call", "when"), [("fdatasync", 2), ("unlink", 1), ("unlink", 3)])
def test_repair(job: KeptJob, call: str, when: int) -> None:
    job.shard(3).unlink()
    with job.shard(4).open("r+b") as file:
        file.write(b"\xff" * 64)
    assert command(job, call=call, when=when) == KILLED
    assert command(job) == 0
    assert job.extract() == [3, 4]
    assert is_whole(job)


@pytest.mark.parametrize(("call", "when"), [("fdatasync", 3), ("rename", 1), ("rename", 2), ("rename", 3), ("unlink", 6)])
def test_rebuilding_the_ledger(job: KeptJob, call: str, when: int) -> None:
    job.shard(3).unlink()
    job.ledger.write_bytes(b"x" * 9000)
    assert command(job, "--rebuild-ledger", call=call, when=when) == KILLED
    assert command(job, "--rebuild-ledger") == 0
    assert job.extract() == [3]
    assert is_whole(job)
