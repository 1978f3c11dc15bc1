"""A job as a run of hours leaves it, with states that look like a real model's: what the report is looked at with."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.config_load import LoadedConfig, load
from hsx.core.marker import Marker
from hsx.prepare import prepare
from hsx.records import Commit
from hsx.stores.attach import attach_roots
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.view import UnionView
from hsx.testing.jobs import write_job
from hsx.testing.stores import payload

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SAMPLES: Final = 300
COMMITTED: Final = 270
LONGEST: Final = 1500
ROOTS: Final = ("nvme0", "nvme1", "nvme2")
EPOCHS: Final = ("c41f9d52-7a0e-4f7e-9d1c-6f2b8a3e5d10", "0b7e66a1-93d4-4c8e-8b15-2f9f0c7d4a83")
SPLIT: Final = 170
"""The first sample of the second epoch."""
QUARANTINED: Final = (55, 121)
HOUR: Final = 3600.0
BEGAN: Final = 1_790_000_000.0


class ModelLike:
    """Draws states with norms that grow over the layers, outlier channels, and a first token that is an attention sink."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._channels = np.exp(self._rng.normal(0, 0.35, (3, 64))).astype(np.float32)
        for state, channel, factor in ((0, 7, 20.0), (1, 7, 55.0), (1, 41, 14.0), (2, 12, 6.0)):
            self._channels[state, channel] *= factor

    def states(self, tokens: int) -> NDArray[np.uint16]:
        """bf16 bits [tokens, 3, 64]."""
        rng = self._rng
        values = rng.standard_normal((tokens, 3, 64)).astype(np.float32) * self._channels
        drift = np.exp(0.5 * np.cumsum(rng.normal(0, 0.05, tokens)) + rng.normal(0, 0.15, tokens)).astype(np.float32)
        for state, (scale, power) in enumerate(((1.0, 0.5), (3.0, 0.8), (1.5, 0.4))):
            values[:, state] *= np.float32(scale) * drift[:, None] ** np.float32(power)
        values[0] *= np.array([[2.0], [90.0], [3.0]], np.float32)
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def make_report_scene(folder: Path) -> Path:
    """Makes the job in `folder`, an existing one: unfinished, with one restart behind it; returns the job file."""
    roots = [{"name": name, "path": name, "reserve": "0B"} for name in ROOTS]
    file = write_job(folder, {"job": {"name": "qwen3-8b-eagle3"}, "roots": roots})
    rng = random.Random(3)
    lengths = [min(LONGEST, int(rng.lognormvariate(5.2, 0.8)) + 8) for _ in range(SAMPLES)]
    rows = [{"id": f"conversation-{i}", "input_ids": rng.choices(range(500), k=length)} for i, length in enumerate(lengths)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    loaded = load(file)
    asyncio.run(_extract(loaded))
    _age(loaded.state_dir / FILE_NAME, lengths)
    return file


async def _extract(loaded: LoadedConfig) -> None:
    job = prepare(loaded, lambda _rows, _tokens: None)
    store, roots = attach_roots(job.store, {root.name: root.path for root in loaded.roots})
    view, ledger, model = UnionView(store), SqliteLedger(job.ledger), ModelLike(0)
    entries = []
    for lease in (await ledger.acquire(SAMPLES))[:COMMITTED]:
        index, tokens = lease.sample.index, lease.sample.tokens
        marker, epoch = Marker(ledger.run, index, 1, tokens), EPOCHS[index >= SPLIT]
        if index in QUARANTINED:
            evidence = "h_3 has 3 NaN values in rows 4 to 6; expected none"
            await ledger.violation(epoch, marker, "finite", evidence)
            await ledger.fail(lease, marker, epoch, "finite", evidence, quarantine=True)
            continue
        receipt = roots[index % 5 % 3].write(payload(marker, model.states(tokens), job.samples.input_ids(index)))
        entries.append(Commit(lease, marker, epoch, index + 1, receipt, {"request": 0.1}, adopted=False))
    for root in roots:
        root.sync()
    await ledger.commit(entries)
    for entry in entries:
        view.link(entry.lease.sample.index, entry.receipt.root)
    await ledger.close()


def _age(ledger: Path, lengths: list[int]) -> None:
    """Makes of moments hours: a server that stalled, seven minutes without one, and another that goes on."""
    rng, restart = random.Random(4), BEGAN + 4.2 * HOUR
    evidence = "no dump for 97 s with 61 requests and 150,112 tokens in flight; expected one within 61 s"
    with closing(sqlite3.connect(ledger)) as db:
        epochs = (
            (EPOCHS[0], BEGAN, restart, "advancing", evidence, "{}", "[168, 169, 170]", SPLIT),
            (EPOCHS[1], restart + 420, None, None, None, "{}", None, COMMITTED),
        )
        columns = "epoch, began, ended, reason, evidence, record, requeued, vouched"
        db.executemany(f"INSERT INTO epochs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", epochs)  # noqa: S608 - constants
        db.execute(
            "INSERT INTO violations (at, epoch, invariant, evidence) VALUES (?, ?, 'advancing', ?)",
            (restart, EPOCHS[0], evidence),
        )
        for first, last, begin, end in (
            (0, SPLIT, BEGAN + 300, restart - 100),
            (SPLIT, COMMITTED, restart + 500, BEGAN + 7 * HOUR),
        ):
            tokens, done = sum(lengths[first:last]), 0
            for index in range(first, last):
                done += lengths[index]
                at = begin + (end - begin) * done / tokens + rng.uniform(0, 40)
                db.execute("UPDATE samples SET committed_at = ? WHERE idx = ? AND state = 'committed'", (at, index))
        db.commit()
