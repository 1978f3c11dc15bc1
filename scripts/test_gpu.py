"""What only a GPU can show: one script, for a machine with one, that ends within eight minutes.

    python scripts/test_gpu.py [--python INTERPRETER] [--seconds 480] [--out FILE]

The interpreter is that of an environment with SGLang for the GPU and hsx (`pip install --no-deps`); default:
HSX_SGLANG_GPU_PYTHON, else .venvs/sglang-0.5.23. A tiny Llama with a context of 16,384 tokens is made, and served four times:

1. float32, no graphs: every token and layer equals Hugging Face's, relative error per token at most 1e-4 before rounding;
2. bfloat16, prefill graphs as SGLang sets them up by default: within bf16 of Hugging Face, whose neighbouring layers are
   further away; prompts of 8,000 tokens in chunks among short ones;
3. the same without graphs: within bf16 of what 2 captured;
4. bare, beside 2: prefill tokens/s of 2 over those of 4 (`x_bare_prefill`), with the plugin's own time in the forward path.

After each: no dump missing, none wrong, nothing staged, and the writer process writes. Ends with 2, and says so, without a
GPU; with 1 where a check fails or the time is up. Results: build/bench/gpu.json.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.epoch import RECORD_NAME, record_from_json
from hsx.core.marker import Marker
from hsx.testing import tiny_models
from hsx.testing.capture_server import CaptureServer
from hsx.testing.huggingface import HuggingFace, relative_error
from hsx.testing.sglang_job import writer_of

if TYPE_CHECKING:
    from types import FrameType

    from numpy.typing import NDArray

ROOT: Final = Path(__file__).parents[1]
RUN: Final = "9b000000"
LAYERS: Final = (1, 4, 7)
CONTEXT: Final = 16384
FLOAT32: Final = 1e-4
BF16: Final = 2.0**-5
"""Relative error of a token after eight layers in bf16."""
GPU_ARGUMENTS: Final = (
    *("--grammar-backend", "none", "--disable-radix-cache", "--skip-server-warmup", "--mem-fraction-static", "0.2"),
    *("--chunked-prefill-size", "2048", "--attention-backend", "triton"),
)
NO_GRAPHS: Final = ("--disable-cuda-graph", "--disable-prefill-cuda-graph")
LENGTHS: Final = (1, 2, 37, 128, 500, 1000, 2047, 2048, 2049, 8000, 8000, 300, 64, 5000, 3, 77)
ROUNDS: Final = 3


class Bare(CaptureServer):
    """The same server without capture."""

    def command(self) -> list[str]:
        """The server's own command line."""
        self.dumps.mkdir(parents=True)
        own = ["--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        return [str(self.python), "-m", "sglang.launch_server", *own, *self.base, *self.arguments]


class Failed(Exception):  # noqa: N818 - a verdict, not an error
    """A check does not hold."""


def check(holds: bool, sentence: str) -> None:
    """Says what was found, and ends the script where it is not as it must be."""
    sys.stdout.write(("  " if holds else "  FAILED: ") + sentence + "\n")
    sys.stdout.flush()
    if not holds:
        raise Failed(sentence)


def make_model(folder: Path) -> Path:
    """The tests' tiny Llama, with a longer context."""
    model = tiny_models.make("llama", folder)
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    (model / "config.json").write_text(json.dumps(config))
    return model


def prompts(seed: int, lengths: tuple[int, ...] = LENGTHS) -> dict[Marker, NDArray[np.int32]]:
    """One prompt of each length, each under a marker of its own."""
    rng = np.random.default_rng(2026)
    return {
        Marker(RUN, 1000 * seed + place, 1, length): rng.integers(5, 1000, length).astype(np.int32)
        for place, length in enumerate(lengths)
    }


def widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """bf16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def take(server: CaptureServer, seed: int) -> list[NDArray[np.float32]]:
    """Sends all prompts at once; the stored states of each, in order, once ids and account were found right."""
    sent = prompts(seed)
    asyncio.run(server.generate({str(marker): ids for marker, ids in sent.items()}))
    found = []
    for marker, ids in sent.items():
        if not server.ended(marker):
            raise Failed(f"{marker}: {(server.dumps / f'{marker}.error').read_text()}")
        _, bits, dumped = server.dump(marker)
        if not np.array_equal(dumped, ids):
            raise Failed(f"{marker}: the dump has other ids than the prompt")
        found.append(widen(bits))
    (state,) = server.states()
    check(state.staged_bytes == 0, f"{len(sent)} dumps, the longest of {max(LENGTHS)} tokens; nothing stays staged")
    record = record_from_json((server.dumps / RECORD_NAME).read_text())
    fallbacks = ("capture.memory_unshared", "capture.no_writer_process", "capture.writer_died")
    told = [line for line in server.log.read_text(errors="replace").splitlines() if any(name in line for name in fallbacks)]
    check(not told, f"the log tells of no fallback of the writer process {told or ''}")
    try:
        check(writer_of(record.pid) > 0, "the writer process is there")
    except ValueError as error:
        check(False, str(error))
    return found


def against_hf(judge: HuggingFace, ids: NDArray[np.int32], states: NDArray[np.float32]) -> tuple[float, float]:
    """Largest relative error of a token, and the smallest to a neighbouring layer in units of the token's own error."""
    truth = judge.states(ids)
    worst, nearest = 0.0, np.inf
    for slot, k in enumerate((*LAYERS, len(truth) - 1)):
        own = relative_error(states[:, slot], truth[k])
        worst = max(worst, float(own.max()))
        for other in (k - 1, k + 1):
            if other < len(truth):
                missed = relative_error(states[:, slot], truth[other])
                nearest = min(nearest, float((missed / np.maximum(own, 1e-7)).min()))
    return worst, nearest


def judge_all(judge: HuggingFace, found: list[NDArray[np.float32]], limit: float, what: str) -> dict[str, float]:
    """Holds everything against Hugging Face."""
    figures = [against_hf(judge, ids, states) for ids, states in zip(prompts(0).values(), found, strict=True)]
    worst, nearest = max(worst for worst, _ in figures), min(nearest for _, nearest in figures)
    check(
        worst <= limit,
        f"{what}: worst relative error of a token against Hugging Face {worst:.2e}; expected at most {limit:.2e}",
    )
    check(nearest > 2, f"{what}: neighbouring layers are at least {nearest:.1f} times as far away; expected more than 2")
    return {"worst": worst, "nearest_ratio": nearest}


def overhead(ours: CaptureServer, bare: CaptureServer) -> dict[str, Any]:
    """Turns of both servers on the same prompts; dumps are unlinked between them."""
    report: dict[str, Any] = {}
    for length, count in ((100, 64), (500, 32), (2000, 16), (8000, 8)):
        ratios = []
        for number in range(ROUNDS + 1):
            batch = {str(m): ids for m, ids in prompts(10 + number + length, (length,) * count).items()}
            seconds = {}
            for server in random.Random(number).sample([ours, bare], 2):
                began = time.perf_counter()
                asyncio.run(server.generate(batch, settle=False))
                seconds[server] = time.perf_counter() - began
            asyncio.run(ours.generate({"between": [1]}))
            for path in ours.dumps.glob("*.safetensors"):
                path.unlink()
            if number:
                ratios.append(seconds[bare] / seconds[ours])
        report[str(length)] = {"x_bare_prefill": round(statistics.median(ratios), 3), "rounds": [round(r, 3) for r in ratios]}
        sys.stdout.write(f"  {length} tokens: {report[str(length)]}\n")
    (state,) = ours.states()
    report["us_per_forward"] = round(state.forward_us / max(1, state.forwards), 1)
    report["blocked_us"] = state.blocked_us
    sys.stdout.write(f"  the plugin took {report['us_per_forward']} us of a prefill forward\n")
    return report


def run(python: Path, folder: Path) -> dict[str, Any]:
    """All checks. Raises Failed."""
    model = make_model(folder / "model")
    judge = HuggingFace(model)
    report: dict[str, Any] = {}

    def server(kind: type[CaptureServer], name: str, *arguments: str, aid: bool = False) -> CaptureServer:
        variables = {} if aid else {"HSX_CAPTURE_FLOAT32": ""}
        return kind(
            python,
            folder / name,
            model,
            LAYERS,
            arguments=arguments,
            variables=variables,
            base=GPU_ARGUMENTS,
            base_variables={},
        )

    sys.stdout.write("float32, no graphs\n")
    with server(CaptureServer, "float32", "--dtype", "float32", *NO_GRAPHS, aid=True) as one:
        take(one, 0)
        exact = [one.dump_float32(marker) for marker in prompts(0)]
    report["float32"] = judge_all(judge, exact, FLOAT32, "before rounding")
    sys.stdout.write("bfloat16, graphs on, beside a bare server\n")
    ours, bare = server(CaptureServer, "graphs", "--dtype", "bfloat16"), server(Bare, "bare", "--dtype", "bfloat16")
    with ours, bare:
        graphs = take(ours, 0)
        report["overhead"] = overhead(ours, bare)
        report["graph_lines"] = [
            line for line in ours.log.read_text(errors="replace").splitlines() if "cuda graph" in line.lower()
        ][:20]
    report["graphs"] = judge_all(judge, graphs, BF16, "graphs on")
    sys.stdout.write("bfloat16, graphs off\n")
    with server(CaptureServer, "eager", "--dtype", "bfloat16", *NO_GRAPHS) as three:
        eager = take(three, 0)
    apart = max(float(relative_error(a, b).max()) for a, b in zip(graphs, eager, strict=True))
    check(apart <= BF16, f"graphs on and off are {apart:.2e} apart at most; expected {BF16:.2e}")
    report["graphs_on_and_off"] = apart
    return report


def obstacle(python: Path) -> str:
    """Why nothing can be checked here; "" where it can."""
    if not python.exists():
        return f"{python} does not exist; name the server environment's interpreter with --python"
    probe = "import sglang, torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    if done.returncode != 0:
        return (
            f"{python} has no SGLang for a GPU: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else 'it failed'}"
        )
    if not done.stdout.strip():
        return f"{python} sees no GPU (torch.cuda.is_available() is False)"
    sys.stdout.write(f"on {done.stdout.strip()}\n")
    return ""


def main() -> int:
    """0: all holds. 1: something does not. 2: there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = os.environ.get("HSX_SGLANG_GPU_PYTHON") or ROOT / ".venvs" / "sglang-0.5.23" / "bin" / "python"
    parser.add_argument("--python", type=Path, default=Path(default))
    parser.add_argument("--seconds", type=int, default=470, help="longest time for everything")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "gpu.json")
    args = parser.parse_args()
    reason = obstacle(args.python)
    if reason:
        sys.stderr.write(f"test-gpu needs a GPU: {reason}\n")
        return 2

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Failed(f"not done within {args.seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(args.seconds)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="hsx-gpu-") as folder:
        try:
            report = run(args.python, Path(folder))
        except Failed as verdict:
            sys.stderr.write(f"test-gpu: {verdict}\n")
            return 1
    report["seconds"] = round(time.monotonic() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{args.out}: all holds, in {report['seconds']} s\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
