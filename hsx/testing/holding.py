"""Stops a run at a chosen sample, so that something can happen to it just then."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hsx.testing.commands import wait_until
from hsx.testing.promise import committed_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob


@contextmanager
def held_at(job: TinyJob, server: RunningServer, sample: int) -> Iterator[Callable[[], None]]:
    """Has the server hold the first attempt of a sample until the block is left. Not inside an event loop.

    Yields a function that returns once it does so, and all samples before are committed: for jobs that extract one at a time.
    It raises AssertionError where it comes to neither.
    """
    before = _holds(server)
    asyncio.run(server.fault("hold", count=-1, match=f"-{sample}-1-"))

    def wait() -> None:
        wait_until(lambda: _holds(server) > before, f"the server holds sample {sample}")
        wait_until(lambda: len(committed_rows(job.loaded)) == sample, f"{sample} committed samples")

    try:
        yield wait
    finally:
        asyncio.run(server.clear_faults("hold"))


def _holds(server: RunningServer) -> int:
    return asyncio.run(server.struck()).get("hold", 0)
