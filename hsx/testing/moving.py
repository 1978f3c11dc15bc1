"""A store of three roots with its ledger, and what must hold of it at any moment."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.epoch import EpochRecord
from hsx.core.layout import index_of_key
from hsx.core.marker import Marker
from hsx.locks import Homes
from hsx.move import Mover, MoveSettings
from hsx.records import Commit, Receipt
from hsx.stores.draining import begin_draining
from hsx.stores.group import open_store
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_move import MoveLedger
from hsx.stores.shard_copy import ShardCopier
from hsx.stores.view import UnionView
from hsx.testing.stores import EPOCH, RUN, build_store, random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from hsx.move import Step
    from hsx.move_report import MoveReport
    from hsx.records import CommittedRow

SAMPLES = 9
LENGTHS = (1, 63, 64, 65, 128, 7, 200, 30, 64)
RECORD = EpochRecord(EPOCH, "boot", 1, 2, "", ("sglang",), "m", "", (1, 2), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)


class MoveBench:
    """Nine samples, committed on roots a, b and c by turns.

    Args:
        folder: an existing folder.
        new: build it; else the one that another process has built there is opened.
        codec: how its shards are compressed.
    """

    def __init__(self, folder: Path, *, new: bool = True, codec: str = "none") -> None:
        self.folder = folder
        self.places = {name: folder / name for name in ("a", "b", "c")}
        self.ledger_path = folder / "ledger.sqlite"
        self.homes = Homes(folder)
        if new:
            self._build(codec)
        self.info = open_store(folder / "store")
        self.view = UnionView(self.info)

    def _build(self, codec: str) -> None:
        rng = np.random.default_rng(17)
        built = build_store(
            self.folder, [random_states(rng, tokens, 3, 16) for tokens in LENGTHS], roots=list(self.places), codec=codec
        )
        create(self.ledger_path, RUN, {}, LENGTHS, [])
        asyncio.run(self._commit(built.rows))

    async def _commit(self, rows: Sequence[CommittedRow]) -> None:
        ledger = SqliteLedger(self.ledger_path)
        await ledger.epoch_began(RECORD)
        leases = await ledger.acquire(SAMPLES)
        group = [
            Commit(
                lease,
                Marker(RUN, row.index, 1, row.tokens),
                row.epoch,
                row.sequence,
                Receipt(row.root, row.nbytes, row.crc32c),
                {},
                adopted=False,
            )
            for lease, row in zip(leases, rows, strict=True)
        ]
        await ledger.commit(group)
        await ledger.close()

    def move(
        self,
        source: str = "a",
        targets: Sequence[str] = ("b", "c"),
        *,
        batch: int = 2,
        reached: Callable[[Step], None] = lambda _step: None,
        stopped: Callable[[], bool] = lambda: False,
        reserves: Mapping[str, int] | None = None,
    ) -> MoveReport:
        """Drains a root in this process, as the command does."""
        begin_draining(self.info.folder(source), source)
        with self.ledger() as ledger:
            settings = MoveSettings(threads=1, batch_samples=batch, reserves=reserves or {})
            return Mover(self.info, source, targets, ledger, self.homes, settings, reached=reached, stopped=stopped).run()

    def ledger(self) -> MoveLedger:
        """A connection to the ledger."""
        return MoveLedger(self.ledger_path)

    def rows(self) -> list[CommittedRow]:
        """What the ledger holds as committed."""
        with self.ledger() as ledger:
            return [row for index in range(SAMPLES) if (row := ledger.row(index)) is not None]

    def homes_now(self) -> dict[int, str]:
        """The root of each committed sample."""
        return {row.index: row.root for row in self.rows()}

    def shards(self, root: str) -> list[int]:
        """Samples that have a file under a final name on a root."""
        found = [index_of_key(path.name) for path in self.info.folder(root).iterdir()]
        return sorted(index for index in found if index is not None)

    def partials(self) -> list[str]:
        """Names of partial files on all roots."""
        return [path.name for name in self.info.roots for path in self.info.folder(name).glob("*.partial")]

    def nothing_lost(self) -> None:
        """What holds at any moment: the ledger's shard is there and whole, and the view shows a whole copy of it."""
        copier = ShardCopier(self.info, lambda: False)
        for row in self.rows():
            copier.prove(self.info.folder(row.root) / f"c.{row.index}.0.0.0", row)
            copier.prove(self.view.path(row.index), row)

    def in_order(self) -> None:
        """What holds when all is done: besides, one shard a sample, links that follow the ledger, and nothing partial."""
        self.nothing_lost()
        homes = self.homes_now()
        for name in self.info.roots:
            assert self.shards(name) == sorted(index for index, home in homes.items() if home == name)
        assert self.partials() == []
        assert self.view.indices().tolist() == sorted(homes)
        for index, home in homes.items():
            assert self.view.target(index) == self.info.folder(home) / f"c.{index}.0.0.0"
