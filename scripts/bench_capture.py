"""What capture costs the server: prefill tokens/s with the plugin and its dumps consumed, over a bare server. On a CPU.

    python scripts/bench_capture.py [--lengths 100,500,2000] [--tokens 16000] [--pairs 3] [--rounds 4] [--concurrency 8]
                                    [--chunk 2048] [--model FOLDER] [--python INTERPRETER] [--out FILE]

Two real servers of the same model run side by side, one bare, one with the plugin; an idle one sleeps. For each prompt length
they take turns, in an order drawn anew for each round: the same prompts, as many at once; what counts is the time from the
first request to the last answer. The dumps go to /dev/shm and are consumed meanwhile by a process of hsx's own: told of by
inotify, each is mapped, judged by every content invariant, written to a shard, synced, and unlinked, as in a run. All this is
done again with `--pairs` pairs of servers: where a process happens to lie in memory makes it a few per cent faster or slower
for its whole life, and no number of rounds would tell.

For each length: `x_bare_prefill`, the median of all rounds' ratios of tokens/s (goal: at least 0.95), the smallest and the
largest of them, and `by_pair`, the median of each pair's; `us_per_forward`, what the plugin itself spent in the forward path,
from its state file, and `blocked_us`, what it waited for the pool; `late_ms`, the longest time from the last answer of a turn
to its last dump. For all: `us_per_chunk`, the largest of those in the lines that the plugin leaves in the servers' logs
(`capture.closed`, which are printed). The state file is up to 100 ms behind, and `late_ms` with it.

Trust the ratios, on a machine with nothing else to do. The tiny model is the harder test: its forward takes a millisecond.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from asyncinotify import Inotify, Mask

from hsx.core.dump import SUFFIX
from hsx.core.invariants import Evidence, judge_dump
from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker, parse
from hsx.core.spec import CaptureSpec
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.records import Payload, Row
from hsx.stores.attach import attach_roots
from hsx.stores.group import create_store
from hsx.stores.token_writer import TokenTableWriter
from hsx.testing import tiny_models
from hsx.testing.capture_server import CaptureServer
from hsx.testing.sglang_job import interpreter

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hsx.core.epoch import CaptureState

ROOT: Final = Path(__file__).parents[1]
RUN: Final = "be4c4000"
SPEC: Final = CaptureSpec((2, 4, 6), "post_norm")
GOAL: Final = 0.95
STOP_S: Final = 60.0


class Bare(CaptureServer):
    """The same server without `hsx serve`, hence without capture."""

    def command(self) -> list[str]:
        """The server's own command line."""
        self.dumps.mkdir(parents=True)
        own = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        return [str(self.python), "-m", "sglang.launch_server", *own, *self.base, *self.arguments]


async def consume(folder: Path, target: Path, samples: int, longest: int, width: int) -> None:
    """Consumes dumps until it is ended: what a run does with each, its ledger aside."""
    layout = StoreLayout(samples, longest, SPEC.states, width)
    with TokenTableWriter(target / "store") as table:
        for index in range(samples):
            table.add(Row(f"s{index}", np.zeros(1, np.int32), np.ones(1, np.uint8), index + 1))
        table.finish({"sha256": "none"}, {})
    (target / "root").mkdir()
    _, (root,) = attach_roots(create_store(target / "store", layout, SPEC, {}), {"bench": target / "root"})
    with Inotify() as changes:
        changes.add_watch(folder, Mask.MOVED_TO)
        while True:
            names = [name for name in os.listdir(folder) if name.endswith(SUFFIX)]  # noqa: PTH208 - names alone
            for name in names:
                marker = parse(name.removesuffix(SUFFIX))
                if marker is None:
                    continue
                dump = MappedDump(folder / name)
                content = measure(dump.states, dump.input_ids, dump.input_ids)
                header = dump.header
                violation = judge_dump(Evidence(marker, header.epoch, SPEC, width, header, content))
                if violation is not None:
                    raise RuntimeError(f"{marker}: {violation}")
                ids = np.array(dump.input_ids)
                payload = Payload(marker, header.epoch, header.sequence, ids, dump.states, content.crcs, dump.source)
                root.write(payload)
                dump.close()
                (folder / name).unlink()
            if not names:
                await changes.get()


def prompts(length: int, tokens: int, first: int, vocabulary: int) -> dict[str, NDArray[np.int32]]:
    """As many prompts of one length as `tokens` make, at least two, each under a marker of its own."""
    rng = np.random.default_rng(first)
    count = max(2, round(tokens / length))
    markers = [Marker(RUN, first + number, 1, length) for number in range(count)]
    return {str(marker): rng.integers(5, vocabulary, length).astype(np.int32) for marker in markers}


async def turn(server: CaptureServer, batch: dict[str, NDArray[np.int32]], concurrency: int) -> float:
    """Seconds that the server takes for the prompts, so many at once."""
    limit = asyncio.Semaphore(concurrency)

    async def one(rid: str) -> None:
        async with limit:
            await server.generate({rid: batch[rid]}, settle=False)

    began = time.perf_counter()
    await asyncio.gather(*(one(rid) for rid in batch))
    return time.perf_counter() - began


def wait_for(server: CaptureServer, published: int, consumer: subprocess.Popen[bytes]) -> float:
    """Seconds until the plugin has published so many dumps; returns once the last of them is consumed."""
    began = time.perf_counter()
    published_at = 0.0
    while True:
        state = the_state(server)
        if state.failed or state.incomplete:
            raise RuntimeError(f"capture failed: {state}\n{server.log_tail()}")
        if state.published >= published:
            published_at = published_at or time.perf_counter() - began
            if not list(server.dumps.glob(f"*{SUFFIX}")):
                return published_at
        if consumer.poll() is not None:
            raise RuntimeError(f"the consumer ended with {consumer.returncode}")
        time.sleep(0.002)


def the_state(server: CaptureServer) -> CaptureState:
    """The plugin's account."""
    (state,) = server.states()
    return state


@dataclass
class Taken:
    """What was measured at one length, over all pairs of servers."""

    ratios: list[list[float]] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    late_s: float = 0.0
    forward_us: int = 0
    forwards: int = 0
    blocked_us: int = 0
    peak_bytes: int = 0

    def row(self) -> dict[str, Any]:
        """As it is reported."""
        ratios = [ratio for pair in self.ratios for ratio in pair]
        return {
            "x_bare_prefill": round(statistics.median(ratios), 3),
            "smallest": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
            "by_pair": [round(statistics.median(pair), 3) for pair in self.ratios],
            "bare_tokens_per_s": round(statistics.median(self.speeds)),
            "us_per_forward": round(self.forward_us / max(1, self.forwards), 1),
            "forwards": self.forwards,
            "blocked_us": self.blocked_us,
            "peak_staged_bytes": self.peak_bytes,
            "late_ms": round(1e3 * self.late_s, 1),
        }


def bench(args: argparse.Namespace, folder: Path, shared: Path) -> dict[str, Any]:
    """All pairs, all lengths, all rounds."""
    model = args.model or tiny_models.make("llama", folder / "model")
    report: dict[str, Any] = {"model": model.name, "concurrency": args.concurrency, "chunk": args.chunk}
    report |= {"pairs": args.pairs, "rounds": args.rounds, "closed": []}
    taken = {length: Taken() for length in args.lengths}
    for number in range(args.pairs):
        for part in (folder / str(number), shared / str(number)):
            part.mkdir()
        report["closed"].append(one_pair(args, model, folder / str(number), shared / str(number), taken))
    report["lengths"] = {str(length): found.row() for length, found in taken.items()}
    for length, row in report["lengths"].items():
        sys.stdout.write(f"{length:>6} tokens  " + "  ".join(f"{key} {value}" for key, value in row.items()) + "\n")
    figures = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in report["closed"] if line]
    report["us_per_chunk"] = max((float(found["us_per_chunk"]) for found in figures), default=None)
    return report


def one_pair(args: argparse.Namespace, model: Path, folder: Path, shared: Path, taken: dict[int, Taken]) -> str:
    """Two servers, all lengths, all rounds; returns the line that ours leaves at its end."""
    config = json.loads((model / "config.json").read_text())
    arguments = ["--chunked-prefill-size", str(args.chunk), "--max-total-tokens", "65536", "--dtype", args.dtype]
    python = args.python or interpreter()
    bare = Bare(python, folder / "bare", model, SPEC.layers, arguments=arguments)
    ours = CaptureServer(
        python, folder / "ours", model, SPEC.layers, arguments=arguments, variables={"HSX_CAPTURE_FLOAT32": ""}
    )
    (folder / "ours").mkdir()
    (folder / "ours" / "dumps").symlink_to(shared)
    samples = sum(len(prompts(length, args.tokens, 0, 100)) for length in args.lengths) * (args.rounds + 1)
    (folder / "consumed").mkdir()
    command = [sys.executable, __file__, "--consume", *map(str, (ours.dumps, folder / "consumed", samples, max(args.lengths)))]
    consumer = subprocess.Popen([*command, str(config["hidden_size"])])
    first = 0
    try:
        with bare, ours:
            for length, found in taken.items():
                found.ratios.append([])
                before = the_state(ours)
                for number in range(args.rounds + 1):
                    batch = prompts(length, args.tokens, first, config["vocab_size"])
                    first += len(batch)
                    seconds: dict[str, float] = {}
                    for server in random.sample([bare, ours], 2):
                        seconds[server.folder.name] = asyncio.run(turn(server, batch, args.concurrency))
                        if server is ours:
                            found.late_s = max(found.late_s, wait_for(ours, first, consumer))
                    if number:  # the first round warms up
                        found.ratios[-1].append(seconds["bare"] / seconds["ours"])
                        found.speeds.append(length * len(batch) / seconds["bare"])
                    else:
                        before = the_state(ours)
                after = the_state(ours)
                found.forward_us += after.forward_us - before.forward_us
                found.forwards += after.forwards - before.forwards
                found.blocked_us += after.blocked_us - before.blocked_us
                found.peak_bytes = max(found.peak_bytes, after.staged_peak_bytes)
            closed = closing_line(ours)
    finally:
        consumer.kill()
        consumer.wait()
    sys.stdout.write(f"server log at its end: {closed or 'nothing: it was killed'}\n")
    sys.stdout.flush()
    return closed


def closing_line(server: CaptureServer) -> str:
    """Ends the server as an operator does, and returns what the plugin says in its log then; "" where it says nothing."""
    record = json.loads((server.dumps / "server.json").read_text())
    os.kill(record["pid"], signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        lines = [line for line in server.log.read_text(errors="replace").splitlines() if "capture.closed" in line]
        if lines:
            return lines[-1][lines[-1].index("capture.closed") :]
        time.sleep(0.2)
    return ""


def main() -> int:
    """Writes the report; 1 where a ratio misses the goal."""
    if sys.argv[1:2] == ["--consume"]:
        folder, target, samples, longest, width = sys.argv[2:]
        while not Path(folder).exists():
            time.sleep(0.1)
        asyncio.run(consume(Path(folder), Path(target), int(samples), int(longest), int(width)))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[100, 500, 2000])
    parser.add_argument("--tokens", type=int, default=16000, help="tokens of a server's turn")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of servers, one after the other")
    parser.add_argument("--rounds", type=int, default=4, help="with each pair, without the one that warms up")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", type=Path, help="a model of at least 7 layers; default: the tiny Llama of the tests")
    parser.add_argument("--python", type=Path, help="interpreter of the SGLang environment")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "capture.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hsx-bench-") as shared:
        report = bench(args, Path(folder), Path(shared))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    missed = [length for length, row in report["lengths"].items() if row["x_bare_prefill"] < GOAL]
    sys.stdout.write(
        f"{args.out}: " + (f"below {GOAL} at {', '.join(missed)} tokens\n" if missed else f"at least {GOAL} everywhere\n")
    )
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
