"""What canaries mean for what was committed: a sound one vouches for everything captured before it, in capture order.

Some faults break no invariant of a sample: states shifted against their ids, or those of other weights. Canaries see them, but
only now and then; so when one fails, everything that was committed since the last sound one is extracted again.

A server that died can be asked no more. There its last samples stand for the canary: the next server extracts them again, and
if they agree with what is stored, all that was captured before them is vouched for.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Protocol

from hsx.core.epoch import epoch_of
from hsx.core.invariants import Violation
from hsx.errors import EngineError, RunError
from hsx.tasks import first
from hsx.violated import CanaryError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import numpy as np
    from numpy.typing import NDArray

    from hsx.canary import Canary
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, Ledger, Observer
    from hsx.records import CommittedRow
    from hsx.suspects import Suspects

WRONG_STATES = frozenset({"twins", "fingerprint"})
TRIES = 5
LAST = 64
TELLING_TOKENS = 16
"""Of the last `LAST` samples of a dead server, the latest with so many tokens is extracted again besides the very last."""
RETRY_S = 1.0
TRIES_AGAIN = 3
"""Servers that may fail when they are asked for such a sample; then all that is in doubt is pending again."""
FAILED_AGAIN = "failed_again"
"""Key of the fact that tells how often the last samples of each ended epoch could not be extracted again."""


class StoredSamples(Protocol):
    """The committed samples, as they lie on their roots."""

    def read(self, row: CommittedRow) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64] | None]:
        """States, bf16 bits [rows, L, H]; ids, int32 [tokens]; the tokens that the rows are of, int64 [rows], None for all.
        Blocks.

        Raises RunError where they cannot be read.
        """
        ...

    async def revoke(self, rows: list[CommittedRow]) -> None:
        """Takes samples that the ledger has revoked out of the store."""
        ...


class Vouching:
    """Sends canaries at intervals and at the end of a run, and draws the consequences of what they and deaths tell.

    Args:
        every: commits between two canaries; 0 for none but the last one.
        canary: see there.
        ledger: records what is vouched for, and what is revoked.
        store: reads committed samples again, and takes revoked ones out of the store.
        suspects: the hunt for poison samples.
        observer: hears of it all.
        clock: for the pauses between tries.
    """

    def __init__(
        self,
        every: int,
        canary: Canary,
        ledger: Ledger,
        store: StoredSamples,
        suspects: Suspects,
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._every = every
        self._canary = canary
        self._ledger = ledger
        self._store = store
        self._suspects = suspects
        self._observer = observer
        self._clock = clock
        self._unvouched = 0
        self._due = asyncio.Event()
        self._probing = asyncio.Lock()
        self._open: LiveEpoch | None = None
        self._ended = asyncio.Event()
        self._revoked = False
        self._drained = asyncio.Event()

    def committed(self) -> None:
        """A sample was committed."""
        self._unvouched += 1
        if self._every and self._unvouched >= self._every:
            self._due.set()

    async def passed(self, epoch: LiveEpoch) -> None:
        """A server passed the boot gate: it is asked to vouch for those that are gone. Raises EngineError."""
        for gone in await self._ledger.unvouched(but=epoch.id):
            await self._vouch_for_the_dead(epoch, gone)

    async def began(self, epoch: LiveEpoch) -> None:
        """An epoch begins: the canary at its boot vouches for what an earlier life of hsx had from its server."""
        await self._vouch(epoch, epoch.vouched)
        self._unvouched = 0
        self._open = epoch
        self._ended.clear()

    async def _vouch_for_the_dead(self, epoch: LiveEpoch, gone: str) -> None:
        """Has the last samples of a stream of an ended epoch extracted again by the present server.

        `gone` is what one DP rank captured; a disagreement takes back whatever is in doubt of all of them.
        """
        rows = await self._ledger.last_doubtful(gone, LAST)
        if not rows:
            return  # another stream of its epoch disagreed, and they were taken back together
        # The very last, since a fault stays once it has begun; and, as a token or two tell little, one that is long enough.
        telling = next((row for row in rows if row.tokens >= TELLING_TOKENS), rows[0])
        for row in {rows[0].index: rows[0], telling.index: telling}.values():
            try:
                stored, ids, kept = await self._read(gone, row)
            except RunError as error:
                self._observer.error_met(error.kind, f"sample {row.index} cannot vouch for epoch {gone}: {error.message}")
                return
            try:
                violation = await self._canary.agrees(epoch, ids, stored, kept)
            except EngineError as error:
                evidence = f"sample {row.index}, extracted again to vouch for epoch {gone}, failed: {error.message}"
                await self._failed_again(gone, evidence, error)
                raise EngineError("server_start_failed", evidence) from error
            if violation is not None:
                evidence = f"sample {row.index}, extracted again after epoch {gone} had ended: {violation.evidence}"
                await self._take_back(epoch_of(gone), Violation(violation.invariant, evidence))
                return
        await self._ledger.vouch(gone, rows[0].sequence)
        self._observer.canary_passed(gone, rows[0].sequence)

    async def _read(
        self, gone: str, row: CommittedRow
    ) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64] | None]:
        """Reads a committed sample, also where `hsx move` has brought it to another root since the ledger was asked."""
        try:
            return await asyncio.to_thread(self._store.read, row)
        except RunError:
            now = next((other for other in await self._ledger.last_doubtful(gone, LAST) if other.index == row.index), row)
            if now == row:
                raise
            return await asyncio.to_thread(self._store.read, now)

    async def _failed_again(self, gone: str, evidence: str, error: EngineError) -> None:
        """A sample that fails every new server must not keep all of them from beginning: then it is as if they disagreed."""
        if error.kind != "server_start_failed" and not isinstance(error, CanaryError):
            return
        counts: dict[str, int] = json.loads(await self._ledger.recall(FAILED_AGAIN) or "{}")
        counts[gone] = counts.get(gone, 0) + 1
        await self._ledger.remember(FAILED_AGAIN, json.dumps(counts))
        if counts[gone] >= TRIES_AGAIN:
            await self._take_back(epoch_of(gone), Violation("canary", f"{counts[gone]} servers were asked in vain; {evidence}"))

    async def _take_back(self, epoch: str, violation: Violation) -> None:
        await self._ledger.violation(epoch, None, violation.invariant, violation.evidence)
        self._observer.violation(None, violation.invariant, violation.evidence)
        await self._revoke(epoch, violation)

    async def run(self, ready: Callable[[], Coroutine[Any, Any, LiveEpoch]]) -> None:
        """Sends a canary whenever one is due, until cancelled."""
        while True:
            await self._due.wait()
            self._due.clear()
            epoch = await ready()
            try:
                async with self._probing:
                    if self._unvouched:  # not if the one at the end of the run was faster
                        await self._probe(epoch)
            except EngineError as error:
                if error.kind == "epoch_void":
                    continue
                # Busy or dying: others judge that. It stays due.
                self._observer.error_met(error.kind, error.message)
                await self._clock.sleep(RETRY_S)
                self._due.set()

    def drain(self) -> None:
        """No server is waited for any more: what is not vouched for is left to the next run."""
        self._drained.set()

    async def close(self, ready: Callable[[], Coroutine[Any, Any, LiveEpoch]]) -> bool:
        """The canary at the end of a run: True when all is done, False when samples may be pending again.

        Where the server is gone, the next one is waited for, which vouches for it; but not in a drained run: that is left to
        the next run.
        """
        for _ in range(TRIES):
            epoch = self._open
            if epoch is None or not self._unvouched:
                break
            try:
                async with self._probing:  # one under way is not left in the lurch: its dumps would stay
                    sound = not self._unvouched or await self._probe(epoch)
                if not sound:
                    break
            except EngineError as error:
                if epoch.is_void:
                    break
                self._observer.error_met(error.kind, f"no canary at the end of the run: {error.message}")
                await self._clock.sleep(RETRY_S)
        if self._open is not None and self._open.is_void:
            await self._ended.wait()  # what its end means for samples is being found out
        for gone, invariant, evidence in await self._ledger.overdue():
            # Its canary failed while the epoch was ending for another reason.
            await self._revoke(gone, Violation(invariant, evidence))
        if (self._open is None or self._open.is_void) and await self._ledger.unvouched():
            await first(ready(), self._drained.wait())
        revoked, self._revoked = self._revoked, False
        return not revoked

    async def _probe(self, epoch: LiveEpoch) -> bool:
        """One canary: True when it is sound; False when it is not, and the epoch was voided for it.

        Raises EngineError where the server could not be asked.
        """
        asked = self._unvouched
        try:
            sequences = await epoch.run(self._canary.check(epoch))
        except CanaryError as error:
            await self._ledger.doubt(epoch.id, error.violation.invariant, error.violation.evidence)
            epoch.void(error.violation, doubt=True)
            return False
        self._unvouched = max(0, self._unvouched - asked)
        await self._vouch(epoch, sequences)
        return True

    async def failed_at_boot(self, epoch: LiveEpoch, error: CanaryError) -> None:
        """The canary at the boot gate failed: what an earlier life of hsx had from this server is in doubt.

        A server whose states are not its prompts' is not asked again: a later canary may miss what this one saw.
        """
        if error.violation.invariant in WRONG_STATES:
            await self._ledger.epoch_began(epoch.record, len(epoch.ranks))
        await self._take_back(epoch.id, error.violation)
        await self._ledger.epoch_ended(epoch.id, error.violation.invariant, error.violation.evidence)

    async def ended(self, epoch: LiveEpoch, violation: Violation) -> bool:
        """An epoch ended and no attempt is under way in it. True where its end brought a hunt further."""
        if epoch.doubt:
            await self._revoke(epoch.id, violation)
        narrowed = bool(epoch.suspects) and await self._suspects.died(epoch, violation)
        self._unvouched = 0
        self._due.clear()
        self._open = None
        self._ended.set()
        return narrowed

    async def _vouch(self, epoch: LiveEpoch, sequences: dict[int, int]) -> None:
        epoch.vouched = sequences
        for rank, sequence in sequences.items():
            await self._ledger.vouch(epoch.stream(rank), sequence)
            self._observer.canary_passed(epoch.stream(rank), sequence)

    async def _revoke(self, epoch: str, violation: Violation) -> None:
        rows = await self._ledger.revoke(epoch, violation.invariant, violation.evidence)
        if rows:
            self._revoked = True
            await self._store.revoke(rows)
            tokens, nbytes = sum(row.tokens for row in rows), sum(row.own_bytes for row in rows)
            self._observer.samples_revoked(epoch, violation.invariant, violation.evidence, len(rows), tokens, nbytes)
