"""Admission: holds a sample back until every budget has room for it, and keeps the pulse of what is in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx.core.admission import InFlight, Limits, blocked_by
from hsx.core.progress import Snapshot

if TYPE_CHECKING:
    from hsx.ports import Clock, Observer


@dataclass(slots=True)
class Place:
    """One sample's share of the budgets. Each part is given back once; giving it back again does nothing."""

    admission: Admission
    tokens: int
    dump_bytes: int
    at_server: bool = True
    staged: bool = True

    def answered(self) -> None:
        """The request is over: its slot and its tokens are free."""
        if self.at_server:
            self.at_server = False
            self.admission.release(requests=1, tokens=self.tokens)

    def cleared(self) -> None:
        """The dump is gone from the dump directory, or never came: all of the place is free."""
        self.answered()
        if self.staged:
            self.staged = False
            self.admission.release(staging_bytes=self.dump_bytes, samples=1)


class Admission:
    """The budgets of a run. One caller waits in `enter` at a time (the intake), so samples start in order.

    Args:
        limits: the budgets.
        clock: monotonic time, for the pulse.
        observer: hears the gauges.
    """

    def __init__(self, limits: Limits, clock: Clock, observer: Observer) -> None:
        self._limits = limits
        self._clock = clock
        self._observer = observer
        self._now = InFlight()
        self._freed = asyncio.Event()
        self._last_advance = clock.monotonic()

    async def enter(self, tokens: int, dump_bytes: int) -> Place:
        """Waits for room and takes it. Cancelling leaves the budgets as they were."""
        while blocked_by(self._limits, self._now, tokens, dump_bytes) is not None:
            self._freed.clear()
            await self._freed.wait()
        if self._now.requests == 0:
            self.advanced()  # silence while nothing was asked is no silence
        self._now.requests += 1
        self._now.tokens += tokens
        self._now.staging_bytes += dump_bytes
        self._now.samples += 1
        self._report()
        return Place(self, tokens, dump_bytes)

    def release(self, *, requests: int = 0, tokens: int = 0, staging_bytes: int = 0, samples: int = 0) -> None:
        """Gives budget back; called by `Place`."""
        self._now.requests -= requests
        self._now.tokens -= tokens
        self._now.staging_bytes -= staging_bytes
        self._now.samples -= samples
        self._freed.set()
        self._report()

    def advanced(self) -> None:
        """The engine showed a sign of work."""
        self._last_advance = self._clock.monotonic()

    def snapshot(self) -> Snapshot:
        """The engine's progress now."""
        return Snapshot(self._clock.monotonic(), self._last_advance, self._now.requests, self._now.tokens)

    @property
    def in_flight(self) -> InFlight:
        """What is under way now."""
        return self._now

    def _report(self) -> None:
        self._observer.gauges(self._now.requests, self._now.tokens, self._now.staging_bytes)
