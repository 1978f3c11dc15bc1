"""What `hsx move` reads and changes in the ledger, beside a running job or at rest: on which root a committed sample lies."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Self

from hsx.records import CommittedRow
from hsx.stores.ledger_schema import COMMITTED, SHARING, connect, facts_of, translated

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path
    from types import TracebackType


_EARLIER_TWIN: Final = (
    "SELECT 1 FROM samples AS twin WHERE twin.same_as = samples.same_as AND twin.idx < samples.idx "
    "AND twin.state = 'committed' AND twin.root = samples.root AND twin.marker = samples.marker"
)


class MoveLedger:
    """A connection of its own. A context manager.

    Args:
        path: the ledger file.

    Attributes:
        run: the job's run id.

    Raises:
        RunError: kind `ledger_failed`, from here and from every method.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = connect(path)
        self.run, _ = facts_of(self._connection, path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._connection.close()

    def tally(self) -> dict[str, tuple[int, int]]:
        """Committed samples and bytes of their shards, by root. Reads all rows."""
        query = (
            "SELECT root, count(*), sum(nbytes * (1 - shared)) FROM samples WHERE state = 'committed' "
            "GROUP BY root ORDER BY root"
        )
        with translated(self._path):
            return {root: (samples, nbytes) for root, samples, nbytes in self._connection.execute(query)}

    def page(self, root: str, after: int, limit: int) -> list[CommittedRow]:
        """Up to `limit` committed samples of `root` with an index above `after`, in order.

        Of those that share a shard there, only the first: the others are its `twins`.
        """
        with translated(self._path):
            query = f"{COMMITTED} AND root = ? AND idx > ? AND NOT EXISTS ({_EARLIER_TWIN}) ORDER BY idx LIMIT ?"
            return [CommittedRow(*row) for row in self._connection.execute(query, (root, after, limit))]

    def twins(self, row: CommittedRow) -> list[CommittedRow]:
        """The other committed samples that share the shard of this one on its root, in order."""
        with translated(self._path):
            found = self._connection.execute(SHARING, (row.index, row.root, row.marker))
            return [CommittedRow(*twin) for twin in found if twin[0] != row.index]

    def row(self, index: int) -> CommittedRow | None:
        """What the ledger says of a sample now; None where it is not committed."""
        with translated(self._path):
            found = self._connection.execute(f"{COMMITTED} AND idx = ?", (index,)).fetchone()
        return None if found is None else CommittedRow(*found)

    def rehome(self, indices: Collection[int], root: str) -> None:
        """Says that committed samples lie on `root`. Within `transaction`."""
        with translated(self._path):
            self._connection.executemany(
                "UPDATE samples SET root = ? WHERE idx = ? AND state = 'committed'", ((root, index) for index in indices)
            )

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One immediate transaction: no other process changes the ledger within the block; an exception rolls it back."""
        with translated(self._path):
            self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        with translated(self._path):
            self._connection.execute("COMMIT")
