"""Makes roots and view follow the ledger, at rest: for commands that have changed the one or the other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hsx.errors import RunError
from hsx.stores.root import ShardRoot, discard_strays
from hsx.stores.view import UnionView

if TYPE_CHECKING:
    from hsx.stores.group import StoreInfo
    from hsx.stores.ledger import SqliteLedger


@dataclass(slots=True)
class Tidied:
    """What `tidy` did.

    Attributes:
        partials: files of writers that were cut short, which were removed.
        relinked: links of the union view that were made or removed.
        strays: shards that were removed, as their samples are committed elsewhere, or were taken back.
        untidy: roots on which something has to stay for now, and why.
    """

    partials: int = 0
    relinked: int = 0
    strays: int = 0
    untidy: dict[str, str] = field(default_factory=dict)


def tidy(store: StoreInfo, ledger: SqliteLedger) -> Tidied:
    """Removes what writers left, and makes the view follow the ledger: as every run does when it starts.

    Raises RunError `store_unwritable`, `store_invalid`. A root that takes no writes is told of; what stays there does no harm.
    """
    done = Tidied(relinked=UnionView(store).repair(ledger.committed_roots()))
    roots = [ShardRoot(name, store.folder(name), store) for name in store.roots]
    for root in roots:
        try:
            done.partials += root.sweep()
        except RunError as error:
            done.untidy[root.name] = error.message
    try:
        done.strays = discard_strays(roots, ledger.committed_roots(), store.layout.samples, ledger.revoked())
    except RunError as error:
        if error.kind != "root_unusable":
            raise
        done.untidy.setdefault("", error.message)
    return done
