"""What durability costs: samples a second, committed one by one, in groups, and with `storage.durability = "relaxed"`.

Writer, roots, view and ledger are the real ones, on a real disk; the three ways take turns. Writes build/bench/commit.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

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
from hsx.testing.stores import payload, random_states
from hsx.writer import Writer, WriterSettings

ROOT: Final = Path(__file__).parent.parent
WAYS: Final[dict[str, dict[str, Any]]] = {
    "one by one": {"group_samples": 1, "durable": True},
    "groups": {"group_samples": 64, "durable": True},
    "groups, relaxed": {"group_samples": 64, "durable": False},
}
STATES, HIDDEN = 4, 256
AT_ONCE: Final = 64


async def measure(folder: Path, samples: int, tokens: int, group_samples: int, durable: bool) -> dict[str, float]:
    """Writes and commits `samples` samples; seconds, with the last sync where it is relaxed, and the processor's seconds."""
    run = new_run()
    layout = StoreLayout(samples, tokens, STATES, HIDDEN)
    for name in ("a", "b"):
        (folder / name).mkdir(parents=True)
    store = create_store(folder / "store", layout, CaptureSpec((1, 2, 3), "post_norm"), {}, run)
    info, roots = attach_roots(store, {name: folder / name for name in ("a", "b")}, durable=durable)
    create(folder / "ledger.sqlite", run, {}, [tokens] * samples, [])
    with TokenTableWriter(folder / "store") as table:
        for index in range(samples):
            table.add(Row(f"s{index}", np.arange(tokens, dtype=np.int32), np.ones(tokens, np.uint8), index + 1))
        table.finish({}, {})
    ledger, telemetry, clock = SqliteLedger(folder / "ledger.sqlite"), Telemetry(), SystemClock()
    telemetry.log.info = lambda *_args, **_fields: None  # type: ignore[method-assign] # the log is not what is measured
    space = Space(roots, RootsSettings(disks={"a": 0, "b": 0}), clock, telemetry)
    settings = WriterSettings(threads=2, group_samples=group_samples, group_seconds=0.25)
    writer = Writer(roots, space, UnionView(info), ledger, TokenTable(folder / "store"), telemetry, clock, settings)
    states = random_states(np.random.default_rng(1), tokens, STATES, HIDDEN)
    leases = await ledger.acquire(samples)
    committing = asyncio.create_task(writer.run())
    began, cpu = time.perf_counter(), time.process_time()

    async def worker() -> None:
        while leases:
            lease = leases.pop()
            marker = Marker(run, lease.sample.index, lease.attempt, tokens)
            receipt = await writer.write(payload(marker, states), await space.book(layout.file_bytes(tokens)))
            if receipt is None or not await writer.commit(Commit(lease, marker, "e", 1, receipt, {}, adopted=False)):
                raise RuntimeError("a root failed")

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    if not durable:
        for root in roots:
            root.flush()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    await writer.close()
    await committing
    writer.shutdown()
    space.shutdown()
    await ledger.close()
    return {"seconds": seconds, "cpu_s": cpu}


def main() -> int:
    """Measures all ways in turn, and prints and writes the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "build", help="a folder on the disk to be measured")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    report: dict[str, Any] = {"samples": args.samples, "rounds": args.rounds, "sizes": {}}
    for tokens in (64, 512):
        size = tokens * STATES * HIDDEN * 2
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, options in WAYS.items():
                with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                    found[way].append(asyncio.run(measure(Path(folder), args.samples, tokens, **options)))
        for way, rounds in found.items():
            median = statistics.median(one["seconds"] for one in rounds)
            row = {
                "ms_per_100": 1e5 * median / args.samples,
                "samples_per_s": args.samples / median,
                "cpu_ms_per_sample": 1e3 * statistics.median(one["cpu_s"] for one in rounds) / args.samples,
            }
            report["sizes"].setdefault(str(size), {})[way] = {key: round(value, 2) for key, value in row.items()}
            sys.stdout.write(f"{size:>9} bytes  {way:<16} " + "  ".join(f"{k} {v:.2f}" for k, v in row.items()) + "\n")
    target = ROOT / "build" / "bench" / "commit.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
