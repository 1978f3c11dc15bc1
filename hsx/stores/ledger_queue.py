"""Which pending samples are free: what the ledger hands out next, and never twice."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable

_FRESH: Final = (
    "SELECT idx FROM samples WHERE state = 'pending' AND idx > ? AND NOT EXISTS (SELECT 1 FROM samples AS twin "
    "WHERE twin.same_as = samples.same_as AND twin.idx < samples.idx AND twin.state = 'pending') ORDER BY idx LIMIT ?"
)
"""Of samples with the same prompt the first pending one stands for all: they are committed, or quarantined, with it."""
_END: Final = 2**62
"""Beyond every index."""


class FreeSamples:
    """The pending samples that this process has not leased. Memory is bounded: most are read by a cursor, in index order,
    and only those that came back, and those that are leased, are held.

    The ledger's thread calls all of it, but for `give_back`, which the event loop calls.

    Args:
        connection: of the ledger; used by the thread that calls.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._cursor = -1
        self._returned: deque[int] = deque()
        self._ahead: set[int] = set()
        self._leased: set[int] = set()
        self._held: set[int] = set()
        self._guard = threading.Lock()  # never held during a query: the event loop waits for it
        self._claims: dict[int, list[int]] = {}
        self._claimed: set[int] = set()

    def next(self, limit: int) -> list[int]:
        """Up to `limit` free samples, which are free no more.

        What came back goes last: so a server that fails everything fails many samples once, and not a few for good.
        """
        self._held.clear()  # the adoption has ended
        indices = self._fresh(limit)
        indices += [self._returned.popleft() for _ in range(min(limit - len(indices), len(self._returned)))]
        self._leased.update(indices)
        return indices

    def among(self, only: Collection[int], limit: int) -> list[int]:
        """Up to `limit` of those of `only` that are free, taken out of where they wait."""
        found: list[int] = []
        for idx in sorted(only):
            if len(found) == limit:
                break
            if idx in self._returned:
                self._returned.remove(idx)  # in place: the event loop may be adding to it
                found.append(idx)
            elif idx > self._cursor and idx not in self._ahead and idx not in self._claimed:
                query = "SELECT 1 FROM samples WHERE idx = ? AND state = 'pending'"
                if self._connection.execute(query, (idx,)).fetchone():
                    self._ahead.add(idx)  # the cursor will come to it, and pass it by
                    found.append(idx)
        self._leased.update(found)
        return found

    def give_back(self, indices: Iterable[int]) -> None:
        """Leased samples are free again."""
        indices = list(indices)
        with self._guard:  # one that is neither here nor there for a moment would be claimed, and handed out all the same
            self._leased.difference_update(indices)
            self._returned.extend(indices)

    def reopened(self, indices: Collection[int]) -> None:
        """Committed samples are pending again."""
        self._ahead.difference_update(indices)
        twins: set[int] = set()
        for idx in indices:
            ((group,),) = self._connection.execute("SELECT same_as FROM samples WHERE idx = ?", (idx,)).fetchall()
            if group is not None:
                twins.add(group)
            elif idx <= self._cursor:  # those beyond the cursor are met by it, and would be leased twice
                self._returned.append(idx)
        for group in sorted(twins):
            self._wake(group)

    # --- samples with the same prompt

    def hold(self, idx: int) -> bool:
        """Keeps a pending sample from being claimed until the first `next`; False where it is claimed by a twin."""
        if idx in self._claimed:
            return False
        self._held.add(idx)
        return True

    def claim(self, idx: int) -> list[int]:
        """The pending twins of a leased sample that nobody has leased; they are not free until `settle`."""
        self._unclaim(idx)
        query = (
            "SELECT twin.idx FROM samples JOIN samples AS twin ON twin.same_as = samples.same_as "
            "WHERE samples.idx = ? AND twin.idx != samples.idx AND twin.state = 'pending' ORDER BY twin.idx"
        )
        rows = self._connection.execute(query, (idx,)).fetchall()
        with self._guard:
            twins = [twin for (twin,) in rows if not self._busy(twin)]
            for twin in twins:
                if twin in self._returned:
                    self._returned.remove(twin)
        if twins:
            self._claims[idx] = twins
            self._claimed.update(twins)
        return twins

    def settle(self, indices: Iterable[int]) -> None:
        """Leased samples are committed or quarantined, and so may be what they claimed: what is not is free again."""
        for idx in indices:
            self._leased.discard(idx)
            self._held.discard(idx)
            if self._unclaim(idx):
                ((group,),) = self._connection.execute("SELECT same_as FROM samples WHERE idx = ?", (idx,)).fetchall()
                self._wake(group)

    def _unclaim(self, idx: int) -> list[int]:
        """Gives up what a sample had claimed; returns that."""
        twins = self._claims.pop(idx, [])
        self._claimed.difference_update(twins)
        return twins

    def _busy(self, idx: int) -> bool:
        return idx in self._leased or idx in self._held or idx in self._claimed

    def _wake(self, group: int) -> None:
        """Sees to it that the first pending one of a group is handed out, if none of them is being worked on."""
        query = "SELECT idx FROM samples WHERE same_as = ? AND state = 'pending' ORDER BY idx"
        pending = [idx for (idx,) in self._connection.execute(query, (group,))]
        with self._guard:
            if not pending or any(idx in self._returned or self._busy(idx) for idx in pending):
                return
            if pending[0] <= self._cursor and pending[0] not in self._ahead:
                self._returned.append(pending[0])

    def _fresh(self, limit: int) -> list[int]:
        """The next pending samples that were never leased by this process."""
        while fresh := [idx for (idx,) in self._connection.execute(_FRESH, (self._cursor, limit))]:
            # At the end the cursor passes by those for which others stand: they would be read again each time.
            self._cursor = fresh[-1] if len(fresh) == limit else _END
            found = [idx for idx in fresh if idx not in self._ahead and idx not in self._claimed]
            self._ahead = {idx for idx in self._ahead if idx > self._cursor}
            if found:
                return found
        self._cursor = _END
        return []
