"""A writer over two real roots that can fail, a real ledger and a real view: for tests of what is between write and commit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.clock import SystemClock
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.records import Commit, Row
from hsx.space import RootsSettings, Space
from hsx.stores.attach import attach_roots
from hsx.stores.group import create_store
from hsx.stores.ledger import SqliteLedger, create, new_run
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.tokens import TokenTable
from hsx.stores.view import UnionView
from hsx.telemetry import Telemetry
from hsx.testing.roots import FailingRoot
from hsx.testing.stores import payload, random_states
from hsx.writer import Writer, WriterSettings

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.sample import Lease
    from hsx.records import Receipt

SAMPLES: Final = 6
TOKENS: Final = 5


class WriterBench:
    """The bench, of prompts of `TOKENS` tokens each.

    Args:
        folder: an empty one, for all of it.
        durable: shards and folders are synced by themselves.
        samples: how many prompts.
        group_samples: how many are committed at once.
        twins: all samples have the same prompt, and share what is extracted.
    """

    def __init__(
        self, folder: Path, *, durable: bool = True, samples: int = SAMPLES, group_samples: int = 2, twins: bool = False
    ) -> None:
        self.folder = folder
        run = new_run()
        self.layout = StoreLayout(samples, TOKENS, 2, 8)
        self.places = {name: folder / name for name in ("a", "b")}
        for place in self.places.values():
            place.mkdir()
        store = create_store(folder / "store", self.layout, CaptureSpec((1,), "post_norm"), {}, run)
        info, self.real = attach_roots(store, self.places, durable=durable)
        create(folder / "ledger.sqlite", run, {}, [TOKENS] * samples, [], [0] * samples if twins else None)
        self.ledger = SqliteLedger(folder / "ledger.sqlite")
        self.view = UnionView(info)
        self.roots = {root.name: FailingRoot(root) for root in self.real}
        self.telemetry = Telemetry()
        self.space = Space(list(self.roots.values()), RootsSettings(), SystemClock(), self.telemetry)
        self.writer = Writer(
            list(self.roots.values()),
            self.space,
            self.view,
            self.ledger,
            self._indexed(),
            self.telemetry,
            SystemClock(),
            WriterSettings(threads=1, group_samples=group_samples, group_seconds=0.01),
        )
        self.rng = np.random.default_rng(1)

    def _indexed(self) -> TokenTable:
        group = self.folder / "store"
        with TokenTableWriter(group) as writer:
            for index in range(self.layout.samples):
                writer.add(Row(f"s{index}", np.arange(TOKENS, dtype=np.int32), np.ones(TOKENS, np.uint8), index + 1))
            writer.finish({}, {})
        return TokenTable(group)

    async def write(self, lease: Lease, root: str = "") -> Receipt:
        """Writes one sample's shard, on `root` where one is named and takes it, else wherever it is taken."""
        states = random_states(self.rng, TOKENS, 2, 8)
        others = [other for name, other in self.roots.items() if root not in ("", name)]
        for other in others:
            other.crowded = 1 << 60
        try:
            while True:
                booking = await self.space.book(self.layout.file_bytes(TOKENS))
                receipt = await self.writer.write(payload(self.marker(lease), states), booking)
                if receipt is not None:
                    return receipt
                for other in others:
                    other.crowded = 0
        finally:
            for other in others:
                other.crowded = 0

    def marker(self, lease: Lease) -> Marker:
        """The marker of a lease."""
        return Marker(self.ledger.run, lease.sample.index, lease.attempt, TOKENS)

    async def commit(self, lease: Lease, receipt: Receipt, *, epoch: str = "e", sequence: int = 1) -> bool:
        """Commits one sample."""
        return await self.writer.commit(Commit(lease, self.marker(lease), epoch, sequence, receipt, {}, adopted=False))

    async def close(self) -> None:
        """Ends the threads, and closes the ledger."""
        self.writer.shutdown()
        self.space.shutdown()
        await self.ledger.close()
