"""Many tiny samples: what each part costs per sample, at growing numbers of them. Writes build/bench/scale.json.

    python scripts/bench_scale.py [--samples 1000,10000,100000] [--folder FOLDER] [--out FILE]

For each number a store of one-token samples over two roots is written as a run does (placement, shard, ledger in groups,
link) but for waiting for the disk, then opened, read, listed, repaired and verified, in a process of its own. A part whose
time per sample does not grow with their number is linear; opening should not depend on it at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hsx
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.placement import RootSpace, Shares
from hsx.core.spec import CaptureSpec
from hsx.records import Commit, Payload, Row
from hsx.stores.attach import attach_roots
from hsx.stores.group import create_store
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.root import discard_strays
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.view import UnionView
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator

EPOCH = "00000000-0000-4000-8000-000000000001"
RUN = "deadbeef"
SPEC = CaptureSpec((1,), "post_norm")
WIDTH = 8
GROUP = 100
READS = 1000
SINGLE = ("open_s", "open_and_read_one_s")
"""Steps that are taken once, and not for each sample."""


class Clock:
    """Seconds of each step by name: by the clock, and of the processor, which others on the machine do not add to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Adds the time that its body takes to `name`."""
        start, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.cpu[name] = self.cpu.get(name, 0.0) + time.process_time() - cpu


async def write(folder: Path, samples: int, clock: Clock) -> None:
    """Writes the store and its ledger."""
    states = np.random.default_rng(0).integers(1, 0x7F00, (1, SPEC.states, WIDTH), np.uint16)
    ids = np.zeros(1, np.int32)
    with clock.step("index_s"), TokenTableWriter(folder / "store") as table:
        for index in range(samples):
            table.add(Row(sample_id=f"sample-{index}", input_ids=ids, loss_mask=np.ones(1, np.uint8), line=index + 1))
        table.finish({"sha256": "none"}, {})
    info = create_store(folder / "store", StoreLayout(samples, 1, SPEC.states, WIDTH), SPEC, {"name": "scale"}, RUN)
    places = {name: folder / name for name in ("a", "b")}
    for place in places.values():
        place.mkdir()
    info, roots = attach_roots(info, places, durable=False)
    by_name = {root.name: root for root in roots}
    with clock.step("ledger_create_s"):
        create(folder / "ledger.sqlite", RUN, {}, (1 for _ in range(samples)), [])
    ledger = SqliteLedger(folder / "ledger.sqlite")
    view = UnionView(info)
    shares = Shares()
    for _ in range(0, samples, GROUP):
        with clock.step("ledger_acquire_s"):
            leases = await ledger.acquire(GROUP)
        group = []
        for lease in leases:
            index = lease.sample.index
            with clock.step("placement_s"):
                name = shares.choose(
                    [RootSpace(root, 1 << 40, 1 << 30, 0, speed=1e9) for root in places], info.layout.file_bytes(1)
                )
            assert name is not None
            marker = Marker(RUN, index, lease.attempt, 1)
            with clock.step("shard_s"):
                receipt = by_name[name].write(Payload(marker, EPOCH, index + 1, ids, states))
            group.append(Commit(lease, marker, EPOCH, index + 1, receipt, {"request": 1.0}, adopted=False))
        with clock.step("ledger_commit_s"):
            await ledger.commit(group)
        with clock.step("link_s"):
            for commit in group:
                view.link(commit.lease.sample.index, commit.receipt.root)
    with clock.step("view_repair_s"):
        view.repair(ledger.committed_roots())
    with clock.step("strays_s"):
        discard_strays(roots, ledger.committed_roots(), samples)
    await ledger.close()


def read(folder: Path, samples: int, clock: Clock) -> None:
    """Opens the store and reads of it."""
    with clock.step("open_s"):
        store = hsx.open(folder / "store")
    with clock.step("open_and_read_one_s"):
        assert hsx.open(folder / "store")[samples // 2].tokens == 1
    with clock.step("committed_s"):
        assert len(store.committed) == samples
    with clock.step("find_by_id_s"):
        assert store.index(f"sample-{samples - 1}") == samples - 1
    with clock.step("read_s"):
        for index in np.random.default_rng(1).integers(0, samples, READS).tolist():
            assert store.sample(index).tokens == 1
    clock.seconds["read_s"] *= samples / READS
    clock.cpu["read_s"] *= samples / READS
    with clock.step("verify_s"), LedgerReader(folder / "ledger.sqlite") as ledger:
        report = verify(folder / "store", ledger)
    assert report.ok, report.damage[:3]
    assert report.read == samples


def measure(folder: Path, samples: int) -> dict[str, Any]:
    """All steps for one number of samples: seconds, microseconds of the processor a sample, and the process's peak memory."""
    clock = Clock()
    asyncio.run(write(folder, samples, clock))
    read(folder, samples, clock)
    return {
        "samples": samples,
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "seconds": {name: round(seconds, 4) for name, seconds in clock.seconds.items()},
        "cpu_us_per_sample": {
            name.removesuffix("_s"): round(seconds / samples * 1e6, 2)
            for name, seconds in clock.cpu.items()
            if name not in SINGLE
        },
    }


def main() -> None:
    """Measures each number in a process of its own, prints a table and writes the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--samples", default="1000,10000,100000", help="numbers of samples")
    parser.add_argument("--folder", type=Path, help="where stores are made, 12 KB a sample; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=Path("build/bench/scale.json"))
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args.folder, args.one)))  # noqa: T201 - the parent reads it
        return
    results = []
    for samples in map(int, args.samples.split(",")):
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            command = [sys.executable, __file__, "--one", str(samples), "--folder", folder]
            results.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"results": results}, indent=2) + "\n")
    columns = [f"{result['samples']:>12,}" for result in results]
    lines = [f"{'CPU us a sample':20}" + "".join(columns)]
    lines += [
        f"{name:20}" + "".join(f"{result['cpu_us_per_sample'][name]:>12.2f}" for result in results)
        for name in results[0]["cpu_us_per_sample"]
    ]
    lines += [
        f"{name.removesuffix('_s') + ', ms':20}" + "".join(f"{result['seconds'][name] * 1e3:>12.2f}" for result in results)
        for name in SINGLE
    ]
    lines.append(f"{'peak memory, MB':20}" + "".join(f"{result['peak_rss_mb']:>12.1f}" for result in results))
    print("\n".join(lines))  # noqa: T201 - a table for people


if __name__ == "__main__":
    main()
