"""Admission: holds a sample back until budgets, roots and dump directory have room for it; the pulse of what is in flight."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx.core.admission import InFlight, Limits, blocked_by
from hsx.core.progress import Snapshot
from hsx.space import POLL_S

if TYPE_CHECKING:
    from hsx.ports import Clock, Observer
    from hsx.space import Booking, Space, Staging


@dataclass(slots=True)
class Place:
    """One sample's share of the budgets. Each part is given back once; giving it back again does nothing."""

    admission: Admission
    tokens: int
    dump_bytes: int
    shard: Booking
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
        self.admission.space.release(self.shard)
        if self.staged:
            self.staged = False
            self.admission.release(staging_bytes=self.dump_bytes, samples=1)


class Admission:
    """The budgets of a run. One caller waits in `enter` at a time (the intake), so samples start in order.

    Args:
        limits: the budgets.
        space: the roots' room.
        staging: the dump directory's room.
        clock: monotonic time, for the pulse.
        observer: hears the gauges.
    """

    def __init__(self, limits: Limits, space: Space, staging: Staging, clock: Clock, observer: Observer) -> None:
        self._limits = limits
        self.space = space
        self._staging = staging
        self._clock = clock
        self._observer = observer
        self._now = InFlight()
        self._freed = asyncio.Event()
        self._last_advance = clock.monotonic()
        self.resumed_at = self._last_advance
        """When the intake last went on after a pause; the silence before that is nobody's."""

    async def enter(self, tokens: int, dump_bytes: int, shard_bytes: int) -> Place:
        """Waits for room and takes it: in the budgets, on a root, and in the dump directory. Cancelling leaves all as it was.

        Raises RunError `root_unusable` when every root is out of service.
        """
        while blocked_by(self._limits, self._now, tokens, dump_bytes) is not None:
            self._freed.clear()
            await self._freed.wait()
        began = self._clock.monotonic()
        shard = await self.space.book(shard_bytes)
        try:
            await self._staging.admit(self._now, dump_bytes)
        except BaseException:
            self.space.release(shard)
            raise
        if self._clock.monotonic() - began >= POLL_S:
            self.resumed_at = self._clock.monotonic()
        if self._now.requests == 0:
            self.advanced()  # silence while nothing was asked is no silence
        self._now.requests += 1
        self._now.tokens += tokens
        self._now.staging_bytes += dump_bytes
        self._now.samples += 1
        self._report()
        return Place(self, tokens, dump_bytes, shard)

    def release(self, *, requests: int = 0, tokens: int = 0, staging_bytes: int = 0, samples: int = 0) -> None:
        """Gives budget back; called by `Place`."""
        self._now.requests -= requests
        self._now.tokens -= tokens
        self._now.staging_bytes -= staging_bytes
        self._now.samples -= samples
        self._freed.set()
        self._report()

    def change(self, limits: Limits) -> None:
        """Other budgets from now on. What is under way stays; smaller ones take effect as it ends."""
        self._limits = limits
        self._freed.set()

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
