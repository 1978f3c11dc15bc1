"""How the shards are spread over the roots, and whether each root is there."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hsx.config_load import LoadedConfig
    from hsx.stores.ledger_summary import RootTally
    from hsx.stores.reader import Store


def root_facts(loaded: LoadedConfig, store: Store | None, tallies: Sequence[RootTally] | None) -> list[dict[str, Any]]:
    """One entry for each root of the job file, of the store and of the ledger, in this order; plain data.

    `there` is None where no store says what has to be found there; `samples`, `tokens` and `bytes` are None without a ledger;
    `free` and `size`, in bytes, are None where the folder cannot be asked.
    """
    places: dict[str, Path] = {root.name: root.path for root in loaded.roots}
    in_job = set(places)
    if store is not None:
        for known_as, folder in store.info.roots.items():
            places.setdefault(known_as, folder)
    by_name = {tally.root: tally for tally in tallies or ()}
    names = [*places, *(name for name in by_name if name not in places)]
    found = []
    for name in names:
        tally, path = by_name.get(name), places.get(name)
        free, size = _space(path)
        known = store is not None and name in store.info.roots
        found.append(
            {
                "name": name,
                "path": "" if path is None else str(path),
                "in_job_file": name in in_job,
                "there": name in store.roots if store is not None and known else None,
                "samples": None if tallies is None else tally.samples if tally else 0,
                "tokens": None if tallies is None else tally.tokens if tally else 0,
                "bytes": None if tallies is None else tally.nbytes if tally else 0,
                "shared": None if tallies is None else tally.shared if tally else 0,
                "free": free,
                "size": size,
            }
        )
    return found


def _space(path: Path | None) -> tuple[int | None, int | None]:
    if path is None:
        return None, None
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
