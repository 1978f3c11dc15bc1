"""A real SGLang server on the CPU, started through `hsx serve`, for tests of the capture side alone.

Talks plain HTTP, so that nothing of the engines, the pipeline or the dump directory takes part.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import numpy as np

from hsx.core.dump import decode_header
from hsx.core.epoch import REPORT_NAME, SHM_NAME, CaptureReport, CaptureState, report_from_json, state_from_json
from hsx.core.marker import parse
from hsx.engines.leftovers import SHARED
from hsx.engines.reaper import KILL_NOW
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from numpy.typing import NDArray

    from hsx.core.dump import DumpHeader
    from hsx.core.marker import Marker

CPU_ARGUMENTS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none"),
    *("--max-total-tokens", "16384", "--chunked-prefill-size", "128", "--disable-radix-cache", "--skip-server-warmup"),
    "--sleep-on-idle",  # an idle scheduler polls with a whole core otherwise
)
CPU_VARIABLES: Final = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
RANKS_VARIABLES: Final = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
"""For two processes that run the model, both on one core: SGLang wants to know where each runs."""
START_S: Final = 600.0
"""Longest start allowed: 20 to 50 seconds on two idle cores, several minutes on busy ones."""


@dataclass
class CaptureServer:
    """One server; a context manager that leaves no process behind.

    Attributes:
        python: interpreter of the SGLang environment.
        folder: where job file, dump directory and log are put.
        model: the model's folder.
        layers: the k of each h_k.
        final: `post_norm` or `pre_norm`.
        arguments: further arguments of the server.
        variables: further environment variables.
        settings: further keys of the job file's `[capture]`.
        base: the server arguments that all tests share.
        base_variables: the environment variables that all tests share.
    """

    python: Path
    folder: Path
    model: Path
    layers: Sequence[int]
    final: str = "post_norm"
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    base: Sequence[str] = CPU_ARGUMENTS
    base_variables: Mapping[str, str] = field(default_factory=lambda: CPU_VARIABLES)

    def __post_init__(self) -> None:
        self.epoch = str(uuid.uuid4())
        self.dumps = self.folder / "dumps" / self.epoch
        self.unrounded = self.folder / "float32"
        self.log = self.folder / "server.log"
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._fences = 0

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def command(self) -> list[str]:
        """Writes the job file and returns the `hsx serve` command line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        job = self.folder / "job.toml"
        values: dict[str, dict[str, object]] = {
            "job": {"name": "capture", "store": str(self.folder / "store")},
            "model": {"path": str(self.model)},
            "dataset": {"path": str(self.folder / "none.jsonl")},
            "capture": {"layers": list(self.layers), "final": self.final, **self.settings},
            "staging": {"dump_dir": str(self.folder / "dumps")},
            "engine": {"port": self.port},
        }
        lines = [f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in body.items()) for name, body in values.items()]
        root = f'[[roots]]\nname = "a"\npath = {json.dumps(str(self.folder / "root"))}\n'
        job.write_text("\n".join([*lines, root]))
        serve = [str(self.python), "-m", "hsx", "serve", str(job), "--epoch", self.epoch, "--"]
        return [*serve, *self.base, *self.arguments]

    def start(self) -> None:
        """Returns once the server answers. Raises RuntimeError, with the end of its log, where it does not."""
        environment = {**os.environ, **self.base_variables, "HSX_CAPTURE_FLOAT32": str(self.unrounded), **self.variables}
        command = self.command()
        with self.log.open("wb") as log:
            # Through the reaper, so that a test run that is killed leaves no server behind.
            owned = [sys.executable, "-m", "hsx.engines.reaper", "--epoch-folder", str(self.dumps), str(os.getpid()), *command]
            self._process = subprocess.Popen(owned, cwd=self.folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"the server did not start:\n{self.log_tail()}")
            time.sleep(0.5)

    def stop(self) -> None:
        """Kills the server and whatever it started. Idempotent."""
        if self._process is not None:
            self._process.send_signal(KILL_NOW)
            self._process.wait()
            self._process = None

    def shared_files(self) -> list[Path]:
        """What the server is known to hold in /dev/shm. Waits until that is something: a real server always has semaphores."""
        known = self.dumps / SHM_NAME
        while not known.exists():
            time.sleep(0.1)
        return [SHARED / file["name"] for file in json.loads(known.read_text())["files"]]

    def log_tail(self, characters: int = 4000) -> str:
        """The end of the server's output."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]

    def report(self) -> CaptureReport:
        """The capture plugin's report. Raises FileNotFoundError where capture is off."""
        return report_from_json((self.dumps / REPORT_NAME).read_text())

    async def generate(
        self, prompts: Mapping[str, Sequence[int] | NDArray[np.int32]], new_tokens: int = 0, *, settle: bool = True
    ) -> dict[str, dict[str, Any]]:
        """Sends all prompts at once, each under its rid; returns the answers' `meta_info` by rid.

        Args:
            prompts: ids by rid.
            new_tokens: to be generated.
            settle: sends a foreign prompt behind them, and waits until the plugin has counted it: dumps may appear after their
                answers, but in the order of capture, so by then all that is to come of these prompts is there.

        Raises RuntimeError for an answer other than 200.
        """
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(rid: str, ids: Sequence[int] | NDArray[np.int32]) -> dict[str, Any]:
                sampling = {"max_new_tokens": new_tokens, "temperature": 0}
                body = {"input_ids": [int(i) for i in ids], "rid": rid, "sampling_params": sampling}
                async with session.post(f"http://127.0.0.1:{self.port}/generate", json=body) as answer:
                    if answer.status != 200:
                        raise RuntimeError(f"{rid}: HTTP {answer.status}: {await answer.text()}\n{self.log_tail()}")
                    meta: dict[str, Any] = (await answer.json())["meta_info"]
                    return meta

            expected = self.foreign() + sum(parse(rid) is None for rid in prompts) + 1
            metas = await asyncio.gather(*(one(rid, ids) for rid, ids in prompts.items()))
            if settle:
                self._fences += 1
                await one(f"fence-{self._fences}", [1])
                async with asyncio.timeout(START_S):
                    while self.foreign() < expected:  # noqa: ASYNC110 - the event is in another process
                        await asyncio.sleep(0.01)
        return dict(zip(prompts, metas, strict=True))

    def states(self) -> list[CaptureState]:
        """The plugin's own accounts, one for each rank."""
        return [state_from_json(path.read_text()) for path in sorted(self.dumps.glob("counter*.json"))]

    def foreign(self) -> int:
        """Prompts without a marker, as the plugin counted them."""
        return sum(state.foreign for state in self.states())

    def ended(self, marker: Marker) -> bool:
        """Waits until an answered marker has its dump, True, or its error file, False."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            for suffix, good in ((".safetensors", True), (".error", False)):
                if (self.dumps / f"{marker}{suffix}").exists():
                    return good
            time.sleep(0.01)
        raise RuntimeError(f"{marker} has neither a dump nor an error file:\n{self.log_tail()}")

    def dump(self, marker: Marker) -> tuple[DumpHeader, NDArray[np.uint16], NDArray[np.int32]]:
        """The published dump of `marker`: header, bf16 bits [tokens, L, H], ids [tokens]. Raises FileNotFoundError."""
        data = (self.dumps / f"{marker}.safetensors").read_bytes()
        header, start = decode_header(data, len(data))
        shape = (header.tokens, header.spec.states, header.hidden_size)
        states = np.frombuffer(data, "<u2", header.states_bytes // 2, start).reshape(shape)
        return header, states, np.frombuffer(data, "<i4", header.tokens, start + header.states_bytes)

    def dump_float32(self, marker: Marker) -> NDArray[np.float32]:
        """The states of `marker` before rounding, [tokens, L, H]; see `hsx.capture.unrounded`."""
        states: NDArray[np.float32] = np.load(self.unrounded / f"{marker}.npy")
        return states

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
