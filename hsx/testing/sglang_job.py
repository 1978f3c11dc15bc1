"""Jobs on a tiny model under the real SGLang, and what tests do to its processes."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from hsx.config_load import LoadedConfig, load
from hsx.core.dump import PART_SUFFIX, SUFFIX
from hsx.core.marker import Marker, parse
from hsx.engines.process import descendants
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.capture_server import CPU_ARGUMENTS, CPU_VARIABLES, START_S
from hsx.testing.huggingface import wrong_by_hugging_face
from hsx.testing.jobs import write_job
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hsx.testing.huggingface import HuggingFace

REPOSITORY: Final = Path(__file__).parents[2]
LAYERS: Final = (1, 4, 7)
SCHEDULER: Final = "sglang::scheduler"
"""How the process that runs the model calls itself."""
WRITER: Final = "hsx.capture.writer_process"
"""The module that the process runs which writes the dumps."""
PATIENCE_S: Final = 1200.0
"""For a whole run: a start of the server alone takes minutes on a busy machine."""
_STOPPED_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class SGLangJob:
    """A job that is ready to run.

    Attributes:
        loaded: its settings.
        prompts: the ids of each sample, by index.
    """

    loaded: LoadedConfig
    prompts: list[list[int]]

    @property
    def path(self) -> Path:
        """The job file."""
        return self.loaded.path

    def ledger(self) -> LedgerReader:
        """The job's ledger."""
        return LedgerReader(self.loaded.state_dir / FILE_NAME)

    def run_id(self) -> str:
        """The 8 hex digits of its markers, once it has begun."""
        with self.ledger() as ledger:
            return ledger.run

    def marker(self, index: int, attempt: int = 1) -> Marker:
        """The marker of an attempt of a sample, once the job has begun."""
        return Marker(self.run_id(), index, attempt, len(self.prompts[index]))

    def truth(self, judge: HuggingFace) -> Callable[[LoadedConfig], list[int]]:
        """Names the committed samples that are wrong, by Hugging Face."""
        return lambda loaded: wrong_by_hugging_face(loaded, judge, self.prompts)


def interpreter(version: str = "0.5.23", variable: str = "HSX_SGLANG_PYTHON") -> Path:
    """The Python of an SGLang environment. Without it, tests fail in CI and are skipped elsewhere."""
    path = Path(os.environ.get(variable) or REPOSITORY / ".venvs" / f"sglang-{version}" / "bin" / "python")
    if not path.exists():
        reason = f"{path} is missing; run scripts/setup_sglang.sh {version}, or set {variable}"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path


def random_prompts(count: int, shortest: int, longest: int, seed: int = 3) -> list[list[int]]:
    """Prompts of `shortest` to `longest` tokens, both included, evenly spread and shuffled."""
    rng = np.random.default_rng(seed)
    lengths = np.linspace(shortest, longest, count).round().astype(int)
    return [rng.integers(5, 1000, length).tolist() for length in rng.permutation(lengths)]


def external(port: int) -> dict[str, Any]:
    """The section `engine` for a server that runs already."""
    return {"kind": "sglang", "ownership": "external", "port": port, "start_timeout_s": START_S}


def spawned(python: Path, *arguments: str) -> dict[str, Any]:
    """The section `engine` for a server that hsx starts."""
    return {
        "kind": "sglang",
        "ownership": "spawn",
        "port": free_port(),
        "python": str(python),
        "args": [*CPU_ARGUMENTS, *arguments],
        "env": dict(CPU_VARIABLES),
        "start_timeout_s": START_S,
        "stop_grace_s": 1.0,
    }


def make_sglang_job(
    folder: Path,
    model: Path,
    dump_dir: Path,
    engine: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    **changes: dict[str, Any],
) -> SGLangJob:
    """Writes a job over two roots, patient with a busy machine: a verdict on a slow server is none of a test's.

    Args:
        folder: the job's own; made if missing.
        model: the model folder.
        dump_dir: the dump directory; made if missing.
        engine: see `external` and `spawned`.
        prompts: the dataset.
        changes: by section, keys to set.
    """
    folder.mkdir(exist_ok=True)
    dump_dir.mkdir(parents=True, exist_ok=True)
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "capture": {"layers": list(LAYERS)},
        "engine": engine,
        "staging": {"dump_dir": str(dump_dir), "max_bytes": "32MiB"},
        "pipeline": {"concurrency": 8, "start_rate": 1000.0, "commit_seconds": 0.1, "dump_deadline_s": 120.0},
        "watchdog": {"grace_s": 300.0, "slowest_tokens_per_s": 5.0, "backoff_first_s": 0.1, "backoff_longest_s": 0.2},
        "status": {"port": 0},
    }
    sections = {name: {**defaults.get(name, {}), **changes.get(name, {})} for name in defaults.keys() | changes.keys()}
    roots = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in ("a", "b")]
    job = write_job(folder, {**sections, "roots": roots})
    rows = [{"id": f"s{index}", "input_ids": list(ids)} for index, ids in enumerate(prompts)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SGLangJob(load(job), [list(ids) for ids in prompts])


def markers_in(folder: Path, suffix: str, run: str) -> list[Marker]:
    """Markers of `run`, canaries aside, that have a file with this suffix (a dump, a partial one) in an epoch's folder."""
    found = (parse(path.name.removesuffix(suffix)) for path in folder.glob(f"hsx1-{run}-*{suffix}"))
    return [marker for marker in found if marker is not None and not marker.canary]


def dumps_of(folder: Path, run: str) -> list[Marker]:
    """Markers of the run's published dumps."""
    return markers_in(folder, SUFFIX, run)


def half_done(folder: Path, run: str) -> list[Marker]:
    """Markers of the run that are being prefilled: some of their chunks are written."""
    return markers_in(folder, PART_SUFFIX, run)


def scheduler_of(server: int) -> int:
    """The pid of the scheduler below the server process `server`. Raises ValueError where there is not exactly one."""
    return _only_child(server, SCHEDULER, lambda line: line.startswith(SCHEDULER))


def writer_of(server: int) -> int:
    """The pid of the capture's writer process below `server`. Raises ValueError where there is not exactly one."""
    return _only_child(server, WRITER, lambda line: WRITER in line.split("\0"))


def _only_child(server: int, name: str, is_it: Callable[[str], bool]) -> int:
    found = []
    for pid in descendants(server):
        with suppress(OSError):  # it may end between the two looks
            if is_it(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")):
                found.append(pid)
    if len(found) != 1:
        raise ValueError(f"process {server} has {len(found)} children called {name}; expected one")
    return found[0]


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stops a process and all its threads, and lets it go on at the end. Raises TimeoutError where it does not stop."""
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + _STOPPED_S
        while not _is_stopped(pid):
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {pid} has not stopped")
            time.sleep(0.002)
        yield
    finally:
        with suppress(ProcessLookupError):  # the test may have killed it
            os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of it runs any more."""
    states = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue
        states.append(text[text.rindex(")") + 2])
    return set(states) <= {"T"}
