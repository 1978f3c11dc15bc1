"""What durability costs: commits one by one, in groups, and relaxed; with their renames, syncs and ledger transactions.

    python scripts/bench_commits.py [--samples 192] [--tokens 64] [--rounds 3] [--target FOLDER] [--out FILE]

Writes small samples, where the syncs are what counts, on two roots of one disk, with two writer threads each, and commits them
as a run does: shards, an fsync of the folder of each root that has some of the group, one transaction. `ms_per_100` is the time
of a hundred commits, `x_single` how many times faster that is than one by one in the same round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.ports import Commit
from hsx.stores.group import create_store
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_create import create
from hsx.stores.root import attach_roots
from hsx.testing.stores import EPOCH, RUN, payload, random_states

if TYPE_CHECKING:
    from hsx.core.sample import Lease
    from hsx.stores.root import ShardRoot

SPEC: Final = CaptureSpec((1,), "post_norm")
WIDTH: Final = 512
GROUPS: Final = {"one by one": 1, "groups of 16": 16, "groups of 64": 64, "relaxed, groups of 64": 64}


def make_roots(folder: Path, samples: int, tokens: int, *, durable: bool) -> list[ShardRoot]:
    """A job's store with two roots, and its ledger, in a new folder."""
    folder.mkdir()
    layout = StoreLayout(samples, tokens, SPEC.states, WIDTH)
    for root in ("a", "b"):
        (folder / root).mkdir()
    places = {root: folder / root for root in ("a", "b")}
    _, roots = attach_roots(create_store(folder / "store", layout, SPEC, {}, RUN), places, durable=durable)
    create(folder / "ledger.sqlite", RUN, {}, [tokens] * samples, [])
    return roots


async def commit_all(folder: Path, name: str, samples: int, tokens: int) -> float:
    """Writes and commits all samples; returns the seconds that took."""
    roots = make_roots(folder, samples, tokens, durable=not name.startswith("relaxed"))
    ledger = SqliteLedger(folder / "ledger.sqlite")
    leases = await ledger.acquire(samples)
    states = random_states(np.random.default_rng(0), tokens, SPEC.states, WIDTH)
    loop = asyncio.get_running_loop()

    def write(lease: Lease, root: ShardRoot) -> Commit:
        marker = Marker(RUN, lease.sample.index, lease.attempt, tokens)
        receipt = root.write(payload(marker, states))
        return Commit(lease, marker, EPOCH, lease.sample.index + 1, receipt, {}, adopted=False)

    os.sync()
    start = time.perf_counter()
    with ThreadPoolExecutor(2 * len(roots)) as pool:
        for at in range(0, samples, GROUPS[name]):
            group = leases[at : at + GROUPS[name]]
            writes = [loop.run_in_executor(pool, write, lease, roots[lease.sample.index % len(roots)]) for lease in group]
            entries = await asyncio.gather(*writes)
            used = {entry.receipt.root for entry in entries}
            await asyncio.gather(*(loop.run_in_executor(pool, root.sync) for root in roots if root.name in used))
            await ledger.commit(entries)
    seconds = time.perf_counter() - start
    await ledger.close()
    return seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="what durability costs")
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("build/bench/commits.json"))
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, list[float]] = {name: [] for name in GROUPS}
    for number in range(args.rounds):
        names = list(GROUPS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.target) as folder:
                seconds[name].append(asyncio.run(commit_all(Path(folder, "job"), name, args.samples, args.tokens)))
    single = seconds["one by one"]
    result = {
        name: {
            "ms_per_100": round(100_000 * statistics.median(spent) / args.samples, 1),
            "x_single": round(statistics.median(a / b for a, b in zip(single, spent, strict=True)), 2),
        }
        for name, spent in seconds.items()
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    lines = [f"{'commits':<26}{'ms_per_100':>12}{'x_single':>12}"]
    lines += [f"{name:<26}{way['ms_per_100']:>12}{way['x_single']:>12}" for name, way in result.items()]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
