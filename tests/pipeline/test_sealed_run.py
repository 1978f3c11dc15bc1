"""A run that came to its end can be sealed; a sealed job cannot be run; unsealed, it is the job it was."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.seal import seal, unseal
from hsx.verify import verify

if TYPE_CHECKING:
    from hsx.testing.tiny_job import TinyJob


async def test_a_finished_run_is_sealed_and_nothing_runs_on_it(job: TinyJob) -> None:
    async with job.server():
        first = await job.run()
        report = await asyncio.to_thread(seal, job.loaded, partial=False, read=True)
        assert (report.sealed, report.verified, report.committed, report.left_out) == (True, True, first.committed, 0)
        alone = verify(job.loaded.store)
        assert (alone.ok, alone.sealed, alone.read) == (True, True, first.committed)
        with pytest.raises(RunError, match="is sealed since") as error:
            await job.run()
        assert error.value.kind == "store_sealed"
        assert not (await asyncio.to_thread(unseal, job.loaded)).sealed
        again = await job.run()
        assert (again.committed, again.pending) == (first.committed, 0)
