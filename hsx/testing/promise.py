"""The promise, held against a job on the reference engine: nothing is stored wrongly, and nothing committed lost or twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.core.layout import index_of_key
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.truth import wrong_samples
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hsx.config_load import LoadedConfig
    from hsx.records import CommittedRow
    from hsx.verify import Damage


def committed_rows(loaded: LoadedConfig) -> dict[int, CommittedRow]:
    """What the ledger says of each committed sample, by index; nothing where there is no ledger yet."""
    path = loaded.state_dir / FILE_NAME
    if not path.exists():
        return {}
    with LedgerReader(path) as ledger:
        return {row.index: row for row in ledger.committed()}


def damages(loaded: LoadedConfig) -> list[Damage]:
    """What `hsx verify` finds wrong, every shard read."""
    rows = committed_rows(loaded)
    return verify(loaded.store, [rows[index] for index in sorted(rows)]).damage


def shards(loaded: LoadedConfig) -> list[tuple[int, str]]:
    """(index, root) of each file on the roots under a shard's name, sorted."""
    names = [(path.name, root.name) for root in loaded.roots for path in root.path.rglob("c.*")]
    return sorted((index, root) for name, root in names if (index := index_of_key(name)) is not None)


def assert_kept(loaded: LoadedConfig, samples: int, told: Mapping[int, str]) -> None:
    """Holds a job that has come to its end against the promise.

    Args:
        loaded: the job.
        samples: how many it has; every one must be committed.
        told: markers of the samples that were said to be committed before, by index: they must be committed as they were.

    Raises:
        AssertionError: something does not hold.
    """
    rows = committed_rows(loaded)
    assert sorted(rows) == list(range(samples)), f"{len(rows)} committed samples; expected {samples}"
    changed = {index: (marker, rows[index].marker) for index, marker in told.items() if rows[index].marker != marker}
    assert changed == {}, "committed, and another now"
    assert damages(loaded) == []
    assert wrong_samples(loaded) == []
    assert shards(loaded) == sorted((row.index, row.root) for row in rows.values()), "shards that are not the ledger's"
