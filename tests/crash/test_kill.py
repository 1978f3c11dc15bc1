"""kill -9 at random moments, of hsx and of the server: the job still ends complete, right, and without repeated work."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import RECORD_NAME, record_from_json
from hsx.engines.process import process_alive
from hsx.exit_codes import ExitCode
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.servers import running_reference, tiny_config
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.core.epoch import EpochRecord
    from hsx.testing.servers import RunningServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KILLS_OF_HSX = 6
KILLS_OF_THE_SERVER = 5
FURTHEST = 14
"""Samples that a kill waits for at most."""
PATIENCE_S = 600.0


def hsx(command: str, job: TinyJob) -> subprocess.Popen[bytes]:
    """Starts an hsx command on the job; its output goes to a file beside it."""
    with (job.folder / f"{command}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hsx", command, str(job.folder / "job.toml")], stdout=log, stderr=subprocess.STDOUT
        )


def committed(job: TinyJob) -> dict[int, int]:
    """Attempts of each committed sample so far, by index."""
    if not (job.loaded.state_dir / FILE_NAME).exists():
        return {}
    with LedgerReader(job.loaded.state_dir / FILE_NAME) as ledger:
        return {row.index: ledger.sample(row.index).attempts for row in ledger.committed()}


def holds(job: TinyJob) -> bool:
    """Whether the job's present server holds a prompt."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault", timeout=PATIENCE_S) as answer:
            return "hold" in json.load(answer)["struck"]
    except OSError:
        return False


def release(job: TinyJob) -> None:
    """Lets the job's present server hold nothing any more; nothing happens while it does not answer."""
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault?kind=hold"
    with suppress(OSError), urllib.request.urlopen(urllib.request.Request(url, method="DELETE"), timeout=PATIENCE_S):
        pass


def wait_for_commits(job: TinyJob, process: subprocess.Popen[bytes], count: int, *, or_held: bool = False) -> None:
    """Waits until `count` samples are committed or the process has ended, so that a kill lands in the middle of the work.

    With `or_held`, also until the server holds a prompt: then no more will come.
    """
    deadline = time.monotonic() + PATIENCE_S
    while len(committed(job)) < count and process.poll() is None and not (or_held and holds(job)):
        assert time.monotonic() < deadline, f"{len(committed(job))} samples committed; expected {count}"
        time.sleep(0.01)


def living_server(job: TinyJob, killed: set[str]) -> EpochRecord:
    """The server that extracts now: an epoch that the ledger knows, and that was not killed before."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with LedgerReader(job.loaded.state_dir / FILE_NAME) as ledger:
            begun = {row.epoch for row in ledger.epochs() if row.ended is None} - killed
        for epoch in begun:
            record = record_from_json((job.loaded.dump_dir / epoch / RECORD_NAME).read_text())
            if process_alive(record):
                return record
        time.sleep(0.01)
    raise AssertionError(f"no server in {PATIENCE_S} s after {len(killed)} kills")


def finish_and_prove(job: TinyJob, samples: int) -> None:
    """Lets the job end, has `hsx verify` read everything, and compares with the truth."""
    assert hsx("run", job).wait(PATIENCE_S) == ExitCode.DONE
    assert hsx("verify", job).wait(PATIENCE_S) == ExitCode.DONE
    assert sorted(committed(job)) == list(range(samples))
    assert wrong_samples(job.loaded) == []
    shards = [shard.name for root in ("a", "b") for shard in (job.folder / f"root-{root}").rglob("c.*")]
    assert len(shards) == len(set(shards)) == samples


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that outlives every hsx, so that dumps are adopted."""
    folder = tmp_path_factory.mktemp("server")
    with running_reference(folder / "dumps", LAYERS, model=tiny_config(folder / "model"), chunk=32) as server:
        yield server


@pytest.mark.parametrize("dtype", ["bf16", "fp8_e4m3"])
def test_hsx_killed_six_times(tmp_path: Path, server: RunningServer, dtype: str) -> None:
    samples = 120
    pipeline = {"commit_samples": 8, "concurrency": 4}
    job = make_job(tmp_path, samples=samples, longest=60, server=server, pipeline=pipeline, storage={"dtype": dtype})
    rng = random.Random(20)
    for _ in range(KILLS_OF_HSX):
        before = committed(job)
        # The server stops a little later, so that there is something left however late the kill comes.
        asyncio.run(server.fault("hold", count=-1, match=f"-{len(before) + FURTHEST + 5}-"))
        process = hsx("run", job)
        wait_for_commits(job, process, len(before) + rng.randint(1, FURTHEST))
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.wait()
        asyncio.run(server.clear_faults())
        after = committed(job)
        assert before.items() <= after.items(), "a committed sample was lost or asked for again"
    before = committed(job)
    assert len(before) < samples, "the kills came too late to say anything"
    finish_and_prove(job, samples)
    assert before.items() <= committed(job).items()
    with LedgerReader(job.loaded.state_dir / FILE_NAME) as ledger:
        assert ledger.failures_by_reason() == {}


def test_the_server_killed_five_times(tmp_path: Path) -> None:
    samples = 120
    # Each life stops at the next of these, so that there is something left however late the kill comes.
    stops = [{"kind": "hold", "count": -1, "match": f"-{20 * number}-1-"} for number in range(1, KILLS_OF_THE_SERVER + 1)]
    job = make_job(
        tmp_path,
        samples=samples,
        longest=60,
        engine={
            "ownership": "spawn",
            "args": ["--allow-faults", *(word for stop in stops for word in ("--fault", json.dumps(stop)))],
        },
        pipeline={"commit_samples": 4, "concurrency": 4},
        watchdog={"restart_budget": 10},
    )
    rng = random.Random(5)
    process = hsx("run", job)
    killed: set[str] = set()
    for _ in range(KILLS_OF_THE_SERVER):
        wait_for_commits(job, process, len(committed(job)) + rng.randint(3, 15), or_held=True)
        record = living_server(job, killed)
        killed.add(record.epoch)
        os.kill(record.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None and time.monotonic() < deadline:
        release(job)  # the last life has the stops that are left
        time.sleep(0.05)
    assert process.returncode == ExitCode.DONE
    finish_and_prove(job, samples)
    with LedgerReader(job.loaded.state_dir / FILE_NAME) as ledger:
        assert {row.epoch for row in ledger.epochs() if row.reason == "alive"} == killed
        assert ledger.failures_by_reason() == {}
