"""Starts the reference engine as a process for the length of a test."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp

from hsx.core.epoch import RECORD_NAME, REPORT_NAME, EpochRecord, record_from_json
from hsx.engines.sglang import Limits, SGLangClient

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from hsx.core.spec import FinalState

START_TIMEOUT_S: Final = 60.0
TINY: Final = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 500, "max_position_embeddings": 1024}
"""The smallest model worth having: four layers, 500 ids (padded to 512), prompts of up to 1017 tokens."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


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
    process: asyncio.subprocess.Process

    def client(self, limits: Limits | None = None) -> SGLangClient:
        """A new client; the caller closes it."""
        return SGLangClient(self.record.host, self.record.port, limits)

    async def fault(self, kind: str, count: int = 1, match: str = "", value: float | None = None) -> None:
        """Arms a fault, see `hsx.testing.faults`. Raises ValueError with the server's words where it refuses."""
        body = {"kind": kind, "count": count, "match": match, "value": value}
        async with aiohttp.ClientSession() as session, session.post(self._faults, json=body) as response:
            if response.status != 200:
                raise ValueError(await response.text())

    async def clear_faults(self) -> None:
        """Disarms all faults."""
        async with aiohttp.ClientSession() as session, session.delete(self._faults) as response:
            response.raise_for_status()

    async def struck(self) -> dict[str, int]:
        """How often each fault has struck."""
        async with aiohttp.ClientSession() as session, session.get(self._faults) as response:
            return dict((await response.json())["struck"])

    def kill(self) -> None:
        """SIGKILL; harmless when it is dead."""
        if self.process.returncode is None:
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
    """A reference engine of a fresh epoch in `dump_dir`, faults allowed, ended on leaving.

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
    model = model or tiny_config(dump_dir.parent / "tiny-model")
    epoch, port = str(uuid.uuid4()), port or free_port()
    log = dump_dir.parent / f"reference-{epoch}.log"
    command = [sys.executable, "-m", "hsx.testing.reference_engine", "--model-path", str(model), "--port", str(port)]
    command += ["--dump-dir", str(dump_dir), "--epoch", epoch, "--layers", ",".join(map(str, layers)), "--final", final]
    command += ["--chunked-prefill-size", str(chunk), "--allow-faults", *args]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=subprocess.STDOUT)
    try:
        folder = dump_dir / epoch
        await _up(process, port, folder, log)
        yield RunningServer(record_from_json((folder / RECORD_NAME).read_text()), folder, process)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def _up(process: asyncio.subprocess.Process, port: int, folder: Path, log: Path) -> None:
    client = SGLangClient("127.0.0.1", port)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not ((folder / REPORT_NAME).exists() and await client.answers()):
                if process.returncode is not None:
                    raise RuntimeError(f"reference engine ended with {process.returncode}:\n{_tail(log)}")
                await asyncio.sleep(0.02)
    except TimeoutError as error:
        raise RuntimeError(f"reference engine is not up after {START_TIMEOUT_S:g} s:\n{_tail(log)}") from error
    finally:
        await client.close()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
