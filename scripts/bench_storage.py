"""Dump to durable shard, and back, against the tools that others use: ratios, measured in one run.

    python scripts/bench_storage.py [--rounds 3] [--sizes 1,8,64,470] [--chunk-tokens 64] [--no-writers] [--target FOLDER]
        [--staging FOLDER]

Makes dumps in the staging folder (a tmpfs), for each size of sample, then lets every writer take its turn in each round, in an
order drawn anew, for whoever comes next is slowed down by what was deleted before (a file system mounted with `discard`); what
the disk still owes is paid before each. All write to the target folder, and end with what they wrote on the disk. The writers:
`cp` with an fsync of each file, the measure of all; hsx's own with 1, 2 and 3 threads, every content gate judged and every
checksum taken, as in a run; and zarr-python, tensorstore and safetensors files.

Recorded for each writer and size, as medians of the rounds: `x_cp`, the throughput as a ratio to cp's in the same round;
`cpu_s_per_gb`, user and system seconds of this process and its children, less the event loop's own; `cpu_x_cp`, the same as a
ratio to cp's, which a busy machine changes less; `peak_rss_mb`, the largest resident size, with the dumps' mapped pages in it;
`loop_lag_p99_ms` and `loop_lag_max_ms`, how late an event loop in the same process was woken that asked for it each millisecond
(`idle_loop_lag_p99_ms`: with nothing else to do). For each reader and size `x_torch_load`: torch.load's time over its own, from
the page cache, as medians of the rounds, whose order is drawn anew, too; `cpu_x_torch_load`, the same of processor time.

Trust the ratios, on a machine with nothing else to do; MB/s are for orientation. Goals: hsx with 2 threads at least 0.9 of cp,
at most 0.5 CPU s/GB, loop lag p99 below 20 ms; reading at least 1.3 times torch.load.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import safetensors.torch
import tensorstore
import torch
import zarr

import hsx
from hsx.core.dump import DumpHeader, encode_header
from hsx.core.invariants import Evidence, judge_dump
from hsx.core.layout import CHUNK_TOKENS, StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.records import Payload, Row
from hsx.stores import bfloat16, metadata
from hsx.stores.attach import attach_roots
from hsx.stores.durable import sync_folder
from hsx.stores.group import create_store
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.view import UnionView
from hsx.testing.stores import random_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hsx.stores.group import StoreInfo
    from hsx.stores.root import ShardRoot

SPEC: Final = CaptureSpec((4, 32, 60), "post_norm")
HIDDEN_SIZE: Final = 7168
TOKEN_BYTES: Final = 4 * HIDDEN_SIZE * 2
EPOCH: Final = "00000000-0000-4000-8000-000000000001"
COUNTS: Final = {1: 96, 8: 24, 64: 6, 470: 3}
"""Dumps of each size in MB; a size that is not here gets about 400 MB of them."""
SLOW_BYTES: Final = 100_000_000
"""What the slow writers get of each size; at least one dump."""
READ_BYTES: Final = 400_000_000
TICK_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Turn:
    """What one writer took for its dumps."""

    nbytes: int
    seconds: float
    cpu_seconds: float
    peak_rss_mb: float
    lags: list[float]

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


@dataclass(slots=True)
class Setting:
    """One size of sample: its dumps, and where they go.

    Attributes:
        dumps: dump files, all of one size.
        tokens: of each.
        target: a folder on the disk to be measured.
        info: a store in it.
        root: its root.
    """

    dumps: list[Path]
    tokens: int
    target: Path
    info: StoreInfo
    root: ShardRoot
    slow: list[Path] = field(default_factory=list)

    @property
    def copies(self) -> Path:
        """Where the writers other than hsx put their files."""
        return self.target / "copies"


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


# --- writers ----------------------------------------------------------------------------------------------------------


def sync(path: Path) -> None:
    """fsync by name."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def cp(setting: Setting) -> None:
    """`cp` and fsync of each dump, and an fsync of the folder."""
    for path in setting.dumps:
        subprocess.run(["cp", path, setting.copies / path.name], check=True)  # noqa: S607 - whatever cp the user has
        sync(setting.copies / path.name)
    sync(setting.copies)


def own(setting: Setting, threads: int) -> None:
    """A durable shard of each dump, every gate judged, as in a run; one fsync of the folder, as in a group's commit."""

    def one(path: Path) -> None:
        dump = MappedDump(path)
        marker = dump.header.marker
        ids = np.arange(marker.tokens, dtype=np.int32)
        content = measure(dump.states, dump.input_ids, ids, layout_of(setting).chunk_tokens)
        violation = judge_dump(Evidence(marker, EPOCH, SPEC, HIDDEN_SIZE, dump.header, content))
        assert violation is None, violation
        setting.root.write(Payload(marker, EPOCH, dump.header.sequence, dump.input_ids, dump.states, content.crcs, dump.source))
        dump.close()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, setting.dumps))
    setting.root.sync()


def layout_of(setting: Setting) -> StoreLayout:
    """The store's layout."""
    return setting.info.layout


def open_zarr(folder: Path, layout: StoreLayout) -> Any:  # noqa: ANN401 - zarr's own types differ between its versions
    """An array of the store's metadata, by zarr-python."""
    assert bfloat16.NAME  # zarr.open_array knows the type once that is imported
    folder.mkdir(exist_ok=True)
    (folder / metadata.METADATA).write_text(json.dumps(metadata.hidden_states(layout, {})))
    return zarr.open_array(folder, mode="r+")


def zarr_python(setting: Setting) -> None:
    """The same shards by zarr-python, with an fsync of each."""
    array = open_zarr(setting.copies / "zarr", layout_of(setting))
    for path in setting.slow:
        dump = MappedDump(path)
        index = dump.header.marker.index
        array[index, : setting.tokens] = dump.states
        sync(setting.copies / "zarr" / f"c.{index}.0.0.0")
        dump.close()
    sync(setting.copies / "zarr")


def open_tensorstore(folder: Path, *, read: bool = False) -> Any:  # noqa: ANN401 - tensorstore has no types
    """An array by tensorstore."""
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
    return tensorstore.open(spec, open=True, read=read, write=not read).result()


def by_tensorstore(setting: Setting) -> None:
    """The same shards by tensorstore, which syncs each."""
    folder = setting.copies / "tensorstore"
    open_zarr(folder, layout_of(setting))
    array = open_tensorstore(folder)
    for path in setting.slow:
        dump = MappedDump(path)
        array[dump.header.marker.index, : setting.tokens].write(dump.states.view(tensorstore.bfloat16.numpy_dtype)).result()
        dump.close()
    sync(folder)


def by_safetensors(setting: Setting) -> None:
    """A safetensors file of each sample, with an fsync of each."""
    for path in setting.slow:
        dump = MappedDump(path)
        tensor = torch.frombuffer(bytearray(dump.states.data), dtype=torch.bfloat16).reshape(dump.states.shape)
        target = setting.copies / path.name
        safetensors.torch.save_file({"hidden_states": tensor}, target)
        sync(target)
        dump.close()
    sync(setting.copies)


WRITERS: Final[dict[str, Callable[[Setting], None]]] = {
    "cp": cp,
    "hsx 1 thread": partial(own, threads=1),
    "hsx 2 threads": partial(own, threads=2),
    "hsx 3 threads": partial(own, threads=3),
    "zarr-python": zarr_python,
    "tensorstore": by_tensorstore,
    "safetensors": by_safetensors,
}
FAST: Final = ("cp", "hsx 1 thread", "hsx 2 threads", "hsx 3 threads")


def turn(name: str, setting: Setting) -> Turn:
    """Lets a writer write, beside an event loop that asks to be woken each millisecond."""
    setting.copies.mkdir()
    gc.collect()
    os.sync()
    dumps = setting.dumps if name in FAST else setting.slow
    nbytes = sum(path.stat().st_size for path in dumps)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start = cpu() - time.thread_time(), time.perf_counter()
    lags, seconds = asyncio.run(watched(partial(WRITERS[name], setting), start))
    spent = Turn(nbytes, seconds, cpu() - time.thread_time() - before, peak_mb(), lags)
    shutil.rmtree(setting.copies)
    for shard in setting.root.folder.glob("c.*"):
        shard.unlink()
    return spent


async def watched(work: Callable[[], None], start: float) -> tuple[list[float], float]:
    """Runs `work` in a thread; returns how late this loop was woken each time, and when the work was done."""
    lags = []
    done = asyncio.ensure_future(asyncio.to_thread(work))
    while not done.done():
        asked = time.perf_counter()
        await asyncio.sleep(TICK_S)
        lags.append(time.perf_counter() - asked - TICK_S)
    await done
    return lags, time.perf_counter() - start


def cpu() -> float:
    """User and system seconds of this process and its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def peak_mb() -> float:
    """The largest resident size since it was forgotten, in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


# --- readers ----------------------------------------------------------------------------------------------------------


def readers(setting: Setting) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Each reader as a function of a sample's index, after its files were written."""
    store = hsx.open(setting.info.path)
    yield "hsx", store.hidden_states
    # What a training loop does that keeps its memory; another store's, or 470 MB of what this one may keep were taken.
    out = hsx.open(setting.info.path).empty((setting.tokens, SPEC.states, HIDDEN_SIZE))
    yield "hsx, same memory", lambda i: store.hidden_states_numpy(i, out=out)
    unchecked = hsx.open(setting.info.path, check=False)
    yield "hsx unchecked", unchecked.hidden_states
    setting.copies.mkdir()
    for path in setting.slow:
        dump = MappedDump(path)
        index = dump.header.marker.index
        tensor = torch.from_numpy(dump.states.copy()).view(torch.bfloat16)
        torch.save({"hidden_states": tensor}, setting.copies / f"{index}.pt")
        safetensors.torch.save_file({"hidden_states": tensor}, setting.copies / f"{index}.safetensors")
        dump.close()
    yield "torch.load", lambda i: torch.load(setting.copies / f"{i}.pt", weights_only=True)["hidden_states"]
    yield "safetensors", lambda i: safetensors.torch.load_file(setting.copies / f"{i}.safetensors")["hidden_states"].clone()
    array = zarr.open_array(setting.info.path / "hidden_states", mode="r")
    yield "zarr-python", lambda i: array[i, : setting.tokens]
    theirs = open_tensorstore(setting.info.path / "hidden_states", read=True)
    yield "tensorstore", lambda i: theirs[i, : setting.tokens].read().result()


def bench_readers(setting: Setting, rounds: int) -> dict[str, dict[str, float]]:
    """Reads what hsx has written, and the same as others keep it, from the page cache."""
    own(setting, 2)
    view = UnionView(setting.info)
    indices = list(range(len(setting.slow)))
    for index in indices:
        view.link(index, setting.root.name)
    ways = dict(readers(setting))
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first one brings the files into the page cache, by hsx's own reader
        for name in random.Random(number).sample(list(ways), len(ways)) if number else ways:
            start, cpu_start = time.perf_counter(), time.process_time()
            for index in indices:
                ways[name](index)
            if number:
                spent[name].append((time.perf_counter() - start, time.process_time() - cpu_start))
    shutil.rmtree(setting.copies)
    return {name: compared(turns, spent["torch.load"], len(indices)) for name, turns in spent.items()}


def compared(turns: list[tuple[float, float]], theirs: list[tuple[float, float]], samples: int) -> dict[str, float]:
    """A reader's turns (wall and processor seconds) against torch.load's of the same rounds."""
    wall, cpu_ratio = (statistics.median(b[i] / a[i] for a, b in zip(turns, theirs, strict=True)) for i in (0, 1))
    ms, cpu_ms = (1000 * statistics.median(turn[i] for turn in turns) / samples for i in (0, 1))
    return {
        "x_torch_load": round(wall, 3),
        "cpu_x_torch_load": round(cpu_ratio, 3),
        "ms": round(ms, 3),
        "cpu_ms": round(cpu_ms, 3),
    }


# --- all of it --------------------------------------------------------------------------------------------------------


def prepare(megabytes: int, staging: Path, target: Path, chunk_tokens: int) -> Setting:
    """Makes the dumps and the store of one size."""
    tokens = min(max(round(megabytes * 1e6 / TOKEN_BYTES), 1), 8192)
    count = COUNTS.get(megabytes, max(round(400 / megabytes), 1))
    dumps = make_dumps(staging, count, tokens)
    (target / "root").mkdir(parents=True)
    with TokenTableWriter(target / "store") as table:
        for index in range(count):
            ids = np.arange(tokens, dtype=np.int32)
            table.add(Row(sample_id=str(index), input_ids=ids, loss_mask=np.ones(tokens, np.uint8), line=index + 1))
        table.finish({"sha256": "none"}, {})
    layout = StoreLayout(count, tokens, SPEC.states, HIDDEN_SIZE, chunk_tokens=chunk_tokens)
    info, (root,) = attach_roots(create_store(target / "store", layout, SPEC, {}), {"bench": target / "root"})
    sync_folder(target)
    slow = dumps[: max(round(SLOW_BYTES / (tokens * TOKEN_BYTES)), 1)]
    return Setting(dumps, tokens, target, info, root, slow)


def bench_size(setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
    """All rounds of all writers."""
    turns: dict[str, list[Turn]] = {name: [] for name in WRITERS}
    for name in WRITERS:  # a warm-up: imports, scratch memory, the disk's own caches
        turn(name, setting)
    for number in range(rounds):
        for name in random.Random(number).sample(list(WRITERS), len(WRITERS)):
            turns[name].append(turn(name, setting))
    result = {}
    for name, spent in turns.items():
        lags = sorted(lag for t in spent for lag in t.lags)
        ratios = [t.rate / c.rate for t, c in zip(spent, turns["cp"], strict=True)]
        costs = [t.cpu_seconds / t.nbytes * c.nbytes / c.cpu_seconds for t, c in zip(spent, turns["cp"], strict=True)]
        result[name] = {
            "x_cp": round(statistics.median(ratios), 3),
            "x_cp_rounds": [round(ratio, 3) for ratio in ratios],
            "cpu_s_per_gb": round(statistics.median(t.cpu_seconds / (t.nbytes / 1e9) for t in spent), 3),
            "cpu_x_cp": round(statistics.median(costs), 3),
            "peak_rss_mb": round(statistics.median(t.peak_rss_mb for t in spent), 1),
            "loop_lag_p99_ms": round(1000 * p99(lags), 2),
            "loop_lag_max_ms": round(1000 * lags[-1], 2),
            "mb_per_s": round(statistics.median(t.rate / 1e6 for t in spent), 1),
        }
    return result


def p99(ordered: list[float]) -> float:
    """The 99th percentile of sorted values."""
    return ordered[int(0.99 * (len(ordered) - 1))]


def table(title: str, results: dict[str, dict[str, dict[str, Any]]], keys: tuple[str, ...]) -> str:
    """One line for each size and way."""
    lines = [f"{title:<28}" + "".join(f"{key:>18}" for key in keys)]
    for size, ways in results.items():
        lines += [f"{size:>4} MB  {name:<20}" + "".join(f"{way[key]:>18}" for key in keys) for name, way in ways.items()]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="dump to durable shard, and back, against other tools")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", default="1,8,64,470", help="MB of a sample, comma-separated")
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS, help="tokens of an inner chunk")
    parser.add_argument("--only", default="", help="writers besides cp, comma-separated; default: all")
    parser.add_argument("--no-readers", action="store_true")
    parser.add_argument("--no-writers", action="store_true")
    parser.add_argument("--staging", type=Path, default=Path("/dev/shm"), help="a folder on a tmpfs")  # noqa: S108 - meant
    parser.add_argument("--target", type=Path, default=Path("build/bench"), help="a folder on the disk to be measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench/storage.json"))
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for name in [n for n in WRITERS if args.only and n != "cp" and n not in args.only.split(",")]:
        del WRITERS[name]
    load = os.getloadavg()[0]
    idle = round(1000 * p99(sorted(asyncio.run(watched(partial(time.sleep, 2.0), time.perf_counter()))[0])), 2)
    writing: dict[str, dict[str, Any]] = {}
    reading: dict[str, dict[str, Any]] = {}
    direct = False
    for megabytes in map(int, args.sizes.split(",")):
        with (
            tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.staging) as staging,
            tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.target) as target,
        ):
            setting = prepare(megabytes, Path(staging), Path(target), args.chunk_tokens)
            direct = setting.root.direct
            if not args.no_writers:
                writing[str(megabytes)] = bench_size(setting, args.rounds)
            if not args.no_readers:
                reading[str(megabytes)] = bench_readers(setting, args.rounds)
    machine = {
        "cores": os.cpu_count(),
        "load_before": load,
        "idle_loop_lag_p99_ms": idle,
        "o_direct": direct,
        "chunk_tokens": args.chunk_tokens,
        "kernel": platform.release(),
    }
    args.out.write_text(json.dumps({"machine": machine, "writers": writing, "readers": reading}, indent=1) + "\n")
    columns = ("x_cp", "cpu_s_per_gb", "cpu_x_cp", "peak_rss_mb", "loop_lag_p99_ms", "loop_lag_max_ms", "mb_per_s")
    sys.stdout.write(f"load {load:.1f}, loop lag p99 when idle {idle} ms, O_DIRECT {'used' if direct else 'not there'}\n\n")
    if writing:
        sys.stdout.write(table("writers", writing, columns) + "\n\n")
    if reading:
        sys.stdout.write(table("readers, warm", reading, ("x_torch_load", "cpu_x_torch_load", "ms", "cpu_ms")) + "\n")


if __name__ == "__main__":
    main()
