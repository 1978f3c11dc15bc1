"""Starts servers as processes for the length of a test: the reference engine, or any other command."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from hsx.core.epoch import RECORD_NAME, REPORT_NAME, EpochRecord, record_from_json
from hsx.engines.process import descendants
from hsx.engines.sglang import Limits, SGLangClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
    from pathlib import Path

    from hsx.core.spec import FinalState

START_TIMEOUT_S: Final = 180.0
_FIRST_PORT: Final = 10000
_PORTS: Final = 700
_WORKER: Final = int("0" + os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")) % 16
_ROUND: Final = itertools.count(random.SystemRandom().randrange(_PORTS))
"""Starts anywhere, because another test run may be under way on the machine."""
TINY: Final = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 500, "max_position_embeddings": 1024}
"""The smallest model worth having: four layers, 500 ids (padded to 512), prompts of up to 1017 tokens."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free, and that nobody else will take before its server does.

    It lies below the ports that the kernel gives to whoever does not care (32768 and up), and each pytest-xdist worker has a
    range of its own, in which it goes round.
    """
    for _ in range(_PORTS):
        port = _FIRST_PORT + _WORKER * _PORTS + next(_ROUND) % _PORTS
        with socket.socket() as opened, contextlib.suppress(OSError):
            opened.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of the {_PORTS} ports of this test process is free")


def tiny_config(folder: Path, **changes: int) -> Path:
    """Makes `folder` a model of random weights for the reference engine: `TINY` with changes, `seed` among them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY, **changes}))
    return folder


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers, with its record.

    Attributes:
        record: its epoch record, as it stands in the dump directory.
        folder: `<dump_dir>/<epoch>`.
        process: the child.
    """

    record: EpochRecord
    folder: Path
    process: subprocess.Popen[bytes]

    def client(self, limits: Limits | None = None) -> SGLangClient:
        """A new client; the caller closes it."""
        return SGLangClient(self.record.host, self.record.port, limits)

    async def fault(self, kind: str, count: int = 1, match: str = "", value: float | None = None) -> None:
        """Arms a fault, see `hsx.testing.faults`. Raises ValueError with the server's words where it refuses."""
        body = {"kind": kind, "count": count, "match": match, "value": value}
        async with aiohttp.ClientSession() as session, session.post(self._faults, json=body) as response:
            if response.status != 200:
                raise ValueError(await response.text())

    async def clear_faults(self, kind: str = "", match: str = "") -> None:
        """Disarms the faults of one kind, or all; with `match`, only those armed for exactly that."""
        params = {"kind": kind, "match": match}
        async with aiohttp.ClientSession() as session, session.delete(self._faults, params=params) as response:
            response.raise_for_status()

    async def struck(self) -> dict[str, int]:
        """How often each fault has struck."""
        async with aiohttp.ClientSession() as session, session.get(self._faults) as response:
            return dict((await response.json())["struck"])

    async def waiting(self) -> int:
        """Prompts that are queued and not begun."""
        async with aiohttp.ClientSession() as session, session.get(self._faults) as response:
            return int((await response.json())["waiting"])

    def kill(self) -> None:
        """SIGKILL; harmless when it is dead. It is reaped on leaving the context."""
        self.process.kill()

    @property
    def _faults(self) -> str:
        return f"http://{self.record.host}:{self.record.port}/_fault"


@asynccontextmanager
async def reference_server(
    dump_dir: Path,
    layers: Sequence[int] = (1, 3),
    final: FinalState = "post_norm",
    *,
    model: Path | None = None,
    port: int | None = None,
    chunk: int = 128,
    args: Sequence[str] = (),
) -> AsyncIterator[RunningServer]:
    """A reference engine of a fresh epoch in `dump_dir`, faults allowed, killed on leaving.

    Args:
        dump_dir: gets the epoch's folder.
        layers: the k of each h_k.
        final: kind of the final state.
        model: model folder; default: `tiny_config` in `<dump_dir>/../tiny-model`.
        port: HTTP port; default: a free one.
        chunk: tokens per step.
        args: further arguments of the engine.

    Raises RuntimeError with the engine's output where it does not come up.
    """
    started = running_reference(dump_dir, layers, final, model=model, port=port, chunk=chunk, args=args)
    server = await asyncio.to_thread(started.__enter__)
    try:
        yield server
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)


@contextmanager
def running_reference(
    dump_dir: Path,
    layers: Sequence[int] = (1, 3),
    final: FinalState = "post_norm",
    *,
    model: Path | None = None,
    port: int | None = None,
    chunk: int = 128,
    args: Sequence[str] = (),
) -> Iterator[RunningServer]:
    """The same outside an event loop. Blocks while the engine comes up."""
    model = model or tiny_config(dump_dir.parent / "tiny-model")
    epoch, port = str(uuid.uuid4()), port or free_port()
    command = [sys.executable, "-m", "hsx.testing.reference_engine", "--model-path", str(model), "--port", str(port)]
    command += ["--dump-dir", str(dump_dir), "--epoch", epoch, "--layers", ",".join(map(str, layers)), "--final", final]
    command += ["--chunked-prefill-size", str(chunk), "--allow-faults", *args]
    with running(command, dump_dir, epoch, port) as server:
        yield server


@contextmanager
def running(
    command: Sequence[str],
    dump_dir: Path,
    epoch: str,
    port: int,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Iterator[RunningServer]:
    """Any server that writes the records of `epoch` below `dump_dir` and listens on `port`. Blocks while it comes up.

    It is killed on leaving, with all its descendants.

    Raises RuntimeError with the end of its output where it does not.
    """
    dump_dir.mkdir(parents=True, exist_ok=True)
    log, folder = dump_dir.parent / f"server-{epoch}.log", dump_dir / epoch
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    try:
        deadline = time.monotonic() + start_timeout_s
        while not ((folder / REPORT_NAME).exists() and _answers(port)):
            if process.poll() is not None or time.monotonic() > deadline:
                how = f"not up after {start_timeout_s:g} s" if process.returncode is None else f"gone ({process.returncode})"
                raise RuntimeError(f"server is {how}: {' '.join(command)}\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)
        yield RunningServer(record_from_json((folder / RECORD_NAME).read_text()), folder, process)
    finally:
        # Taken before the kill: orphans have no way back to the server that left them.
        for pid in (process.pid, *descendants(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/model_info", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
