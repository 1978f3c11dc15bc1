"""Accounts for every dump of a run: the number of each is noted before its file goes, whatever becomes of it.

Late dumps of attempts that were given up are expected, and swept: an aborted or timed-out request may still be published. What
is not expected is a second dump under one marker, or one under a marker that was never sent.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hsx.core.counter import NO_FLOOR
from hsx.core.invariants import Violation
from hsx.core.marker import parse
from hsx.core.pairing import Standing
from hsx.errors import SampleError
from hsx.violated import ViolatedError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from hsx.core.dump import DumpHeader
    from hsx.core.marker import Marker
    from hsx.core.pairing import Outstanding
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, Dump, Dumps, Ledger

SWEEP_S = 10.0


class Sweeper:
    """The dumps of one run, from their opening to their removal.

    Args:
        run: the job's 8 hex digits.
        outstanding: the markers whose attempts are under way.
        dumps: the dump directory.
        ledger: knows which attempts there were.
        clock: for the pause between sweeps.
        report: hears of a violation by a dump that no attempt waits for.
    """

    def __init__(
        self,
        run: str,
        outstanding: Outstanding,
        dumps: Dumps,
        ledger: Ledger,
        clock: Clock,
        report: Callable[[LiveEpoch, Marker, Violation], Awaitable[None]],
    ) -> None:
        self._run = run
        self._outstanding = outstanding
        self._dumps = dumps
        self._ledger = ledger
        self._clock = clock
        self._report = report
        self._may_sweep = False
        self._kept: set[Marker] = set()

    def open(self, epoch: LiveEpoch, marker: Marker, floor: Mapping[int, int] = NO_FLOOR) -> Dump:
        """Maps a dump and notes its number, which must be above its DP rank's in `floor`.

        Raises:
            SampleError: `dump_invalid`.
            ViolatedError: its number is not one that the counter could give.
        """
        try:
            dump = self._dumps.open(marker)
        except SampleError:
            epoch.counter.excuse()
            raise
        violation = self._noted(epoch, marker, dump.header, floor)
        if violation is not None:
            dump.close()
            raise ViolatedError(marker, violation)
        return dump

    async def drop(self, epoch: LiveEpoch, marker: Marker) -> None:
        """Notes what stands under `marker` and removes it; missing files are fine."""
        header = await asyncio.to_thread(self._dumps.peek, marker)
        if header is None:
            if str(marker) not in self._dumps.names():
                return  # what may be published from now on is swept later: it must not go before its number is noted
            header = await asyncio.to_thread(self._dumps.peek, marker)  # it may have come between the two looks
        if header is not None:
            violation = self._noted(epoch, marker, header)
            if violation is not None:
                await self._report(epoch, marker, violation)
        await asyncio.to_thread(self._dumps.remove, marker)

    def _noted(
        self, epoch: LiveEpoch, marker: Marker, header: DumpHeader, floor: Mapping[int, int] = NO_FLOOR
    ) -> Violation | None:
        if header.epoch != epoch.id or header.marker != marker:
            epoch.counter.excuse()  # its own invariants speak of it; the number is not to be believed
            return None
        return epoch.counter.note(header.rank, header.sequence, marker, floor)

    def keep(self, marker: Marker) -> None:
        """This one's dump is left for the next run: it is whole, and no root had room for it."""
        self._kept.add(marker)

    def settled(self) -> list[Marker]:
        """Markers of this run, canaries aside, that have a dump and no attempt under way."""
        return [marker for marker in self._settled() if not marker.canary]

    def _settled(self) -> list[Marker]:
        standings = map(self._outstanding.standing, self._dumps.names())
        settled = [marker for standing, marker in standings if standing is Standing.SETTLED and marker is not None]
        return [marker for marker in settled if marker not in self._kept]

    def unseen(self, epoch: LiveEpoch) -> int:
        """Dumps of this run, canaries included, that are there and were not noted."""
        markers = map(parse, self._dumps.names())
        return sum(m is not None and m.run == self._run and not epoch.counter.knows(m) for m in markers)

    def others(self) -> set[str]:
        """Runs other than this one that have dumps in the epoch's folder."""
        return {m.run for m in map(parse, self._dumps.names()) if m is not None} - {self._run}

    def may_sweep(self) -> None:
        """The dumps that an earlier life of hsx left have been adopted: from now on every settled one may go."""
        self._may_sweep = True

    async def run(self, ready: Callable[[], Awaitable[LiveEpoch]]) -> None:
        """Sweeps now and then, until cancelled."""
        while True:
            await self._clock.sleep(SWEEP_S)
            await self.sweep(await ready())

    async def sweep(self, epoch: LiveEpoch) -> None:
        """Removes every dump of this run whose attempt is over, and those of canaries that nobody waits for any more."""
        for marker in self._settled() if self._may_sweep else []:
            if marker.canary:
                await self.drop(epoch, marker)
                continue
            known = await self._ledger.attempts_of(marker.index)
            if known is None or marker.attempt > known[1].attempt or marker.tokens != known[1].sample.tokens:
                evidence = f"a dump of {marker} appeared, which was never sent; expected markers of this run's attempts only"
                await self._report(epoch, marker, Violation("expected", evidence))
            await self.drop(epoch, marker)
