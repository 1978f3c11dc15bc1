"""The power fails in the run: store, ledger and roots are on disks that forget what was not flushed.

The dump directory is a tmpfs, and gone with the power, as the server is.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.mounts import boot
from hsx.testing.power import Recording, recorded
from hsx.testing.promise import assert_kept, committed_rows, damages
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.app import Outcome
    from hsx.records import CommittedRow

pytestmark = pytest.mark.slow

SAMPLES: Final = 24
HELD: Final = 20
LOOKS: Final = 24
RESUMES: Final = (0.1, 0.4, 0.7, 1.0)
"""How much of the run is done when the power fails, as a share of what reached the disks."""


@dataclass(frozen=True)
class Run:
    """A run that came to its end.

    Attributes:
        job: on the first disk.
        recording: of it.
        told: (moment, index, marker): by then, the log had said that the sample is committed.
        rows: the ledger's at the end.
    """

    job: TinyJob
    recording: Recording
    told: list[tuple[int, int, str]]
    rows: dict[int, CommittedRow]

    def told_at(self, moment: int) -> dict[int, str]:
        """Markers of the samples that were said to be committed by then, by index."""
        return {index: marker for when, index, marker in self.told if when <= moment}


def record(folder: Path, **storage: str) -> Run:
    """Runs a job to its end in `folder`, on disks of which every write is remembered."""
    home = folder / "job"
    told = []
    with recorded(folder / "power", {"home": home, "a": home / "root-a", "b": home / "root-b"}) as recording:
        job = make_job(
            home,
            samples=SAMPLES,
            longest=300,
            staging={"dump_dir": str(folder / "dumps")},
            pipeline={"concurrency": 4, "commit_samples": 3},
            storage=storage,
        )
        recording.begin()
        port = job.loaded.config.engine.port
        with running_reference(job.loaded.dump_dir, LAYERS, model=job.loaded.model, port=port) as server:
            # The end, with its flush, does not come before half of what was said is read.
            asyncio.run(server.fault("hold", count=-1, match=f"-{HELD}-1-"))
            command = [sys.executable, "-m", "hsx", "run", str(job.loaded.path)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
                assert process.stderr is not None
                for line in process.stderr:
                    if line.startswith("{") and json.loads(line)["event"] == "sample.committed":
                        said = json.loads(line)
                        # It is read after it was said: what has reached the disks by now may have been there then, or not.
                        told.append((recording.now(), said["index"], said["marker"]))
                        if len(told) == SAMPLES // 2:
                            asyncio.run(server.clear_faults())
            assert process.returncode == ExitCode.DONE
        rows = committed_rows(job.loaded)
        recording.end()
    assert len(told) == len(rows) == SAMPLES
    return Run(job, recording, told, rows)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return record(tmp_path_factory.mktemp("power"))


@contextmanager
def booted(folder: Path, job: TinyJob, number: int) -> Iterator[None]:
    """The machine has booted again: its boot id is another, and the dump directory is empty."""
    shutil.rmtree(job.loaded.dump_dir)
    with boot(str(uuid.UUID(int=number)), folder):
        yield


def test_the_power_fails_anywhere(run: Run) -> None:
    """What was said to be committed is committed, and what is committed is there and right, before anything is repaired."""
    most = 0
    for number, moment in enumerate(run.recording.moments(LOOKS)):
        with run.recording.cut(moment, random.Random(number) if number % 2 else None):
            rows = committed_rows(run.job.loaded)
            told = run.told_at(moment)
            assert {index: rows[index].marker for index in told if index in rows} == told, f"lost by a cut at {moment}"
            then = {index: row for index, row in run.rows.items() if index in rows}
            assert rows == then, f"wrong after a cut at {moment}"
            # Links are made after the commit and need not be durable: the next run repairs them.
            found = [damage for damage in damages(run.job.loaded) if damage.kind != "link"] if rows else []
            assert found == [], f"damaged by a cut at {moment}"
            most = max(most, len(rows))
    assert most == SAMPLES


@pytest.mark.parametrize("share", RESUMES)
async def test_the_next_start_goes_on(run: Run, tmp_path: Path, share: float) -> None:
    """With an empty dump directory and a new server the same command ends the job."""
    job, number = run.job, round(share * 100)
    moment = run.recording.moments(101)[number]
    with run.recording.cut(moment, random.Random(number)), booted(tmp_path, job, number):
        told = run.told_at(moment)
        assert told.keys() <= committed_rows(job.loaded).keys()
        async with job.server():
            outcome = await job.run()
        assert (outcome.committed, outcome.pending, outcome.quarantined, outcome.restarts) == (SAMPLES, 0, 0, 0)
        assert_kept(job.loaded, SAMPLES, told)


def unsynced(run: Run) -> int:
    """The moment at which most was said to be committed since the roots' disks were last flushed."""
    flushes = [run.recording.began, *(record.end for record in run.recording.records if record.flush and record.disk)]
    spans = zip(flushes, [*flushes[1:], run.recording.records[-1].end], strict=True)
    told = [[when for when, _, _ in run.told if begin < when < end] for begin, end in spans]
    return max(told, key=len)[-1]


async def rerun(job: TinyJob) -> Outcome:
    """Continues the job, with a server of its own."""
    async with job.server():
        return await job.run()


def test_relaxed_durability_costs_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    """The ledger knows of samples that no disk has: the next start reads them, and has the lost ones extracted again.

    Shards are fp8 here, so that these are cut as well.
    """
    run = record(tmp_path, durability="relaxed", dtype="fp8_e4m3")
    job = run.job
    moment = unsynced(run)
    with run.recording.cut(moment, None), booted(tmp_path, job, 1):
        lost = {damage.index for damage in damages(job.loaded) if damage.kind == "missing"}
        assert lost, "the disks had everything: the cut shows nothing"
        kept = {index: row.marker for index, row in committed_rows(job.loaded).items() if index not in lost}
        outcome = asyncio.run(rerun(job))
        assert (outcome.committed, outcome.pending, outcome.revoked) == (SAMPLES, 0, len(lost))
        assert_kept(job.loaded, SAMPLES, kept)
