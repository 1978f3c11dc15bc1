"""The story that hsx comes from: warm-ups, a client that is killed and started again, and a server that lives on.

Predicting the server's counter pairs every dump with another sample, silently; hsx pairs by marker, and nothing can shift.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.marker import Marker
from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, hsx_done, hsx_running, log_lines, wait_until
from hsx.testing.reference_model import ReferenceModel, reference_states
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job
from hsx.testing.truth import BF16_ROUNDING

if TYPE_CHECKING:
    from hsx.testing.fault_matrix import Matrix
    from hsx.testing.servers import RunningServer

pytestmark = pytest.mark.slow

SAMPLES = 40
SCRIPT = Path(__file__).with_name("seed_script.py")


def warm_up(server: RunningServer, run: str, count: int) -> None:
    """Requests that make the server number dumps, as every request did there."""

    async def prefill() -> None:
        client = server.client()
        try:
            for number in range(count):
                await client.prefill(Marker(run, number, 1, 4), np.arange(4, dtype=np.int32), 60.0)
        finally:
            await client.close()

    asyncio.run(prefill())


def wrong_pairs(job: TinyJob, out: Path) -> list[int]:
    """Samples under which the script saved something else than their states."""
    model = ReferenceModel(job.loaded.model)
    wrong = []
    for index, line in enumerate((job.folder / "rows.jsonl").read_text().splitlines()):
        ids = np.array(json.loads(line)["input_ids"], np.int32)
        saved = np.load(out / f"{index}.npy")
        truth = reference_states(model, ids, job.loaded.spec)
        states = (saved.astype(np.uint32) << 16).view(np.float32)
        if states.shape != truth.shape:
            wrong.append(index)
            continue
        error = np.linalg.norm(states - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
        if not (error <= BF16_ROUNDING).all():
            wrong.append(index)
    return wrong


def predicted(job: TinyJob, server: RunningServer, out: Path) -> None:
    """The story with the script that predicts: killed after a few samples, started again."""
    out.mkdir()
    url = f"http://{server.record.host}:{server.record.port}"
    command = [sys.executable, str(SCRIPT), str(job.folder / "rows.jsonl"), url, str(server.folder), str(out)]
    warm_up(server, "aaaaaaaa", 3)
    process = subprocess.Popen(command)
    wait_until(lambda: len(list(out.glob("[0-9].npy"))) >= 4, "four saved samples")
    process.kill()
    process.wait()
    warm_up(server, "bbbbbbbb", 2)
    subprocess.run(command, check=True, timeout=PATIENCE_S)


def test_the_script_stores_wrong_pairs_where_hsx_stores_none(tmp_path: Path, matrix: Matrix) -> None:
    with running_reference(tmp_path / "server" / "dumps", LAYERS, model=None, chunk=32) as server:
        job = make_job(tmp_path, samples=SAMPLES, server=server)
        predicted(job, server, tmp_path / "predicted")
        wrong = wrong_pairs(job, tmp_path / "predicted")
        assert len(wrong) > SAMPLES // 2, "the story does no harm any more: then the matrix proves nothing"
        warm_up(server, "cccccccc", 3)
        asyncio.run(server.fault("hold", count=-1, match=f"-{SAMPLES // 2}-1-"))
        with hsx_running(job.loaded.path, "run") as killed:
            killed.wait_for("sample.committed")
            killed.kill()
        asyncio.run(server.clear_faults())
        warm_up(server, "dddddddd", 2)
        done = hsx_done(job.loaded.path, "run")
        assert done.process.returncode == ExitCode.DONE, done.error()
    result = matrix.seen("seed_story", job.loaded, log=log_lines(killed.log, done.log), events=("epoch.began",))
    assert [line["continued"] for line in done.events("epoch.began")] == [True]
    assert result.stored == SAMPLES
    matrix.baseline(SAMPLES, len(wrong), result.stored)
