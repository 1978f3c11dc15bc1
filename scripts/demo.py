"""`make demo`: the main job, end to end. Real text, a trained model, the real SGLang, two roots; proved afterwards.

Prepares what is missing (the SGLang environment, SmolLM2-135M-Instruct), writes build/demo/job.toml, and then calls hsx as a
user would: plan, run, verify, show. A second call continues an interrupted run, or finds that nothing is left to do. The
82 conversations have 17,316 tokens; on two cores that had other work to do they took 11 minutes.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

REPO: Final = Path(__file__).resolve().parent.parent
HSX: Final = Path(sys.executable).with_name("hsx")
MODEL: Final = REPO / "build" / "smollm2"
DEMO: Final = REPO / "build" / "demo"
DATASET: Final = REPO / "demo" / "chat.jsonl"
SGLANG: Final = REPO / ".venvs" / "sglang-0.5.23" / "bin" / "python"

JOB: Final = """\
#:schema {schema}
# Written by `make demo`. A job of your own looks the same: deploy/hsx.example.toml.

[job]
name = "demo"
store = "store.zarr"

[model]
path = "{model}"

[dataset]
path = "{dataset}"

[capture]
layers = [2, 15, 27]
final = "post_norm"

[engine]
{engine}

[staging]
dump_dir = "{dump_dir}"
max_bytes = "1GiB"

[[roots]]
name = "disk0"
path = "roots/disk0"

[[roots]]
name = "disk1"
path = "roots/disk1"

[pipeline]
concurrency = 16

[watchdog]
slowest_tokens_per_s = 5.0  # a laptop's processor is no eight GPUs

[status]
port = {status_port}

[log]                       # for eyes: how far it is, and what goes wrong
format = "console"
level = "warning"
"""

SGLANG_ENGINE: Final = """\
ownership = "spawn"
port = {port}
python = "{python}"
args = [
  "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--grammar-backend", "none",
  "--max-total-tokens", "16384", "--chunked-prefill-size", "256", "--disable-radix-cache", "--skip-server-warmup",
  "--sleep-on-idle",
]
env = {{ SGLANG_USE_CPU_ENGINE = "1", HF_HUB_OFFLINE = "1", OMP_NUM_THREADS = "{threads}" }}"""

REFERENCE_ENGINE: Final = """\
kind = "reference"
ownership = "spawn"
port = {port}"""


def main() -> int:
    """Runs the demo; returns its exit code."""
    run([sys.executable, "scripts/prepare_demo_model.py", str(MODEL.relative_to(REPO))])
    job = prepared_job(DEMO)
    say("What will it take?")
    hsx("plan", job)
    say("Extract. (The server's log: build/demo/store.zarr.job/server.log)")
    sys.stdout.write(f"Watch it: http://127.0.0.1:{tomllib.loads(job.read_text(encoding='utf-8'))['status']['port']}/\n")
    outcome = json.loads(hsx("run", job, "--json", capture=True))
    if not outcome["tokens"]:
        say("Nothing was left to do: every sample was committed before. Remove build/demo to start over.")
    say("Prove it: every shard is read again, and some samples are recomputed with transformers.")
    hsx("verify", job, "--against-hf", str(MODEL))
    say("One sample.")
    hsx("show", job, "0")
    summarise(outcome, engine_of(job))
    return 0


def prepared_job(folder: Path) -> Path:
    """The job file in `folder`. It is written once: a job that was begun goes on with the engine that it was begun with."""
    job = folder / "job.toml"
    if not job.exists():
        write_job(folder, real=have_sglang())
    elif engine_of(job) == "sglang":
        if not have_sglang():
            raise SystemExit("demo: build/demo was begun with SGLang, which is gone; remove build/demo to start over")
    else:
        say("build/demo was begun with the reference engine, NOT SGLang, and goes on with it. Remove build/demo to start over.")
    return job


def engine_of(job: Path) -> str:
    """The engine that a job file names: `sglang` or `reference`."""
    return str(tomllib.loads(job.read_text(encoding="utf-8"))["engine"].get("kind", "sglang"))


def have_sglang() -> bool:
    """Installs SGLang where it can be installed; says loudly where it cannot."""
    result = called([str(REPO / "scripts" / "setup_sglang.sh"), "0.5.23"])
    if result.returncode == 0:
        return True
    if result.returncode != UNSUPPORTED:
        raise SystemExit(f"demo: SGLang could not be installed (exit code {result.returncode}); see the messages above")
    banner = "!" * 100
    sys.stdout.write(
        f"\n{banner}\n!! SGLang does not install on this machine. The demo goes on with hsx's own REFERENCE ENGINE, which\n"
        f"!! serves the same model over the same protocol, but is not SGLang.\n{banner}\n"
    )
    return False


INTERRUPTED: Final = 130
UNSUPPORTED: Final = 3
"""Exit code of setup_sglang.sh where the platform is not Linux x86-64 with Python 3.11."""


def write_job(folder: Path, *, real: bool) -> None:
    """Writes the job file, and makes its roots."""
    for root in ("disk0", "disk1"):
        (folder / "roots" / root).mkdir(parents=True, exist_ok=True)
    shm = Path("/dev/shm")  # noqa: S108 - the one tmpfs that every Linux has; the folder made in it is the user's own
    dumps = shm / f"hsx-demo-{os.getuid()}" if shm.is_dir() else folder / "dumps"
    engine = SGLANG_ENGINE if real else REFERENCE_ENGINE
    (folder / "job.toml").write_text(
        JOB.format(
            schema=os.path.relpath(REPO / "docs" / "job.schema.json", folder),
            model=os.path.relpath(MODEL, folder),
            dataset=os.path.relpath(DATASET, folder),
            dump_dir=dumps,
            status_port=free_port(),
            engine=engine.format(port=free_port(), python=os.path.relpath(SGLANG, folder), threads=os.cpu_count() or 1),
        ),
        encoding="utf-8",
    )


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def say(text: str) -> None:
    """A heading."""
    sys.stdout.write(f"\n== {text}\n")
    sys.stdout.flush()


def run(command: list[str], *, capture: bool = False) -> str:
    """Shows and runs a command; ends the demo with its exit code where that is not 0."""
    sys.stdout.write(f"$ {shlex.join(str(Path(word).name) if word == command[0] else word for word in command)}\n")
    sys.stdout.flush()
    result = called(command, capture=capture)
    if result.returncode:
        raise SystemExit(result.returncode)
    return result.stdout or ""


def called(command: list[str], *, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, also where Ctrl-C comes meanwhile, which it gets, too. Then the demo ends, too."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: asked.append(number))
    result = subprocess.run(command, cwd=REPO, check=False, text=True, stdout=subprocess.PIPE if capture else None)
    signal.signal(signal.SIGINT, before)
    if asked:
        sys.stderr.write("demo: stopped; make demo goes on\n")
        raise SystemExit(INTERRUPTED)
    return result


def hsx(command: str, job: Path, *arguments: str, capture: bool = False) -> str:
    """Calls hsx on the demo's job."""
    return run([str(HSX), command, str(job.relative_to(REPO)), *arguments], capture=capture)


def summarise(outcome: dict[str, Any], engine: str) -> None:
    """The last words."""
    rate = f", {outcome['tokens'] / outcome['seconds']:.0f} tokens/s, server start included" if outcome["tokens"] else ""
    violations = ", ".join(f"{name} {count}" for name, count in outcome["violations"].items()) or "none"
    store = Path(outcome["store"]).relative_to(REPO)
    sys.stdout.write(
        f"""
== Summary
engine      {"SGLang 0.5.23 on the CPU" if engine == "sglang" else "the reference engine, NOT SGLang"}
samples     {outcome["committed"]} committed, {outcome["quarantined"]} quarantined, {outcome["pending"]} pending
this run    {outcome["tokens"]} tokens in {outcome["seconds"]:.0f} s{rate}
violations  {violations}
store       {store}, shards on build/demo/roots/disk0 and disk1

Open it:

    import hsx
    store = hsx.open("{store}")
    sample = store[0]
    sample.hidden_states   # torch.bfloat16 [tokens, L, H]
    sample.input_ids, sample.loss_mask
"""
    )


if __name__ == "__main__":
    sys.exit(main())
