"""What it costs a run to be watched: the extraction rate beside 200 polls a second, slow readers and half-open connections.

    python scripts/bench_status.py [--pairs 10] [--seconds 6] [--pace 600]

One run on the reference engine, which keeps a pace of its own as a server on a device does. Quiet and watched stretches of time
alternate, so that what else the machine does meets both; the ratio is that of the tokens committed in them. Writes
build/bench/status.json with it, and with how long the answers took.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import aiohttp

from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.servers import free_port, running_reference
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

POLLS_PER_SECOND: Final = 200
SLOW_READERS: Final = 20
HALF_OPEN: Final = 200
LISTENERS: Final = 8
OUT: Final = Path(__file__).parent.parent / "build" / "bench" / "status.json"


class Crowd:
    """Clients of all kinds.

    Args:
        port: of the endpoint.

    Attributes:
        seconds: how long each answer to a poll took.
        failed: polls without an answer.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.seconds: list[float] = []
        self.failed = 0

    async def watch(self, seconds: float) -> None:
        """Does its worst for so long."""
        held = [self._half_open() for _ in range(HALF_OPEN)] + [self._slow() for _ in range(SLOW_READERS)]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{self._port}") as session:
            listeners = [asyncio.create_task(self._listen(session)) for _ in range(LISTENERS)]
            polls = []
            began = time.perf_counter()
            for number in range(int(seconds * POLLS_PER_SECOND)):
                await asyncio.sleep(max(0.0, began + number / POLLS_PER_SECOND - time.perf_counter()))
                polls.append(asyncio.create_task(self._poll(session)))
            await asyncio.gather(*polls)
            for task in listeners:
                task.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)
        for client in held:
            client.close()

    async def _poll(self, session: aiohttp.ClientSession) -> None:
        began = time.perf_counter()
        try:
            async with session.get("/status") as answer:
                await answer.read()
            self.seconds.append(time.perf_counter() - began)
        except aiohttp.ClientError:
            self.failed += 1

    async def _listen(self, session: aiohttp.ClientSession) -> None:
        with suppress(aiohttp.ClientError):
            async with session.get("/events", timeout=aiohttp.ClientTimeout(total=None)) as answer:
                async for _ in answer.content:
                    pass

    def _half_open(self) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self._port))
        client.send(b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-Wait: ")
        return client

    def _slow(self) -> socket.socket:
        """Asks again and again, and reads nothing."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", self._port))
        client.send(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        return client


async def alternate(crowd: Crowd, pairs: int, seconds: float) -> list[tuple[str, float, float]]:
    """Quiet and watched stretches, by turns: (kind, begin, end) in Unix seconds."""
    stretches = []
    for number in range(pairs):
        # Either goes first as often, so that a drift of the machine favours none.
        for kind in ("quiet", "watched") if number % 2 else ("watched", "quiet"):
            begin = time.time()
            await (asyncio.sleep(seconds) if kind == "quiet" else crowd.watch(seconds))
            stretches.append((kind, begin, time.time()))
    return stretches


def rates(job: TinyJob, stretches: list[tuple[str, float, float]]) -> dict[str, list[float]]:
    """Tokens per second of each stretch, from the ledger."""
    found: dict[str, list[float]] = {"quiet": [], "watched": []}
    with sqlite3.connect(job.loaded.state_dir / FILE_NAME) as ledger:
        for kind, begin, end in stretches:
            query = "SELECT ifnull(sum(tokens), 0) FROM samples WHERE committed_at >= ? AND committed_at < ?"
            (tokens,) = ledger.execute(query, (begin, end)).fetchone()
            found[kind].append(tokens / (end - begin))
    return found


def wait_until_running(job: TinyJob, run: subprocess.Popen[bytes], port: int) -> None:
    """Returns once samples are committed at a steady rate."""
    while True:
        if run.poll() is not None:
            raise RuntimeError(f"hsx ended with {run.returncode}; see {job.folder / 'run.log'}")
        with (
            suppress(OSError, sqlite3.Error),
            socket.create_connection(("127.0.0.1", port), timeout=5),
            sqlite3.connect(job.loaded.state_dir / FILE_NAME) as ledger,
        ):
            if ledger.execute("SELECT count(*) FROM samples WHERE state = 'committed'").fetchone()[0] > 50:
                return
        time.sleep(0.2)


def measure(folder: Path, pairs: int, seconds: float, pace: float) -> dict[str, object]:
    """The whole benchmark, in `folder`."""
    port = free_port()
    samples = int(pace * (2 * pairs * (seconds + 1) + 60) / 45)  # more than can be extracted meanwhile
    job = make_job(
        folder,
        samples,
        90,
        status={"port": port},
        pipeline={"concurrency": 16, "commit_seconds": 0.05},
        watchdog={"canary_every": 0},
        log={"samples_per_second": 0.0},
    )
    engine = job.loaded.config.engine
    with (
        running_reference(
            job.loaded.dump_dir, LAYERS, model=job.loaded.model, port=engine.port, chunk=128, args=["--pace", str(pace)]
        ),
        (folder / "run.log").open("wb") as log,
    ):
        run = subprocess.Popen([sys.executable, "-m", "hsx", "run", str(job.loaded.path)], stdout=log, stderr=log)
        try:
            wait_until_running(job, run, port)
            crowd = Crowd(port)
            stretches = asyncio.run(alternate(crowd, pairs, seconds))
            found = rates(job, stretches)
        finally:
            run.send_signal(signal.SIGINT)
            run.wait()
    answers = sorted(crowd.seconds)
    quiet, watched = statistics.fmean(found["quiet"]), statistics.fmean(found["watched"])
    return {
        "ratio": round(watched / quiet, 4),
        "ratio_by_pair": [round(b / a, 4) for a, b in zip(found["quiet"], found["watched"], strict=True)],
        "tokens_per_second": {"quiet": round(quiet, 1), "watched": round(watched, 1)},
        "polls": {
            "answered": len(answers),
            "failed": crowd.failed,
            "per_second": round(len(answers) / (pairs * seconds), 1),
            "ms_p50": round(1e3 * answers[len(answers) // 2], 2),
            "ms_p99": round(1e3 * answers[len(answers) * 99 // 100], 2),
            "ms_longest": round(1e3 * answers[-1], 2),
        },
        "crowd": {"slow_readers": SLOW_READERS, "half_open": HALF_OPEN, "listeners": LISTENERS},
        "machine": {"cpus": os.cpu_count(), "load": [round(value, 2) for value in os.getloadavg()]},
    }


def main() -> int:
    """Measures, prints and writes. Returns 1 where the run lost more than 3 % of its rate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--pace", type=float, default=600.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hsx-bench-", ignore_cleanup_errors=True) as folder:
        result = measure(Path(folder), args.pairs, args.seconds, args.pace)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    ratio = result["ratio"]
    assert isinstance(ratio, float)
    return 0 if ratio >= 0.97 else 1


if __name__ == "__main__":
    sys.exit(main())
