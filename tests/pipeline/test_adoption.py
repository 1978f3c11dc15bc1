"""What a killed hsx had asked for and not committed is adopted from the dump directory, and not asked for again."""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.dump import SUFFIX
from hsx.core.marker import Marker, parse
from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_done, hsx_running, wait_until
from hsx.testing.servers import reference_server
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 12
NEVER = {"commit_seconds": 3600.0, "commit_samples": 1000}
"""A group commit that waits for an hour: every dump is there, every shard is written, and nothing is committed."""


@dataclass(frozen=True)
class Left:
    """What a killed hsx left behind: the job, ready to be continued, and its dumps by sample index."""

    job: TinyJob
    markers: dict[int, Marker]


def dumps_in(folder: Path, run: str) -> dict[int, Marker]:
    """Markers of the dumps of `run`, canaries aside, by sample index; the newest attempt of each."""
    found: dict[int, Marker] = {}
    for path in folder.glob(f"hsx1-*{SUFFIX}"):
        marker = parse(path.name.removesuffix(SUFFIX))
        if marker is not None and marker.run == run and not marker.canary:
            found[marker.index] = max(marker, found.get(marker.index, marker), key=lambda m: m.attempt)
    return found


def killed_before_commit(folder: Path, server: RunningServer) -> Left:
    """Runs a job until every dump is published, and kills hsx with none committed."""
    slow = make_job(folder, samples=SAMPLES, server=server, pipeline=NEVER)
    with hsx_running(slow.loaded.path, "run") as running:
        running.wait_for("epoch.began")
        with slow.ledger() as ledger:
            run = ledger.run
        wait_until(lambda: len(dumps_in(server.folder, run)) == SAMPLES, "a dump of every sample")
        running.send(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    job = make_job(folder, samples=SAMPLES, server=server)
    with job.ledger() as ledger:
        assert ledger.counts().committed == 0
    return Left(job, dumps_in(server.folder, run))


def prompt(job: TinyJob, index: int) -> list[int]:
    """The ids of a sample, from the dataset."""
    lines = (job.folder / "rows.jsonl").read_text().splitlines()
    ids: list[int] = json.loads(lines[index])["input_ids"]
    return ids


def finish(job: TinyJob) -> None:
    """Continues the job to its end in a fresh process."""
    done = hsx_done(job.loaded.path, "run")
    assert done.process.returncode == ExitCode.DONE, done.error()
    assert wrong_samples(job.loaded) == []


def adopted(job: TinyJob) -> dict[int, tuple[bool, int]]:
    """(adopted, attempts) of each sample."""
    with job.ledger() as ledger:
        rows = [ledger.sample(index) for index in range(SAMPLES)]
        assert {row.state for row in rows} == {"committed"}
        assert ledger.failures_by_reason() == {}
    return {row.index: (row.adopted, row.attempts) for row in rows}


def test_every_dump_of_a_killed_hsx_is_adopted(tmp_path: Path, server: RunningServer) -> None:
    left = killed_before_commit(tmp_path, server)
    finish(left.job)
    assert adopted(left.job) == dict.fromkeys(range(SAMPLES), (True, 1))
    with left.job.ledger() as ledger:
        committed = {row.index: row.marker for row in ledger.committed()}
    assert committed == {index: str(marker) for index, marker in left.markers.items()}
    assert dumps_in(server.folder, left.markers[0].run) == {}


async def test_stale_and_wrong_dumps_are_removed_and_foreign_files_stay(tmp_path: Path, server: RunningServer) -> None:
    left = killed_before_commit(tmp_path, server)
    job, run = left.job, left.markers[0].run
    for marker in left.markers.values():
        (server.folder / f"{marker}{SUFFIX}").unlink()
    # A second life finds no dump, asks for everything again, and is killed like the first.
    again = killed_before_commit(tmp_path, server).markers
    assert {marker.attempt for marker in again.values()} == {2}

    client = server.client()
    try:
        # Sample 3: the first attempt's dump comes late, beside the second's.
        await client.prefill(left.markers[3], np.array(prompt(job, 3), np.int32), 60.0)
        # Sample 4: what stands under the marker is another prompt of the same length.
        other = (np.array(prompt(job, 4), np.int32) + 1) % 500
        await client.prefill(again[4], other, 60.0)
        # Sample 5: a marker of a length that the sample has not.
        await client.prefill(Marker(run, 5, 1, 7), np.arange(7, dtype=np.int32), 60.0)
        # Sample 6: an attempt that the ledger never gave out.
        await client.prefill(Marker(run, 6, 9, len(prompt(job, 6))), np.array(prompt(job, 6), np.int32), 60.0)
        # Another job's.
        foreign = Marker("0badf00d", 3, 1, len(prompt(job, 3)))
        await client.prefill(foreign, np.array(prompt(job, 3), np.int32), 60.0)
    finally:
        await client.close()
    notes = server.folder / "notes.txt"
    notes.write_text("of somebody else")
    finish(job)
    assert adopted(job) == {**dict.fromkeys(range(SAMPLES), (True, 2)), 4: (False, 3)}
    assert dumps_in(server.folder, run) == {}
    assert (server.folder / f"{foreign}{SUFFIX}").exists()
    assert notes.read_text() == "of somebody else"
    (server.folder / f"{foreign}{SUFFIX}").unlink()
    notes.unlink()


async def test_dumps_of_a_dead_server_are_not_adopted(tmp_path: Path) -> None:
    dumps, model = tmp_path / "server" / "dumps", tmp_path / "model"
    (tmp_path / "server").mkdir()
    async with reference_server(dumps, LAYERS, model=None, chunk=32) as first:
        left = killed_before_commit(tmp_path, first)
        port = first.record.port
        old, run = first.folder, left.markers[0].run
        assert model.is_dir()
    async with reference_server(dumps, LAYERS, model=left.job.loaded.model, port=port, chunk=32):
        finish(left.job)
    assert adopted(left.job) == dict.fromkeys(range(SAMPLES), (False, 2))
    assert dumps_in(old, run) == {}
