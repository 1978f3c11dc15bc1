"""`hsx run` on a real server with two data-parallel ranks: the store has samples of both, and verify agrees."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import epoch_of, stream_name
from hsx.exit_codes import ExitCode
from hsx.testing.capture_server import RANKS_VARIABLES
from hsx.testing.commands import hsx_done
from hsx.testing.huggingface import HuggingFace
from hsx.testing.sglang_job import PATIENCE_S, make_sglang_job, random_prompts, spawned

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.tiny_models import Kind

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLES = 16


def test_a_job_on_two_ranks(tmp_path: Path, sglang_python: Path, tiny_model: Callable[[Kind], Path]) -> None:
    model = tiny_model("llama")
    engine, prompts = spawned(sglang_python, "--dp-size", "2"), random_prompts(SAMPLES, 1, 400)
    engine["env"] |= RANKS_VARIABLES
    job = make_sglang_job(tmp_path / "job", model, tmp_path / "dumps", engine, prompts)
    ran = hsx_done(job.path, "run", "--json", patience_s=PATIENCE_S)
    assert ran.process.returncode == ExitCode.DONE, ran.log.read_text()[-4000:]
    outcome = json.loads(ran.out.read_text())
    assert (outcome["committed"], outcome["quarantined"], outcome["violations"], outcome["restarts"]) == (SAMPLES, 0, {}, 0)
    with job.ledger() as ledger:
        (life,) = ledger.epochs()
        rows = [(row.epoch, row.sequence) for row in ledger.committed()]
    assert len(set(rows)) == SAMPLES
    assert {stream for stream, _ in rows} == {stream_name(life.epoch, rank) for rank in range(2)}
    assert {epoch_of(stream) for stream, _ in rows} == {life.epoch}
    checked = hsx_done(job.path, "verify", "--json", patience_s=PATIENCE_S)
    assert checked.process.returncode == ExitCode.DONE, checked.out.read_text()[-4000:]
    report = json.loads(checked.out.read_text())
    assert (report["committed"], report["read"], report["damage"]) == (SAMPLES, SAMPLES, [])
    assert job.truth(HuggingFace(model))(job.loaded) == []
