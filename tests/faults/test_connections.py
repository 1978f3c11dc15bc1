"""Connections that break, requests that are turned away, and other clients on the same server."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp
import pytest

from hsx.core.dump import SUFFIX
from hsx.core.epoch import STATE_NAME, CaptureState, state_from_json
from hsx.core.marker import Marker
from hsx.testing.commands import POLL_S
from hsx.testing.fault_matrix import run_logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

SAMPLES = 12
RESETS = {
    "connection_reset_before": "connection_reset_before",
    "connection_reset_during": "connection_reset_during",
    "connection_reset_after": "connection_reset_after",
    "connection_reset_in_answer": "answer_cut",
}


@pytest.mark.parametrize("row", RESETS)
async def test_a_reset_connection_costs_an_attempt(
    row: str, job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """Sample 3's connection is reset once, sample 5's always."""
    job = job_of()
    await server.fault(RESETS[row], count=1, match="-3-1-")
    await server.fault(RESETS[row], count=-1, match="-5-")
    _, log = await run_logged(job)
    seen(row, job.loaded, log=log, quarantined={"request_failed": 1}, events=("attempt.failed", "sample.quarantined"))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {"request_failed": 4}
        assert ledger.sample(3).attempts == 2
        assert ledger.sample(5).state == "quarantined"


async def test_a_full_queue_is_waited_out_and_held_against_nobody(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    for sample in (3, 5, 7):
        await server.fault("http_503", count=2, match=f"-{sample}-")
    _, log = await run_logged(job)
    seen("queue_full", job.loaded, log=log, events=("error.met",))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


async def test_a_prompt_that_the_server_finds_too_long_is_quarantined_at_once(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    await server.fault("http_400", count=-1, match="-3-")
    _, log = await run_logged(job)
    seen("too_long", job.loaded, log=log, quarantined={"request_refused": 1}, events=("sample.quarantined",))
    with job.ledger() as ledger:
        (row,) = ledger.quarantined()
        assert (row.index, row.failures) == (3, 1)


async def test_an_id_outside_the_vocabulary_is_never_sent(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """The reference engine dies of such an id, as SGLang does: it would be noticed."""
    job = job_of(dataset={"on_bad_row": "skip"})
    with (job.folder / "rows.jsonl").open("a") as rows:
        rows.write(json.dumps({"id": "deadly", "input_ids": [1, 2, 512, 3]}) + "\n")
    _, log = await run_logged(job)
    seen("out_of_vocabulary", job.loaded, log=log, rejected=1)
    with job.ledger() as ledger:
        (bad,) = ledger.rejected()
        assert (bad.sample_id, bad.reason) == ("deadly", "out_of_vocabulary")
    assert server.process.poll() is None


async def generate(session: aiohttp.ClientSession, server: RunningServer, rid: str, tokens: int) -> None:
    """A request as another client sends it."""
    url = f"http://{server.record.host}:{server.record.port}/generate"
    body = {"rid": rid, "input_ids": list(range(1, tokens + 1)), "sampling_params": {"max_new_tokens": 0}}
    async with session.post(url, json=body) as answer:
        assert answer.status == 200


def counted(server: RunningServer) -> CaptureState:
    """What the capture side has counted so far."""
    return state_from_json((server.folder / STATE_NAME).read_text())


async def test_as_many_foreign_requests_as_ours(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    before = counted(server).foreign
    run = asyncio.create_task(run_logged(job))
    async with aiohttp.ClientSession() as session:
        # Ours and theirs have the same lengths, and are in the same batches.
        lengths = [len(json.loads(line)["input_ids"]) for line in (job.folder / "rows.jsonl").read_text().splitlines()]
        await asyncio.gather(*(generate(session, server, f"foreign-{i}", tokens) for i, tokens in enumerate(lengths)))
    _, log = await run
    seen("foreign_requests", job.loaded, log=log)
    assert counted(server).foreign - before == SAMPLES
    assert list(server.folder.glob(f"*foreign*{SUFFIX}")) == []
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


async def test_health_probes_and_warmups_between_the_requests(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of(pipeline={"concurrency": 1})
    address = f"http://{server.record.host}:{server.record.port}"
    run = asyncio.create_task(run_logged(job))
    rounds = 0
    async with aiohttp.ClientSession() as session:
        while not run.done():
            for path in ("/health", "/health_generate", "/model_info"):
                async with session.get(address + path) as answer:
                    assert answer.status == 200
            await generate(session, server, f"HEALTH_CHECK_{rounds}", 1)
            await generate(session, server, f"warmup-{rounds}", 8)
            rounds += 1
    _, log = await run
    assert rounds > 0
    seen("probes_and_warmups", job.loaded, log=log)
    assert list(server.folder.glob(f"*HEALTH*{SUFFIX}")) == []
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


async def test_aborts_of_other_clients_and_of_ours(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """Another client hangs up in the middle of its prompt, and somebody aborts ours, by name."""
    job = job_of()
    await server.fault("hold", count=-1, match="-3-1-")
    before = (await server.struck()).get("hold", 0)
    run = asyncio.create_task(run_logged(job))
    while not run.done() and (await server.struck()).get("hold", 0) == before:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(POLL_S)
    async with aiohttp.ClientSession() as session:
        other = asyncio.create_task(generate(session, server, "foreign-abort", 500))
        while not run.done() and not await server.waiting():  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)
        other.cancel()
    with job.ledger() as ledger:
        ours = Marker(ledger.run, 3, 1, ledger.sample(3).tokens)
    client = server.client()
    try:
        await client.abort(ours)
    finally:
        await client.close()
    _, log = await run
    seen("client_aborts", job.loaded, log=log, events=("attempt.failed",))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {"request_failed": 1}
        assert ledger.sample(3).attempts == 2
