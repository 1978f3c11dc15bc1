"""Whole runs against the reference engine, undisturbed: what is stored is the truth, and a run is continued, not repeated."""

from __future__ import annotations

import signal
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from hsx.app import run_job
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import locked
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.commands import hsx_running
from hsx.testing.servers import reference_server, tiny_config
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.tiny_job import TinyJob


async def test_every_sample_is_committed_once_and_right(job: TinyJob) -> None:
    async with job.server():
        outcome = await job.run()
    assert (outcome.committed, outcome.pending, outcome.quarantined) == (12, 0, 0)
    assert outcome.violations == {}
    assert not outcome.interrupted
    assert wrong_samples(job.loaded) == []
    with job.ledger() as ledger:
        rows = list(ledger.committed())
        assert [ledger.sample(row.index).attempts for row in rows] == [1] * 12
    assert {row.root for row in rows} <= {"a", "b"}
    assert len({row.sequence for row in rows}) == 12


async def test_a_finished_job_needs_no_server(job: TinyJob) -> None:
    async with job.server():
        await job.run()
    outcome = await job.run()
    assert (outcome.committed, outcome.tokens) == (12, 0)


async def test_no_dump_is_left_behind(job: TinyJob) -> None:
    async with job.server() as server:
        await job.run()
        assert [p.name for p in server.folder.iterdir() if p.name.startswith("hsx1-")] == []


@pytest.mark.parametrize(
    ("section", "key", "value", "field"),
    [
        ("capture", "layers", [1, 2], "capture.layers"),
        ("capture", "final", "pre_norm", "capture.final"),
        ("model", "revision", "other", "model.revision"),
        ("dataset", "max_tokens", 500, "dataset.max_tokens"),
    ],
)
async def test_a_changed_job_refuses_and_names_the_field(
    job_of: Callable[..., TinyJob], section: str, key: str, value: object, field: str
) -> None:
    job = job_of()
    async with job.server():
        await job.run()
    rows = (job.folder / "rows.jsonl").read_bytes()
    config = (job.folder / "model" / "config.json").read_bytes()
    job_of(**{section: {key: value}})
    (job.folder / "rows.jsonl").write_bytes(rows)
    (job.folder / "model" / "config.json").write_bytes(config)
    with pytest.raises(RunError, match=field) as caught:
        await run_job(load(job.folder / "job.toml"))
    assert caught.value.kind == "job_changed"


async def test_a_changed_dataset_refuses(job: TinyJob) -> None:
    async with job.server():
        await job.run()
    rows = job.folder / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"s3"', '"s3x"'))
    with pytest.raises(RunError, match=r"dataset\.") as caught:
        await job.run()
    assert caught.value.kind == "job_changed"


async def test_a_second_hsx_on_the_job_is_refused_and_told_the_holder(job: TinyJob) -> None:
    with locked(job.loaded.state_dir / "job.lock", "job tiny"), pytest.raises(RunError, match="held by pid") as caught:
        await job.run()
    assert caught.value.kind == "job_locked"


async def test_a_second_hsx_on_the_dump_directory_is_refused(job: TinyJob) -> None:
    with locked(job.loaded.dump_dir / "hsx.lock", "dump directory"), pytest.raises(RunError, match="held by pid") as caught:
        await job.run()
    assert caught.value.kind == "job_locked"


async def test_a_root_that_lost_its_identity_is_refused(job: TinyJob) -> None:
    async with job.server():
        await job.run()
    # A job that is done does not look at its roots: one sample is made pending again.
    with closing(sqlite3.connect(job.loaded.state_dir / FILE_NAME)) as db:
        db.execute("UPDATE samples SET state = 'pending' WHERE idx = 0")
        db.commit()
    for identity in (job.folder / "root-a").rglob("hsx-root.json"):
        identity.unlink()
    with pytest.raises(RunError, match="not the root it was") as caught:
        await job.run()
    assert caught.value.kind == "root_unusable"


async def test_a_server_with_other_layers_is_refused(job: TinyJob) -> None:
    port = job.loaded.config.engine.port
    async with reference_server(job.loaded.dump_dir, [2], model=job.loaded.model, port=port):
        with pytest.raises(RunError, match="h_2") as caught:
            await job.run()
    assert caught.value.kind == "capture_off"


async def test_a_server_with_too_small_a_context_is_refused(job_of: Callable[..., TinyJob]) -> None:
    job = job_of(samples=3, longest=200)
    small = tiny_config(job.folder / "small", max_position_embeddings=64)
    port = job.loaded.config.engine.port
    async with reference_server(job.loaded.dump_dir, [1, 3], model=small, port=port):
        with pytest.raises(RunError, match="longest sample") as caught:
            await job.run()
    assert caught.value.kind == "server_refused"


async def test_without_a_server_the_run_ends_and_says_so(job_of: Callable[..., TinyJob]) -> None:
    job = job_of(engine={"start_timeout_s": 0.3}, watchdog={"restart_budget": 1, "backoff_first_s": 0.01})
    with pytest.raises(RunError, match="server") as caught:
        await job.run()
    assert caught.value.kind == "restart_budget"


def test_a_run_that_waits_for_a_server_says_what_it_waits_for(job_of: Callable[..., TinyJob]) -> None:
    job = job_of(engine={"start_timeout_s": 3600.0})
    with hsx_running(job.loaded.path, "run") as running:
        assert "hsx serve" in running.wait_for("engine.waiting")["reason"]
        running.send(signal.SIGTERM)
        assert running.wait() == ExitCode.INTERRUPTED


async def test_starts_that_fail_in_a_row_are_counted_whatever_the_window(job_of: Callable[..., TinyJob]) -> None:
    watchdog = {"restart_budget": 2, "restart_window_s": 0.001, "backoff_first_s": 0.01}
    job = job_of(engine={"start_timeout_s": 0.1}, watchdog=watchdog)
    with pytest.raises(RunError, match="3 failed starts in a row") as caught:
        await job.run()
    assert caught.value.kind == "restart_budget"
