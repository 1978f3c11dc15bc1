"""Memory of hsx is flat in the number of samples: ten thousand tiny ones, watched from outside."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.exit_codes import ExitCode
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from hsx.testing.servers import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLES = 10_000
PER_SAMPLE_BYTES = 1024
"""Growth allowed per sample between the first fifth and the end, 8 MiB in all: the allocator's noise. A task, a dump or a
marker kept per sample takes more."""


HELD = (SAMPLES // 5 - 10, SAMPLES - 10)
"""Samples before which the run goes no further until it was looked at."""
SLACK = 200
"""More samples than may be under way at once."""


def rss_kib(pid: int) -> int:
    """Resident memory of a process without the file mappings it shares with the page cache."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError(f"process {pid} has no RssAnon")


def watch(job: TinyJob, process: subprocess.Popen[bytes], server: RunningServer) -> list[tuple[int, int]]:
    """(committed samples, resident KiB) over the run, which the server holds up where a look is to be had for certain."""
    seen: list[tuple[int, int]] = []
    held = list(HELD)
    while process.poll() is None:
        if (job.loaded.state_dir / FILE_NAME).exists():
            with job.ledger() as ledger:
                committed = ledger.counts().committed
            try:
                seen.append((committed, rss_kib(process.pid)))
            except (FileNotFoundError, ProcessLookupError, AssertionError):
                break  # it ended between the two looks
            if held and committed >= held[0] - SLACK:
                asyncio.run(server.clear_faults("hold", f"-{held.pop(0)}-1-"))
        time.sleep(0.25)
    process.wait()
    return seen


def test_ten_thousand_samples_need_no_more_memory_than_two_thousand(tmp_path: Path, shared_server: RunningServer) -> None:
    pipeline = {"concurrency": 32, "commit_seconds": 0.1}
    # A copy of the ledger takes some megabytes of page caches, for whatever number of samples, and would come at the end only.
    job = make_job(tmp_path, samples=SAMPLES, longest=6, server=shared_server, pipeline=pipeline, storage={"backup_seconds": 0})
    for sample in HELD:
        asyncio.run(shared_server.fault("hold", count=-1, match=f"-{sample}-1-"))
    with (tmp_path / "run.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "hsx", "run", str(job.folder / "job.toml")], stdout=log, stderr=subprocess.STDOUT
        )
        seen = watch(job, process, shared_server)
    assert process.returncode == ExitCode.DONE, (tmp_path / "run.log").read_text()[-2000:]
    early = [kib for committed, kib in seen if SAMPLES // 20 <= committed <= SAMPLES // 5]
    late = [kib for committed, kib in seen if committed >= SAMPLES * 4 // 5]
    assert early, "the run was never seen between 500 and 2,000 samples"
    assert late, "the run was never seen above 8,000 samples"
    growth = max(late) - max(early)
    per_sample = growth * 1024 / (SAMPLES * 0.8)
    assert per_sample < PER_SAMPLE_BYTES, f"grew from {max(early)} to {max(late)} KiB, {per_sample:.0f} bytes a sample"
