"""Which pending samples are free: what the ledger hands out next, and never twice."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Collection, Iterable


class FreeSamples:
    """The pending samples that this process has not leased. Memory is bounded: most are read by a cursor, in index order,
    and only those that came back are held.

    Args:
        connection: of the ledger; used by the thread that calls.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._cursor = -1
        self._returned: deque[int] = deque()
        self._ahead: set[int] = set()

    def next(self, limit: int) -> list[int]:
        """Up to `limit` free samples, which are free no more.

        What came back goes last: so a server that fails everything fails many samples once, and not a few for good.
        """
        indices = self._fresh(limit)
        return indices + [self._returned.popleft() for _ in range(min(limit - len(indices), len(self._returned)))]

    def among(self, only: Collection[int], limit: int) -> list[int]:
        """Up to `limit` of those of `only` that are free, taken out of where they wait."""
        found: list[int] = []
        for idx in sorted(only):
            if len(found) == limit:
                break
            if idx in self._returned:
                self._returned.remove(idx)  # in place: the event loop may be adding to it
                found.append(idx)
            elif idx > self._cursor and idx not in self._ahead:
                query = "SELECT 1 FROM samples WHERE idx = ? AND state = 'pending'"
                if self._connection.execute(query, (idx,)).fetchone():
                    self._ahead.add(idx)  # the cursor will come to it, and pass it by
                    found.append(idx)
        return found

    def give_back(self, indices: Iterable[int]) -> None:
        """Leased samples are free again."""
        self._returned.extend(indices)

    def reopened(self, indices: Collection[int]) -> None:
        """Committed samples are pending again."""
        # Those beyond the cursor are met by it, and would be leased twice if they were kept too.
        self._returned.extend(index for index in indices if index <= self._cursor)
        self._ahead.difference_update(indices)

    def _fresh(self, limit: int) -> list[int]:
        """The next pending samples that were never leased by this process."""
        query = "SELECT idx FROM samples WHERE state = 'pending' AND idx > ? ORDER BY idx LIMIT ?"
        while fresh := [idx for (idx,) in self._connection.execute(query, (self._cursor, limit))]:
            self._cursor = fresh[-1]
            found = [idx for idx in fresh if idx not in self._ahead]
            self._ahead = {idx for idx in self._ahead if idx > self._cursor}
            if found:
                return found
        return []
