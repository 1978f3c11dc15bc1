"""What canaries mean for what was committed: a sound one vouches for everything captured before it, in capture order.

Some faults break no invariant of a sample: states shifted against their ids, or those of other weights. Canaries see them, but
only now and then; so when one fails, everything that was committed since the last sound one is extracted again.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hsx.errors import EngineError
from hsx.violated import CanaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hsx.canary import Canary
    from hsx.core.invariants import Violation
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, CommittedRow, Ledger, Observer
    from hsx.suspects import Suspects

TRIES = 5
RETRY_S = 1.0


class Vouching:
    """Sends canaries at intervals and at the end of a run, and draws the consequences of what they and deaths tell.

    Args:
        every: commits between two canaries; 0 for none but the last one.
        canary: see there.
        ledger: records what is vouched for, and what is revoked.
        remove: takes revoked samples out of the store.
        suspects: the hunt for poison samples.
        observer: hears of it all.
        clock: for the pauses between tries.
    """

    def __init__(
        self,
        every: int,
        canary: Canary,
        ledger: Ledger,
        remove: Callable[[list[CommittedRow]], Awaitable[None]],
        suspects: Suspects,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._every = every
        self._canary = canary
        self._ledger = ledger
        self._remove = remove
        self._suspects = suspects
        self._observer = observer
        self._clock = clock
        self._unvouched = 0
        self._due = asyncio.Event()
        self._open: LiveEpoch | None = None
        self._ended = asyncio.Event()
        self._revoked = False

    def committed(self) -> None:
        """A sample was committed."""
        self._unvouched += 1
        if self._every and self._unvouched >= self._every:
            self._due.set()

    async def began(self, epoch: LiveEpoch) -> None:
        """A server passed the boot gate, and its canary vouches for what an earlier life of hsx had from it."""
        await self._vouch(epoch, epoch.vouched)
        self._unvouched = 0
        self._open = epoch
        self._ended.clear()

    async def run(self, ready: Callable[[], Awaitable[LiveEpoch]]) -> None:
        """Sends a canary whenever one is due, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            epoch = await ready()
            try:
                await self.probe(epoch)
            except EngineError as error:
                if error.kind == "epoch_void":
                    continue
                # Busy or dying: others judge that. It stays due.
                self._observer.error_met(error.kind, error.message)
                await self._clock.sleep(RETRY_S)
                self._due.set()

    async def close(self) -> bool:
        """The canary at the end of a run: True when all is done, False when samples may be pending again.

        Where the server is gone, or answers no canary in several tries, what it gave since the last sound one stays: nothing
        speaks against it. The log says so.
        """
        for _ in range(TRIES):
            epoch = self._open
            if epoch is None or not self._unvouched:
                break
            try:
                if not await self.probe(epoch):
                    break
            except EngineError as error:
                if epoch.is_void:
                    break
                self._observer.error_met(error.kind, f"no canary at the end of the run: {error.message}")
                await self._clock.sleep(RETRY_S)
        if self._open is not None and self._open.is_void:
            await self._ended.wait()  # what its end means for samples is being found out
        revoked, self._revoked = self._revoked, False
        return not revoked

    async def probe(self, epoch: LiveEpoch) -> bool:
        """One canary: True when it is sound; False when it is not, and the epoch was voided for it.

        Raises EngineError where the server could not be asked.
        """
        asked = self._unvouched
        try:
            sequence = await epoch.run(self._canary.check(epoch))
        except CanaryError as error:
            await self._ledger.doubt(epoch.id, error.violation.invariant, error.violation.evidence)
            epoch.void(error.violation, doubt=True)
            return False
        self._unvouched = max(0, self._unvouched - asked)
        await self._vouch(epoch, sequence)
        return True

    async def failed_at_boot(self, epoch: LiveEpoch, error: CanaryError) -> None:
        """The canary at the boot gate failed: what an earlier life of hsx had from this server is in doubt."""
        await self._ledger.violation(epoch.id, None, error.violation.invariant, error.violation.evidence)
        self._observer.violation(None, error.violation.invariant, error.violation.evidence)
        await self._revoke(epoch, error.violation)
        await self._ledger.epoch_ended(epoch.id, error.violation.invariant, error.violation.evidence)

    async def ended(self, epoch: LiveEpoch, violation: Violation) -> bool:
        """An epoch ended and no attempt is under way in it. True where its end brought a hunt further."""
        if epoch.doubt:
            await self._revoke(epoch, violation)
        narrowed = bool(epoch.suspects) and await self._suspects.died(epoch, violation)
        self._unvouched = 0
        self._due.clear()
        self._open = None
        self._ended.set()
        return narrowed

    async def _vouch(self, epoch: LiveEpoch, sequence: int) -> None:
        epoch.vouched = sequence
        await self._ledger.vouch(epoch.id, sequence)
        self._observer.canary_passed(epoch.id, sequence)

    async def _revoke(self, epoch: LiveEpoch, violation: Violation) -> None:
        rows = await self._ledger.revoke(epoch.id, violation.invariant, violation.evidence)
        if rows:
            self._revoked = True
            await self._remove(rows)
            tokens, nbytes = sum(row.tokens for row in rows), sum(row.nbytes for row in rows)
            self._observer.samples_revoked(epoch.id, violation.invariant, violation.evidence, len(rows), tokens, nbytes)
