"""Dump to durable shard, against `cp` plus fsync of the same bytes.

    python scripts/bench_store.py [--dumps 6] [--tokens 1536] [--rounds 3] [--target FOLDER] [--staging FOLDER] [--out FILE]

Makes dumps in the staging folder (a tmpfs), then takes turns in each round: `cp` of every dump with an fsync of each copy;
the shard writer alone; and the shard writer with every invariant judged, as in a run. Prints and records, per way of
writing, its throughput as a ratio to cp in the same round and its CPU seconds per GB (medians of the rounds). The machine's
own speed drops out of the ratio; MB/s are given for orientation. Goals: ratio at least 0.9 and at most 0.5 CPU s/GB, with
the invariants.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.dump import DumpHeader, encode_header
from hsx.core.invariants import Evidence, judge_dump
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.ports import Payload
from hsx.stores.group import create_store
from hsx.stores.root import attach_roots
from hsx.testing.stores import random_states

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.stores.root import ShardRoot

SPEC = CaptureSpec((4, 32, 60), "post_norm")
HIDDEN_SIZE = 7168
EPOCH = "00000000-0000-4000-8000-000000000001"


@dataclass(frozen=True, slots=True)
class Spent:
    """What one way of writing took for all dumps."""

    seconds: float
    cpu_seconds: float


def make_dumps(folder: Path, count: int, tokens: int) -> list[Path]:
    """Writes dumps of the reference job's shape. One block of random states is repeated with a twist, to be quick."""
    rng = np.random.default_rng(0)
    block = random_states(rng, 64, SPEC.states, HIDDEN_SIZE)
    paths = []
    for index in range(count):
        marker = Marker("deadbeef", index, 1, tokens)
        header = DumpHeader(marker, EPOCH, index + 1, SPEC, HIDDEN_SIZE, "bench", "bench")
        path = folder / f"{marker}.safetensors"
        with path.open("wb") as file:
            file.write(encode_header(header))
            for start in range(0, tokens, 64):
                file.write((block[: tokens - start] ^ np.uint16((start // 64 + index) & 0xF)).data)
            file.write(np.arange(tokens, dtype=np.int32).data)
        paths.append(path)
    return paths


def copy(dumps: list[Path], target: Path) -> None:
    """`cp` and fsync of each dump, and an fsync of the folder."""
    for path in dumps:
        subprocess.run(["cp", path, target / path.name], check=True)  # noqa: S607 - whatever cp the user has is the measure
        sync(target / path.name)
    sync(target)


def sync(path: Path) -> None:
    """fsync by name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def store(dumps: list[Path], root: ShardRoot, threads: int, *, judged: bool) -> None:
    """Writes a durable shard of each dump, as the writer of a run does."""

    def one(path: Path) -> None:
        dump = MappedDump(path)
        marker = dump.header.marker
        content = None
        if judged:
            content = measure(dump.states, dump.input_ids, np.arange(marker.tokens, dtype=np.int32))
            evidence = Evidence(
                marker=marker, epoch=EPOCH, spec=SPEC, hidden_size=HIDDEN_SIZE, dump=dump.header, content=content
            )
            violation = judge_dump(evidence)
            assert violation is None, violation
        crcs = content.crcs if content else ()
        root.write(Payload(marker, EPOCH, dump.header.sequence, dump.input_ids, dump.states, crcs, dump.source))
        dump.close()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, dumps))
    root.sync()


def timed(work: Callable[[], None]) -> Spent:
    """Wall and CPU seconds of `work`, child processes included. What the disk still owes from before is paid first."""
    os.sync()
    before, start = cpu(), time.perf_counter()
    work()
    return Spent(time.perf_counter() - start, cpu() - before)


def cpu() -> float:
    """User and system seconds of this process and its finished children."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def bench(args: argparse.Namespace, staging: Path, target: Path) -> dict[str, object]:
    """Runs all rounds; the record that is printed and kept."""
    dumps = make_dumps(staging, args.dumps, args.tokens)
    nbytes = sum(path.stat().st_size for path in dumps)
    (target / "root").mkdir()
    layout = StoreLayout(args.dumps, args.tokens, SPEC.states, HIDDEN_SIZE)
    _, (root,) = attach_roots(create_store(target / "store", layout, SPEC, {}), {"bench": target / "root"})
    ways: dict[str, Callable[[], None]] = {
        "cp": lambda: copy(dumps, target / "copies"),
        "shards": lambda: store(dumps, root, args.threads, judged=False),
        "shards_judged": lambda: store(dumps, root, args.threads, judged=True),
    }
    rounds: list[dict[str, Spent]] = []
    for number in range(args.rounds + 1):  # the first one warms up
        spent: dict[str, Spent] = {}
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:  # each comes first in turn
            (target / "copies").mkdir()
            spent[name] = timed(ways[name])
            shutil.rmtree(target / "copies")
            for shard in root.folder.glob("c.*"):
                shard.unlink()
        rounds.append(spent)
    rounds = rounds[1:]
    gigabytes = nbytes / 1e9
    result: dict[str, object] = {"bytes": nbytes, "dumps": args.dumps, "threads": args.threads, "o_direct": root.direct}
    for name in ways:
        result[name] = {
            "ratio_to_cp": round(statistics.median(r["cp"].seconds / r[name].seconds for r in rounds), 3),
            "cpu_s_per_gb": round(statistics.median(r[name].cpu_seconds / gigabytes for r in rounds), 3),
            "mb_per_s": round(statistics.median(nbytes / 1e6 / r[name].seconds for r in rounds), 1),
            "ratios": [round(r["cp"].seconds / r[name].seconds, 3) for r in rounds],
        }
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="dump to durable shard against cp plus fsync")
    parser.add_argument("--dumps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="writer threads of the root")
    parser.add_argument("--staging", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")  # noqa: S108 - meant
    parser.add_argument("--target", type=Path, default=Path("build/bench"), help="a folder on the disk to be measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench/store.json"))
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.staging) as staging,
        tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.target) as target,
    ):
        result = bench(args, Path(staging), Path(target))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
