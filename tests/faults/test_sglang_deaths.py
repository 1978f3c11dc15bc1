"""The fault matrix on the real SGLang: its deaths in the middle of a prefill. hsx has started it, and starts it again."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.epoch import RECORD_NAME, EpochRecord, record_from_json
from hsx.engines.process import carrying, process_alive
from hsx.exit_codes import ExitCode
from hsx.testing.commands import HsxProcess, command_lines, hsx_running, log_lines, wait_until
from hsx.testing.huggingface import HuggingFace
from hsx.testing.sglang_job import (
    PATIENCE_S,
    SGLangJob,
    frozen,
    half_done,
    interpreter,
    make_sglang_job,
    random_prompts,
    scheduler_of,
    spawned,
    writer_of,
)
from hsx.testing.tiny_models import make

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.core.marker import Marker

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(model: Path) -> HuggingFace:
    return HuggingFace(model)


@pytest.fixture
def job(tmp_path: Path, model: Path) -> SGLangJob:
    """Prompts long enough that one of them is nearly always half done, and not all of them asked for at once."""
    prompts, pace = random_prompts(16, 100, 1200), {"start_rate": 1.0}
    return make_sglang_job(tmp_path / "job", model, tmp_path / "dumps", spawned(interpreter()), prompts, pipeline=pace)


def in_the_middle(process: HsxProcess, job: SGLangJob, kill: Callable[[EpochRecord], None]) -> tuple[EpochRecord, list[Marker]]:
    """Kills while a prompt is half done: the scheduler stands still from the look at its partial dump until then.

    Returns the server's record, and the markers that were half done.
    """
    wait_until(lambda: bool(process.events("epoch.began")) or process.process.poll() is not None, "epoch.began", PATIENCE_S)
    assert process.events("epoch.began"), process.log.read_text()[-6000:]
    folder = job.loaded.dump_dir / process.events("epoch.began")[0]["epoch"]
    record = record_from_json((folder / RECORD_NAME).read_text())
    run, deadline = job.run_id(), time.monotonic() + PATIENCE_S
    while process.process.poll() is None and time.monotonic() < deadline:
        if half_done(folder, run):
            with frozen(scheduler_of(record.pid)):
                if caught := half_done(folder, run):
                    kill(record)
                    return record, caught
        time.sleep(0.005)
    raise AssertionError(f"no prompt was found half done:\n{process.log.read_text()[-6000:]}")


def kill_server(record: EpochRecord) -> None:
    """The main process, from outside: the others are left to whoever looks after them."""
    os.kill(record.pid, signal.SIGKILL)


def kill_scheduler(record: EpochRecord) -> None:
    """The process that runs the model, alone."""
    os.kill(scheduler_of(record.pid), signal.SIGKILL)


@pytest.mark.parametrize(("row", "kill"), [("server_killed", kill_server), ("scheduler_killed", kill_scheduler)])
def test_death_in_the_middle_of_a_prefill(
    row: str, kill: Callable[[EpochRecord], None], job: SGLangJob, judge: HuggingFace, seen: Callable[..., Any]
) -> None:
    with hsx_running(job.path, "run") as process:
        record, caught = in_the_middle(process, job, kill)
        assert process.wait(PATIENCE_S) == ExitCode.DONE, process.log.read_text()[-6000:]
    log = log_lines(process.log)
    seen(row, job.loaded, log=log, engine="sglang", restarts=1, events=["epoch.began"], truth=job.truth(judge))
    with job.ledger() as ledger:
        first, second = ledger.epochs()
        assert (first.epoch, first.reason) in {(record.epoch, "alive"), (record.epoch, "advancing")}
        assert {marker.index for marker in caught} <= set(first.requeued)
        assert second.reason in {None, ""}
        assert all(ledger.sample(marker.index).attempts > 1 for marker in caught)
        assert ledger.failures_by_reason() == {}
    assert not process_alive(record)
    assert record.epoch not in carrying("HSX_SPAWNED_EPOCH").values()
    assert [line for line in command_lines() if str(job.path) in line] == []
    assert not (job.loaded.dump_dir / record.epoch).exists()


def kill_writer(record: EpochRecord) -> None:
    """The process that writes the capture's dumps, alone."""
    os.kill(writer_of(record.pid), signal.SIGKILL)


def test_death_of_the_writer_with_dumps_half_written(job: SGLangJob, judge: HuggingFace, seen: Callable[..., Any]) -> None:
    """The server lives on; it is only restarted if more numbers are missing than are forgiven."""
    with hsx_running(job.path, "run") as process:
        _, caught = in_the_middle(process, job, kill_writer)
        assert process.wait(PATIENCE_S) == ExitCode.DONE, process.log.read_text()[-6000:]
    log = log_lines(process.log)
    seen("writer_killed", job.loaded, log=log, engine="sglang", restarts=range(2), events=["error.met"], truth=job.truth(judge))
    met = [line for line in log if line["event"] == "error.met"]
    assert any("the writer process of the capture ended (signal 9)" in str(line) for line in met)
    with job.ledger() as ledger:
        assert all(ledger.sample(marker.index).attempts > 1 for marker in caught)
        assert ledger.failures_by_reason() == {}
