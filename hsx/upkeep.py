"""What is done for the safety of committed samples beside a run: syncs of disks, and copies of the ledger on them.

With `storage.durability = "relaxed"` no shard and no folder is synced by itself. All disks are synced every `SYNC_S` seconds
and at the end, and the ledger remembers the time through which everything is on the disks, with the host's boot id. So a start
after a power cut knows which samples may have been lost: they are read again, and the damaged ones are extracted again. Of a
root that is not there at a start it remembers through when it was synced, until the root is back.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Final, Protocol

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hsx.ports import Clock, Ledger, Observer, Root
    from hsx.records import CommittedRow
    from hsx.space import Space

SYNC_S: Final = 60.0
LOOK_S: Final = 1.0
MARGIN_S: Final = 60.0
"""Where the wall clock steps back, samples are committed at times that seemed over: the remembered time goes before them."""
SYNCED: Final = "synced"
"""Key of the fact; its value is empty where every commit is durable by itself."""
UNSYNCED: Final = "unsynced"
"""What is said not to hold of samples that a disk may have lost."""


class Store(Protocol):
    """The committed samples, as they lie on their roots."""

    async def revoke(self, rows: Sequence[CommittedRow]) -> None:
        """Takes samples that the ledger has revoked out of the store."""
        ...


class Syncing:
    """Keeps the books of what is on the disks.

    Args:
        relaxed: shards are not synced by themselves.
        roots: the disks in service at the start.
        space: knows which roots are lost; hears of those that fail.
        ledger: remembers, and takes back.
        store: see there.
        committed: the samples committed after a time, in Unix seconds. Blocks.
        sound: whether a committed sample can be read from a root and is what was committed. Blocks.
        boot: the host's boot id.
        observer: hears of samples that are taken back.
        clock: for the pauses.
        wall: Unix seconds, as the ledger takes them.
    """

    def __init__(
        self,
        *,
        relaxed: bool,
        roots: Sequence[Root],
        space: Space,
        ledger: Ledger,
        store: Store,
        committed: Callable[[float], list[CommittedRow]],
        sound: Callable[[Root, CommittedRow], bool],
        boot: str,
        observer: Observer,
        clock: Clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._relaxed = relaxed
        self._roots = {root.name: root for root in roots}
        self._space = space
        self._ledger = ledger
        self._store = store
        self._committed = committed
        self._sound = sound
        self._boot = boot
        self._observer = observer
        self._clock = clock
        self._wall = wall
        self._through = float("inf")
        self._away: dict[str, float] = {}  # what roots that were not there took after this may never have reached them
        self._given_up: set[str] = set()
        self._one = asyncio.Lock()

    async def begin(self) -> None:
        """Finds out what a power cut has cost, before anything else is done with the store."""
        known = await self._ledger.recall(SYNCED)
        if not known and not self._relaxed:
            return
        if known:
            fact = json.loads(known)
            self._through = float(fact["through"])
            self._away = {name: float(through) for name, through in fact.get("away", {}).items()}
            await self._read_again(anew=fact["boot"] != self._boot)
        await self.flush()

    async def run(self) -> None:
        """Syncs every `SYNC_S` seconds, until cancelled; does nothing where every commit is durable by itself."""
        if not self._relaxed:
            return
        due = self._clock.monotonic() + SYNC_S
        while True:
            await self._clock.sleep(LOOK_S)
            now = self._wall()
            if now < self._through:
                await self._remember(now - MARGIN_S)
            if self._clock.monotonic() >= due:
                await self.flush()
                due = self._clock.monotonic() + SYNC_S

    async def close(self) -> bool:
        """Syncs at the end of a run; False where samples are pending again for that."""
        return await self.flush() if self._relaxed else True

    async def flush(self) -> bool:
        """Syncs all roots; what a lost one may not have kept is pending again, which makes this False."""
        async with self._one:
            through = self._wall()
            names = [name for name in self._roots if name not in self._space.lost]
            syncs = [asyncio.to_thread(self._roots[name].flush) for name in names]
            for name, outcome in zip(names, await asyncio.gather(*syncs, return_exceptions=True), strict=True):
                if isinstance(outcome, RunError):
                    self._space.failed(name, outcome)
                elif outcome is not None:
                    raise outcome
            kept = await self._give_up_lost()
            await self._remember(through)
        return kept

    async def _give_up_lost(self) -> bool:
        """What a lost root took since the last sync may never have reached its disk: it is extracted again, elsewhere."""
        lost = {name for name in self._roots if name in self._space.lost} - self._given_up
        self._given_up |= lost
        if not lost or self._through == float("inf"):
            return True
        rows = [row for row in await asyncio.to_thread(self._committed, self._through) if row.root in lost]
        return not await self._take_back(rows, f"root {', '.join(sorted(lost))} was lost before it was synced")

    async def _read_again(self, *, anew: bool) -> None:
        """Reads what disks may not have kept: where the host was started anew, and on roots that are back.

        Samples on roots that are not in service are left as they are; they are read once these are back.
        """
        unsynced = await asyncio.to_thread(self._committed, self._through)
        for name in {row.root for row in unsynced} - self._roots.keys():
            self._away.setdefault(name, self._through)
        here = {name: [row for row in unsynced if row.root == name] for name in self._roots if anew}
        back = {name: through for name, through in self._away.items() if name in self._roots}
        for name, through in back.items():
            here[name] = [row for row in await asyncio.to_thread(self._committed, through) if row.root == name]
        found = await asyncio.gather(*(asyncio.to_thread(self._damaged, name, here[name]) for name in here))
        damaged = [row for rows in found for row in rows]
        why = "the host was started anew" if anew else f"root {', '.join(sorted(back))} was away before it was synced"
        await self._take_back(damaged, f"{why}, and {len(damaged)} of {sum(map(len, here.values()))} samples are damaged")
        for name in back:
            del self._away[name]

    def _damaged(self, name: str, rows: Sequence[CommittedRow]) -> list[CommittedRow]:
        return [row for row in rows if not self._sound(self._roots[name], row)]

    async def _take_back(self, rows: Sequence[CommittedRow], evidence: str) -> bool:
        """True where samples are pending again."""
        where = {row.index: row.root for row in rows}
        taken = await self._ledger.requeue_damaged(where, UNSYNCED, evidence, where=where) if rows else []
        if not taken:
            return False
        await self._store.revoke(taken)
        tokens, nbytes = sum(row.tokens for row in taken), sum(row.own_bytes for row in taken)
        self._observer.samples_revoked("", UNSYNCED, evidence, len(taken), tokens, nbytes)
        return True

    async def _remember(self, through: float) -> None:
        self._through = through
        fact: dict[str, object] = {"through": through, "boot": self._boot}
        if self._away:
            fact["away"] = self._away
        await self._ledger.remember(SYNCED, json.dumps(fact) if self._relaxed or self._away else "")


class Copies:
    """Copies of the ledger on the roots, taken now and then and at the end of a run.

    Args:
        every_s: seconds between two of them; 0 for none at all.
        folders: where, by root.
        space: knows which roots are lost.
        ledger: is copied.
        observer: hears of copies, and of roots that took none.
        clock: for the pauses.
    """

    def __init__(
        self, every_s: float, folders: Mapping[str, Path], space: Space, ledger: Ledger, observer: Observer, clock: Clock
    ) -> None:
        self._every_s = every_s
        self._folders = folders
        self._space = space
        self._ledger = ledger
        self._observer = observer
        self._clock = clock
        self._failed: dict[str, str] = {}

    async def run(self) -> None:
        """Copies at intervals, until cancelled."""
        while self._every_s:
            await self._clock.sleep(self._every_s)
            await self.take()

    async def take(self) -> None:
        """One copy to each root in service. That one takes none is told once, and harms nothing."""
        if not self._every_s:
            return
        folders = {name: folder for name, folder in self._folders.items() if name not in self._space.lost}
        for name, error in (await self._ledger.backup(folders)).items():
            if error is None:
                self._failed.pop(name, None)
            elif self._failed.get(name) != error.message:
                self._failed[name] = error.message
                self._observer.error_met(error.kind, f"no copy of the ledger on root {name}: {error.message}")
