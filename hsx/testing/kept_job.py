"""A job over two roots as a run leaves it, made by the real store, roots and ledger, without a server; it can go on."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from hsx.config_load import LoadedConfig, load
from hsx.core.layout import shard_key
from hsx.core.marker import Marker
from hsx.prepare import prepare
from hsx.records import Commit
from hsx.stores.attach import attach_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.stores.view import UnionView
from hsx.testing.jobs import write_job
from hsx.testing.stores import EPOCH, payload, random_states

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.sample import Lease

ROOTS = ("a", "b")
SAMPLES = 12


@dataclass(frozen=True, slots=True)
class KeptJob:
    """The job, and the truth of its samples: sample i is i + 1 tokens long, and lies on root a where i is even, else on b."""

    file: Path
    loaded: LoadedConfig

    @property
    def ledger(self) -> Path:
        """The ledger file."""
        return self.loaded.state_dir / FILE_NAME

    def truth(self, index: int) -> NDArray[np.uint16]:
        """bf16 bits [tokens, L, H] of a sample: the same whenever it is extracted."""
        return random_states(np.random.default_rng(index), index + 1, 3, 64)

    def shard(self, index: int, root: str = "") -> Path:
        """Where the shard of a sample is, or would be on a root."""
        name = root or ROOTS[index % 2]
        store = Store(self.loaded.store)
        return store.info.folder(name) / shard_key(index)

    def extract(self, epoch: str = EPOCH, only: set[int] | None = None, root: str = "") -> list[int]:
        """Does what a run would do with all that is pending, or some of it; returns the samples that it committed."""
        return asyncio.run(self._extract(epoch, only, root))

    async def _extract(self, epoch: str, only: set[int] | None, root: str) -> list[int]:
        job = prepare(self.loaded, lambda _rows, _tokens: None)
        store, roots = attach_roots(job.store, {root.name: root.path for root in self.loaded.roots})
        by_name = {one.name: one for one in roots}
        view, ledger = UnionView(store), SqliteLedger(job.ledger)
        entries: list[Commit] = []
        try:
            leases: list[Lease] = await ledger.acquire(SAMPLES, only)
            for lease in leases:
                index = lease.sample.index
                marker = Marker(ledger.run, index, lease.attempt, lease.sample.tokens)
                home = by_name.get(root or ROOTS[index % 2], roots[0])
                given = replace(payload(marker, self.truth(index), job.samples.input_ids(index)), epoch=epoch)
                receipt = home.write(given)
                home.sync()
                entries.append(Commit(lease, marker, epoch, index + 1, receipt, {"request": 0.1}, adopted=False))
            await ledger.commit(entries)
            for entry in entries:
                view.link(entry.lease.sample.index, entry.receipt.root)
        finally:
            await ledger.close()
        return [entry.lease.sample.index for entry in entries]

    def state(self) -> dict[str, list[int]]:
        """Indices of the samples by state, out of the ledger."""
        found: dict[str, list[int]] = {"pending": [], "committed": [], "quarantined": []}
        with LedgerReader(self.ledger) as reader:
            for index in range(SAMPLES):
                found[reader.sample(index).state].append(index)
        return found

    def wrong(self) -> list[int]:
        """Committed samples whose stored states are not the truth, or that the view does not show; and shown ones that are not
        committed.
        """
        store = Store(self.loaded.store)
        committed = self.state()["committed"]
        shown = [int(index) for index in store.committed]
        wrong = sorted(set(committed) ^ set(shown))
        for index in sorted(set(committed) & set(shown)):
            stored = store[index].hidden_states.view(torch.uint16).numpy()
            if not np.array_equal(stored, self.truth(index)):
                wrong.append(index)
        return wrong


def keep_job(folder: Path) -> KeptJob:
    """Makes the job in `folder`, an existing one; nothing is extracted yet."""
    roots = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in ROOTS]
    file = write_job(folder, {"roots": roots})
    rows = [{"id": f"row-{number}", "input_ids": list(range(1, number + 2))} for number in range(SAMPLES)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return KeptJob(file, load(file))
