"""One fault at a time in the server: what is stored stays the truth, and what failed is named and tried again.

Those of the fault matrix are in tests/faults.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.app import Outcome
    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

# fault of the server -> what the ledger names as the reason; one strike, so a retry must mend it
CAUGHT = {
    "shifted_rows": "tokens_equal",
    "wrong_ids": "tokens_equal",
    "constant_rows": "not_repeated",
    "equal_layers": "not_repeated",
    "wrong_epoch": "epoch",
    "wrong_marker_inside": "expected",
    "cached_tokens": "uncached",
    "wrong_prompt_tokens": "prompt_tokens",
    "retraction": "uncached",
    "abort": "request_failed",
    "http_500": "request_failed",
}


async def run_with(server: RunningServer, job: TinyJob, fault: str, *, count: int, match: str = "", strikes: int) -> Outcome:
    """Runs the job under a fault, and makes sure that the fault did strike."""
    before = Counter(await server.struck())
    await server.fault(fault, count=count, match=match)
    outcome = await job.run()
    assert Counter(await server.struck()) - before == {fault: strikes}
    assert wrong_samples(job.loaded) == []
    return outcome


@pytest.mark.parametrize("fault", CAUGHT)
async def test_a_fault_is_caught_named_and_mended_by_a_retry(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str
) -> None:
    job = served_job_of()
    outcome = await run_with(server, job, fault, count=1, match="-3-1-", strikes=1)
    assert (outcome.committed, outcome.pending, outcome.quarantined) == (12, 0, 0)
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {CAUGHT[fault]: 1}
        assert ledger.sample(3).attempts == 2


@pytest.mark.parametrize("fault", ["dump_late", "slow"])
async def test_what_is_odd_but_harmless_costs_nothing(
    served_job_of: Callable[..., TinyJob], server: RunningServer, fault: str
) -> None:
    job = served_job_of(pipeline={"dump_deadline_s": 60.0})
    outcome = await run_with(server, job, fault, count=1, match="-3-1-", strikes=1)
    assert outcome.committed == 12
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}


async def test_a_lasting_fault_is_quarantined_with_its_reason_and_the_rest_goes_on(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = served_job_of()
    outcome = await run_with(server, job, "wrong_ids", count=-1, match="-3-", strikes=3)
    assert (outcome.committed, outcome.pending, outcome.quarantined) == (11, 0, 1)
    with job.ledger() as ledger:
        (row,) = ledger.quarantined()
        assert (row.index, row.reason, row.failures) == (3, "tokens_equal", 3)
        assert row.evidence


async def test_a_dump_without_room_is_waited_out_and_held_against_nobody(
    served_job_of: Callable[..., TinyJob], server: RunningServer
) -> None:
    job = served_job_of()
    outcome = await run_with(server, job, "enospc", count=1, match="-3-1-", strikes=1)
    assert (outcome.committed, outcome.quarantined) == (12, 0)
    with job.ledger() as ledger:
        assert ledger.failures_by_reason() == {}
