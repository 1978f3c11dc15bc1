"""The suspects of a run: which samples may have killed the server, kept in the ledger so that a crash of hsx forgets none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hsx.core.hunt import Hunt

if TYPE_CHECKING:
    from hsx.core.invariants import Violation
    from hsx.epoch import LiveEpoch
    from hsx.ports import Ledger, Observer

KEY = "suspects"


class Suspects:
    """Runs the hunt for poison samples; see `hsx.core.hunt`.

    Args:
        ledger: remembers the suspects.
        observer: hears of convictions.
    """

    def __init__(self, ledger: Ledger, observer: Observer) -> None:
        self._ledger = ledger
        self._observer = observer
        self._hunt = Hunt()
        self._deaths: dict[int, int] = {}
        self._convicted: dict[int, str] = {}

    async def recall(self) -> None:
        """Takes up the hunt of an earlier life of hsx: its suspects that are still pending."""
        recorded: list[int] = json.loads(await self._ledger.recall(KEY) or "[]")
        pending = []
        for index in recorded:
            known = await self._ledger.attempts_of(index)
            if known is not None and known[0] == "pending":
                pending.append(index)
        self._hunt = Hunt(pending)

    @property
    def trial(self) -> frozenset[int] | None:
        """The samples that alone may be sent now; None when all may."""
        return self._hunt.trial if self._hunt.suspects else None

    def admits(self, index: int) -> bool:
        """Whether sample `index` may be sent now."""
        return index not in self._convicted and self._hunt.admits(index)

    async def cleared(self, index: int) -> bool:
        """The server is done with sample `index` and lives. True where that lets others in."""
        if index not in self._hunt.suspects:
            return False
        more = self._hunt.clear(index)
        self._deaths.pop(index, None)
        await self._remember()
        return more

    async def give_up_trial(self) -> None:
        """The suspects on trial are out of the job: others are let in."""
        for index in self._hunt.trial:
            self._hunt.clear(index)
        await self._remember()

    async def died(self, epoch: LiveEpoch, violation: Violation) -> bool:
        """The server died or stalled with `epoch.suspects` at it. True where that brought the hunt further."""
        for index in epoch.suspects:
            self._deaths[index] = self._deaths.get(index, 0) + 1
        convicted, narrowed = self._hunt.died(epoch.suspects)
        self._deaths = {i: n for i, n in self._deaths.items() if i in self._hunt.suspects or i == convicted}
        if convicted is not None:
            deaths = self._deaths.pop(convicted, 1)
            self._convicted[convicted] = (
                f"the server died or stalled {deaths} times while it worked on this sample, at last with no other suspect; "
                f"{violation.invariant}: {violation.evidence}"
            )
            self._observer.sample_convicted(convicted, deaths)
        await self._remember()
        return narrowed

    def conviction(self, index: int) -> str | None:
        """Why sample `index` has to be quarantined; None where it has not been convicted."""
        return self._convicted.get(index)

    async def executed(self, index: int) -> None:
        """Sample `index` is quarantined."""
        del self._convicted[index]
        await self._remember()

    async def _remember(self) -> None:
        # One that is convicted and not yet in quarantine stays a suspect for whoever comes after a crash.
        await self._ledger.remember(KEY, json.dumps(sorted({*self._hunt.suspects, *self._convicted})))
