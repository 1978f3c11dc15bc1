"""A job of five samples as a run leaves it, made by the real store, roots and ledger, without a server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hsx.config_load import LoadedConfig, load
from hsx.core.marker import Marker
from hsx.prepare import prepare
from hsx.records import Commit
from hsx.stores.attach import attach_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.view import UnionView
from hsx.testing.jobs import write_job
from hsx.testing.stores import EPOCH, payload, random_states

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class LeftJob:
    """The job file and what it resolves to; samples 0 to 2 are committed, 3 is quarantined, 4 is pending."""

    file: str
    loaded: LoadedConfig

    def shard(self, index: int) -> Path:
        """The shard file of a sample."""
        return next(self.loaded.roots[0].path.glob(f"*/c.{index}.0.0.0"))


def leave_job(folder: Path) -> LeftJob:
    """Makes the job in `folder`, an existing one."""
    file = write_job(folder)
    loaded = load(file)
    asyncio.run(_extract(loaded))
    return LeftJob(str(file), loaded)


async def _extract(loaded: LoadedConfig) -> None:
    job = prepare(loaded, lambda _rows, _tokens: None)
    store, (root,) = attach_roots(job.store, {"a": loaded.roots[0].path})
    view, ledger = UnionView(store), SqliteLedger(job.ledger)
    rng = np.random.default_rng(1)
    leases = await ledger.acquire(5)
    for lease in leases[:3]:
        index, tokens = lease.sample.index, lease.sample.tokens
        marker = Marker(ledger.run, index, 1, tokens)
        receipt = root.write(payload(marker, random_states(rng, tokens, 3, 64), job.samples.input_ids(index)))
        root.sync()
        await ledger.commit([Commit(lease, marker, EPOCH, index + 1, receipt, {"request": 0.1}, adopted=False)])
        view.link(index, "a")
    lost = leases[3]
    marker = Marker(ledger.run, 3, 1, lost.sample.tokens)
    await ledger.fail(lost, marker, EPOCH, "finite", "4 values are NaN", quarantine=True)
    await ledger.close()
