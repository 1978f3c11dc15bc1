"""What a verification holds a store against: the ledger, the arrays of a sealed store, or its union view alone."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from hsx.core.layout import shard_key
from hsx.verify.shard import Expected

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.records import CommittedRow
    from hsx.stores.reader import Store
    from hsx.stores.seal import SealedArrays
    from hsx.stores.view import UnionView


@runtime_checkable
class Rows(Protocol):
    """The committed rows of a ledger that may change while it is read; `hsx.stores.ledger_reader.LedgerReader` is one."""

    def committed(self, since: float | None = None) -> Iterator[CommittedRow]:
        """Every committed sample, in index order; only those committed after `since` (Unix seconds), where given."""
        ...

    def row(self, index: int) -> CommittedRow | None:
        """One sample as it is committed now; None where it is not."""
        ...


class Folders:
    """Where the shards of each root lie now, which may be elsewhere than when the store was written.

    Args:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self._info = store.info
        found = store.roots
        self._folders = {name: found.get(name, store.info.folder(name)) for name in store.info.roots}

    def of(self, root: str) -> Path:
        """The folder of a root; the store's own for a root that the store does not know, where no shard is found."""
        return self._folders.get(root, self._info.path)

    def all(self) -> Mapping[str, Path]:
        """The folder of each root, by its name."""
        return self._folders


class Source(Protocol):
    """Says what has to be there."""

    whole: bool
    """It names all committed samples, so that what it does not name was not committed."""
    linked: bool
    """The union view has to show the very shards that it names."""
    changing: bool
    """What it says may change while it is read."""

    def expected(self) -> Iterator[Expected]:
        """Every committed sample, in index order."""
        ...

    def now(self, index: int) -> Expected | None:
        """One sample as it is committed now; None where it is not. From any thread."""
        ...


def rows_of(ledger: Iterable[CommittedRow] | Rows) -> Rows:
    """A ledger's reader as it is; anything else is read into memory."""
    return ledger if isinstance(ledger, Rows) else GivenRows(ledger)


class GivenRows:
    """Rows that were read beforehand, held in memory."""

    def __init__(self, rows: Iterable[CommittedRow]) -> None:
        self._rows = {row.index: row for row in rows}

    def committed(self, since: float | None = None) -> Iterator[CommittedRow]:
        """All of them, whenever they were committed."""
        if since is not None:
            raise ValueError("rows that were read beforehand do not say when they were committed")
        return iter(self._rows.values())

    def row(self, index: int) -> CommittedRow | None:
        """One of them."""
        return self._rows.get(index)


class LedgerSource:
    """The ledger. Each row is asked for again when its shard's turn comes, hours later perhaps."""

    def __init__(self, folders: Folders, rows: Rows, since: float | None) -> None:
        self._folders = folders
        self._rows = rows
        self._since = since
        self._lock = threading.Lock()
        self.whole = since is None
        self.linked = True
        self.changing = not isinstance(rows, GivenRows)

    def expected(self) -> Iterator[Expected]:
        """The rows of the ledger, as they are when their page of it is read."""
        return map(self._expect, self._rows.committed(self._since))

    def now(self, index: int) -> Expected | None:
        """Asks the ledger."""
        with self._lock:
            row = self._rows.row(index)
        return None if row is None else self._expect(row)

    def _expect(self, row: CommittedRow) -> Expected:
        path = self._folders.of(row.root) / shard_key(row.index)
        return Expected(row.index, row.tokens, row.root, path, row.nbytes, row.crc32c, row.marker)


class SealSource:
    """The arrays of a sealed store, which needs no ledger any more."""

    whole = linked = True
    changing = False

    def __init__(self, store: Store, folders: Folders, arrays: SealedArrays) -> None:
        self._store = store
        self._folders = folders
        self._arrays = arrays

    def expected(self) -> Iterator[Expected]:
        """The samples that were committed when the store was sealed."""
        return (expected for index in range(len(self._store)) if (expected := self.now(index)) is not None)

    def now(self, index: int) -> Expected | None:
        """Out of the arrays: they do not change."""
        root = self._arrays.root_of(index)
        if root is None:
            return None
        path = self._folders.of(root) / shard_key(index)
        return Expected(index, self._store.tokens(index), root, path, crc32c=int(self._arrays.crc32c[index]))


class ViewSource:
    """What the union view shows, where there is nothing else: shards are proved by what they say of themselves."""

    whole = linked = changing = False

    def __init__(self, store: Store, folders: Folders, view: UnionView, shown: NDArray[np.int64]) -> None:
        self._store = store
        self._view = view
        self._shown = shown
        self._folders = folders
        self._roots = {store.info.folder(name): name for name in store.info.roots}

    def expected(self) -> Iterator[Expected]:
        """The samples that were visible at the beginning."""
        return (self._expect(index) for index in self._shown.tolist())

    def now(self, index: int) -> Expected | None:
        """Looks at the link again."""
        path = self._view.path(index)
        return self._expect(index) if path.is_symlink() or path.exists() else None

    def _expect(self, index: int) -> Expected:
        path = self._view.target(index) or self._view.path(index)
        tokens = self._store.tokens(index) if index < len(self._store) else 0
        root = self._roots.get(path.parent)
        return Expected(index, tokens, root or "", path if root is None else self._folders.of(root) / path.name)
