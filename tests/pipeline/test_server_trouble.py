"""Troubles of the server as a whole: told apart from the samples' own, ended in good order, and blamed on no sample."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from structlog.testing import capture_logs

from hsx.errors import RunError
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer


@pytest.mark.parametrize(("fault", "reason"), [("http_500", "canary"), ("nan_row", "canary"), ("wrong_ids", "tokens_equal")])
async def test_a_server_that_fails_everything_is_voided_before_any_sample_is_quarantined(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str, reason: str
) -> None:
    job = served_job_of(samples=40, watchdog={"violations": 6})
    for sample in range(40):
        await server.fault(fault, count=-1, match=f"-{sample}-1-")
    await server.fault(fault, count=-1, match="-c3-")  # the canaries at boot, c1 and c2, pass
    with pytest.raises(RunError, match=reason) as caught:
        await job.run()
    assert caught.value.kind == "epoch_void"
    with job.ledger() as ledger:
        assert list(ledger.quarantined()) == []
        (epoch,) = ledger.epochs()
        assert epoch.reason == reason
    # The verdict outlives hsx: the same server process is not used again by this job.
    await server.clear_faults()
    with pytest.raises(RunError, match="not trusted any more") as caught:
        await job.run()
    assert caught.value.kind == "epoch_void"


async def test_many_bad_samples_in_a_row_do_not_condemn_a_server_whose_canary_is_sound(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = served_job_of(samples=20, watchdog={"violations": 4})
    for sample in range(5, 17):  # from 5 on, "-5-" is no attempt of another sample, nor of a canary
        await server.fault("nan_row", count=-1, match=f"-{sample}-")
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined, outcome.restarts) == (8, 12, 0)
    assert wrong_samples(job.loaded) == []


async def test_many_refusals_in_a_row_condemn_nobody(served_job_of: Callable[..., TinyJob], server: RunningServer) -> None:
    job = served_job_of(samples=20, watchdog={"violations": 4})
    for sample in range(5, 17):
        await server.fault("http_400", count=-1, match=f"-{sample}-1-")
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined, outcome.restarts) == (8, 12, 0)


async def test_congestion_that_does_not_pass_ends_the_run_and_blames_no_sample(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = served_job_of(pipeline={"congestion_s": 0.5})
    await server.fault("http_503", count=-1, match="-3-")
    with pytest.raises(RunError, match="no dump arrived for") as caught:
        await job.run()
    assert caught.value.kind == "staging_failed"
    await server.clear_faults()
    outcome = await job.run()
    assert (outcome.committed, outcome.quarantined) == (12, 0)
    assert wrong_samples(job.loaded) == []


async def test_a_server_that_cannot_write_dumps_is_waited_for_and_blames_no_sample(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = served_job_of(pipeline={"congestion_s": 0.5})
    await server.fault("enospc", count=-1, match="-3-")
    with capture_logs() as log:
        run = asyncio.create_task(job.run())
        # Longer than `congestion_s` by far: a full dump directory is somebody else's to empty, however long that takes.
        while sum(line["event"] == "error.met" for line in log) < 3 and not run.done():  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)
        await server.clear_faults()
        outcome = await run
    assert (outcome.committed, outcome.quarantined) == (12, 0)
    (paused,) = [line for line in log if line["event"] == "intake.paused"][:1]
    assert paused["kind"] == "staging_full"
    assert "could not be written" in paused["message"]
    assert [line["event"] for line in log if line["event"].startswith("intake")][-1] == "intake.resumed"
    assert wrong_samples(job.loaded) == []


@pytest.mark.parametrize("fault", ["http_500", "connection_reset_before"])
async def test_a_failing_boot_canary_is_tried_again(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str
) -> None:
    job = served_job_of()
    await server.fault(fault, count=1, match="-c1-")
    outcome = await job.run()
    assert (outcome.committed, outcome.restarts) == (12, 1)


@pytest.mark.parametrize(
    ("fault", "words"),
    [pytest.param("dump_never", "brought no dump", marks=pytest.mark.slow), ("wrong_ids", "violates tokens_equal")],
)
async def test_a_boot_canary_without_a_sound_dump_ends_the_run(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str, words: str
) -> None:
    """The same time is given to the answer, which has to come in it, and then to the dump, which does not come.

    On a busy machine the answer itself may be late; then the canaries are sent again, and the fault strikes those.
    """
    job = served_job_of(watchdog={"grace_s": 5.0}, pipeline={"dump_deadline_s": 5.0})
    await server.fault(fault, count=-1, match="-c")
    with pytest.raises(RunError, match=words) as caught:
        await job.run()
    assert caught.value.kind == "capture_off"


async def test_the_plugins_own_reason_is_given_where_it_cannot_capture(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    async with job.server() as server:
        (server.folder / "capture.json").unlink()
        (server.folder / "capture.error").write_text("layer 9 is not in a model of 4 layers\n")
        with pytest.raises(RunError, match="layer 9 is not in a model of 4 layers") as caught:
            await job.run()
    assert caught.value.kind == "capture_off"
