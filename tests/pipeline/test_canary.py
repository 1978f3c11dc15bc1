"""Canaries in whole runs: at boot, at intervals and at the end; and what a failed one takes back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import REFUSAL_NAME, STATE_NAME, state_from_json, to_json
from hsx.errors import RunError
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.commands import delete_in_use
from hsx.testing.servers import reference_server, tiny_config
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer

SAMPLES = 12
TWINS = 2


async def canaries_sent(job: TinyJob) -> int:
    """Takes the next canary's number, to tell how many there were."""
    ledger = SqliteLedger(job.loaded.state_dir / FILE_NAME)
    try:
        return await ledger.next_canary() - 1
    finally:
        await ledger.close()


@pytest.mark.parametrize(("every", "least"), [(0, 2), (1, 3)])
async def test_canaries_go_at_boot_at_intervals_and_at_the_end(
    served_job_of: Callable[..., TinyJob], every: int, least: int
) -> None:
    # Committed one by one, for a canary in between: after a single group, one would be the interval's and the end's.
    job = served_job_of(watchdog={"canary_every": every}, pipeline={"commit_samples": 1})
    outcome = await job.run()
    assert outcome.committed == SAMPLES
    sent = await canaries_sent(job)
    assert sent % TWINS == 0
    assert sent >= least * TWINS
    if every == 0:
        assert sent == 2 * TWINS
    with job.ledger() as ledger:
        (epoch,) = ledger.epochs()
    assert epoch.vouched >= SAMPLES  # the last canary came after every sample, in capture order


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "canaries", "invariant"),
    [
        ("shifted_states", ["-c3-", "-c4-"], "twins"),
        ("states_of_another_sample", ["-c4-"], "twins"),
        ("wrong_layer", ["-c3-", "-c4-"], "fingerprint"),
    ],
)
async def test_a_silent_fault_is_seen_by_the_canary_at_the_end_and_nothing_of_it_stays(
    job: TinyJob, fault: str, canaries: list[str], invariant: str
) -> None:
    async with job.server() as server:
        for match in ("-3-1-", *canaries):
            await server.fault(fault, count=1, match=match)
        with pytest.raises(RunError, match=f"voided for {invariant}") as caught:
            await job.run()
    assert caught.value.kind == "epoch_void"
    with job.ledger() as ledger:
        assert (ledger.counts().committed, ledger.counts().pending) == (0, SAMPLES)
        (revoked,) = ledger.revocations()
        assert (revoked.invariant, len(revoked.samples)) == (invariant, SAMPLES)
        assert ledger.violations_by_invariant() == {invariant: 1}
    async with job.server():  # another server
        outcome = await job.run()
    assert outcome.committed == SAMPLES
    assert wrong_samples(job.loaded) == []


@pytest.mark.slow
async def test_a_server_with_other_weights_is_not_used(tmp_path: Path) -> None:
    job = make_job(tmp_path, watchdog={"restart_budget": 1})
    async with job.server() as server:
        await server.fault("http_400", match="-3-1-")
        assert (await job.run()).quarantined == 1
    await requeue(job)
    config = job.loaded.config
    other = tiny_config(tmp_path / "other", seed=7)
    async with reference_server(job.loaded.dump_dir, LAYERS, model=other, port=config.engine.port):
        for _ in range(2):  # in this run and in the next
            with pytest.raises(RunError, match="voided for fingerprint") as caught:
                await job.run()
            assert caught.value.kind == "epoch_void"
    with job.ledger() as ledger:
        assert any("state 0 of the fixed prompt" in row.evidence for row in ledger.violations())
    assert wrong_samples(job.loaded) == []
    async with job.server():
        assert (await job.run()).committed == SAMPLES
    assert wrong_samples(job.loaded) == []


async def requeue(job: TinyJob) -> None:
    """Frees the quarantined samples."""
    ledger = SqliteLedger(job.loaded.state_dir / FILE_NAME)
    try:
        await ledger.requeue(None)
    finally:
        await ledger.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["second process", "another counter", "folder deleted"])
async def test_who_else_writes_into_the_epoch_ends_it(tmp_path: Path, how: str) -> None:
    job = make_job(tmp_path, watchdog={"restart_budget": 0})
    async with job.server() as server:
        await server.fault("hold", count=-1, match="-5-1-")
        running = asyncio.create_task(job.run())
        while "hold" not in await server.struck():  # noqa: ASYNC110 - the server has no event to wait for
            await asyncio.sleep(0.05)
        if how == "second process":
            (server.folder / REFUSAL_NAME).write_text("pid 7 already captures into this epoch\n")
        elif how == "another counter":
            state = state_from_json((server.folder / STATE_NAME).read_text())
            (server.folder / STATE_NAME).write_text(to_json(replace(state, pid=state.pid + 1)))
        else:
            delete_in_use(server.folder)
        with pytest.raises(RunError) as caught:
            await running
        assert caught.value.kind == "restart_budget"
    with job.ledger() as ledger:
        (epoch,) = ledger.epochs()
        assert epoch.reason == ("alive" if how == "folder deleted" else "sole_writer")
        assert ledger.counts().quarantined == 0
        assert 5 in epoch.requeued
    assert wrong_samples(job.loaded) == []
    async with job.server():
        assert (await job.run()).committed == SAMPLES
    assert wrong_samples(job.loaded) == []


@pytest.mark.parametrize(
    ("fault", "invariant", "words"),
    [
        ("sequence_gap", "sequence", "their dumps were never seen"),
        ("never_sent", "expected", "which was never sent"),
    ],
)
async def test_odd_dumps_that_harm_no_sample_are_told_apart_and_counted(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str, invariant: str, words: str
) -> None:
    job = served_job_of()
    await server.fault(fault, count=1, match="-3-1-")
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined, outcome.restarts) == (SAMPLES, 0, 0)
    assert wrong_samples(job.loaded) == []
    with job.ledger() as ledger:
        assert ledger.violations_by_invariant() == {invariant: 1}
        assert any(words in row.evidence for row in ledger.violations())


async def test_what_a_run_that_is_over_left_in_the_folder_is_no_other_job(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    """A job that is done before the watchdog's first look is judged by what lay there before, too."""
    job = served_job_of(samples=4)
    (server.folder / "hsx1-deadbeef-0-1-5.safetensors").touch()
    await server.fault("sequence_gap", count=1, match="-3-1-")
    assert (await job.run()).committed == 4
    with job.ledger() as ledger:
        assert ledger.violations_by_invariant() == {"sequence": 1}


@pytest.mark.parametrize("fault", ["sequence_reset", "sequence_repeat"])
async def test_a_counter_that_goes_back_or_repeats_voids_the_epoch(job: TinyJob, fault: str) -> None:
    async with job.server() as server:
        await server.fault(fault, count=1, match="-9-1-")
        with pytest.raises(RunError, match="voided for sequence") as caught:
            await job.run()
        assert caught.value.kind == "epoch_void"
    with job.ledger() as ledger:
        assert ledger.violations_by_invariant() == {"sequence": 1}
        assert ledger.failures_by_reason() == {}
    assert wrong_samples(job.loaded) == []


async def test_too_many_gaps_void_the_epoch(tmp_path: Path) -> None:
    job = make_job(tmp_path, watchdog={"violations": 1})
    async with job.server() as server:
        await server.fault("sequence_gap", count=1, match="-2-1-")
        await server.fault("hold", count=-1, match="-11-1-")  # the run does not end before the watchdog looks
        with pytest.raises(RunError, match="voided for sequence"):
            await job.run()
    assert wrong_samples(job.loaded) == []
