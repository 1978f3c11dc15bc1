"""Dumps that are wrong, torn, late, twice or never: none is stored, and each is called by its name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
from asyncinotify import Inotify, Mask

from hsx.core.dump import SUFFIX
from hsx.core.marker import Marker
from hsx.testing.commands import POLL_S
from hsx.testing.fault_matrix import run_logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

SAMPLES = 12

# row -> the reason that the ledger must name
REASONS = {
    "dump_of_another_sample": "tokens_equal",
    "last_chunk_missing": "tokens_equal",
    "chunk_doubled": "tokens_equal",
    "dump_never": "published",
    "truncated_file": "dump_invalid",
    "bad_header": "dump_invalid",
    "zero_layer": "nonzero_rows",
    "nan_row": "finite",
}


@pytest.mark.parametrize("row", REASONS)
async def test_once_it_is_mended_and_always_it_is_quarantined(
    row: str, job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """Sample 3 meets the fault once, sample 5 at every attempt; the reference engine names its faults as the rows."""
    job = job_of(pipeline={"dump_deadline_s": 0.5})
    await server.fault(row, count=1, match="-3-1-")
    await server.fault(row, count=-1, match="-5-")
    outcome, log = await run_logged(job)
    assert (outcome.committed, outcome.quarantined) == (SAMPLES - 1, 1)
    reason = REASONS[row]
    seen(row, job.loaded, log=log, quarantined={reason: 1}, events=("attempt.failed", "sample.quarantined"))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {reason: 4}
        assert ledger.sample(3).attempts == 2
        (bad,) = ledger.quarantined()
        assert (bad.index, bad.reason, bad.failures) == (5, reason, 3)
        assert bad.evidence


async def test_rows_swapped_between_two_samples_are_caught_in_both(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """Which samples meet in a batch is the server's to say, so any first attempt may be struck; canaries are not.

    The first prompt is held until others wait behind it, however slowly they come.
    """
    job = job_of(watchdog={"violations": 100})
    before = (await server.struck()).get("swapped_rows_between_two", 0)
    for sample in range(SAMPLES):
        await server.fault("swapped_rows_between_two", match=f"-{sample}-1-")
    await server.fault("hold", count=-1, match="-0-1-")
    run = asyncio.create_task(run_logged(job))
    while not run.done() and await server.waiting() < 5:  # noqa: ASYNC110 - the server tells nobody
        await asyncio.sleep(POLL_S)
    await server.clear_faults("hold")
    _, log = await run
    swaps = (await server.struck())["swapped_rows_between_two"] - before
    seen("rows_swapped", job.loaded, log=log, events=("attempt.failed", "invariant.violated"))
    assert swaps > 0
    with job.ledger() as ledger:
        failures = ledger.failures_by_reason()
        assert failures.keys() == {"tokens_equal"}
        assert 2 <= failures["tokens_equal"] <= 2 * swaps


@pytest.mark.slow
async def test_a_dump_that_comes_half_a_minute_after_its_answer_is_stored(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of(pipeline={"dump_deadline_s": 120.0}, watchdog={"grace_s": 200.0})
    await server.fault("dump_late", match="-3-1-", value=30.0)
    outcome, log = await run_logged(job)
    assert outcome.seconds > 29
    seen("dump_late", job.loaded, log=log)
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
        assert ledger.sample(3).attempts == 1


async def test_dumps_past_their_deadline_are_never_paired(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """The first attempts' dumps, one of them with another prompt's states, come and go while the second attempts wait."""
    # One at a time, every first attempt is over before the first second one.
    job = job_of(pipeline={"dump_deadline_s": 0.2, "concurrency": 1})
    before = (await server.struck()).get("hold", 0)
    for sample in (3, 5):
        await server.fault("dump_withheld", count=-1, match=f"-{sample}-1-")
        await server.fault("hold", count=-1, match=f"-{sample}-2-")
    await server.fault("dump_of_another_sample", match="-5-1-")
    with Inotify() as inotify:
        inotify.add_watch(server.folder, Mask.MOVED_TO | Mask.DELETE)
        run = asyncio.create_task(run_logged(job))
        while not run.done() and (await server.struck()).get("hold", 0) == before:  # noqa: ASYNC110 - the server tells nobody
            await asyncio.sleep(POLL_S)
        await server.clear_faults("dump_withheld")
        # One may be swept before the other comes.
        awaited = {(what, match) for what in (Mask.MOVED_TO, Mask.DELETE) for match in ("-3-1-", "-5-1-")}
        while awaited:
            event = await inotify.get()
            if str(event.name).endswith(SUFFIX):
                awaited = {(what, match) for what, match in awaited if not event.mask & what or match not in str(event.name)}
    await server.clear_faults("hold")
    _, log = await run
    for row in ("dump_too_late", "stale_attempt"):
        seen(row, job.loaded, log=log, events=("attempt.failed",))
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {"published": 2}
        assert [ledger.sample(index).attempts for index in (3, 5)] == [2, 2]


async def test_a_dump_that_is_published_twice_is_stored_once(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    job = job_of()
    await server.fault("dump_twice", match="-3-1-")
    outcome, log = await run_logged(job)
    seen("dump_twice", job.loaded, log=log, events=("invariant.violated",))
    assert sum(outcome.violations.values()) == 1
    assert outcome.violations.keys() <= {"expected", "sequence"}
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
        assert ledger.sample(3).attempts == 1


async def test_dumps_of_another_run_are_left_alone(
    job_of: Callable[..., TinyJob], server: RunningServer, seen: Callable[..., Result]
) -> None:
    """They are of the same samples, first attempts like ours, with other prompts of the same lengths."""
    job = job_of()
    client = server.client()
    others = []
    try:
        for index in range(SAMPLES):
            tokens = 3 + index
            others.append(Marker("0badf00d", index, 1, tokens))
            await client.prefill(others[-1], np.arange(tokens, dtype=np.int32), 60.0)
    finally:
        await client.close()
    _, log = await run_logged(job)
    seen("stale_run", job.loaded, log=log)
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
    for other in others:
        (server.folder / f"{other}{SUFFIX}").unlink()  # FileNotFoundError where hsx took it for its own
