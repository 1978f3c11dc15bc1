"""A small job on the reference engine, ready to run in this process: what tests of the whole pipeline are made of."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsx.app import Outcome, run_job
from hsx.config_load import LoadedConfig, load
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.jobs import write_job
from hsx.testing.servers import RunningServer, free_port, reference_server, tiny_config

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

LAYERS = [1, 3]


@dataclass(frozen=True, slots=True)
class TinyJob:
    """A job that is ready to run, and its folder."""

    loaded: LoadedConfig
    folder: Path

    async def run(self) -> Outcome:
        """Runs or continues the job in this process."""
        return await run_job(self.loaded)

    def ledger(self) -> LedgerReader:
        """The job's ledger."""
        return LedgerReader(self.loaded.state_dir / FILE_NAME)

    def server(self) -> AbstractAsyncContextManager[RunningServer]:
        """The external server that the job expects."""
        return reference_server(
            self.loaded.dump_dir, LAYERS, model=self.loaded.model, port=self.loaded.config.engine.port, chunk=32
        )


def make_job(
    folder: Path, samples: int = 12, longest: int = 90, server: RunningServer | None = None, **changes: dict[str, Any]
) -> TinyJob:
    """Writes a job with `samples` random prompts of 1 to `longest` tokens, over two roots; for `server`, if there is one."""
    port = server.record.port if server else free_port()
    defaults: dict[str, dict[str, Any]] = {
        "engine": {"kind": "reference", "ownership": "external", "port": port, "start_timeout_s": 180.0},
        "staging": {"dump_dir": str(server.folder.parent if server else folder / "dumps")},
        "capture": {"layers": LAYERS},
        "pipeline": {
            "concurrency": 8,
            "start_rate": 5000.0,
            "commit_seconds": 0.02,
            "retries": 2,
            "dump_deadline_s": 2.0,
        },
        "watchdog": {"backoff_first_s": 0.05, "backoff_longest_s": 0.1},
        "status": {"port": 0},
    }
    sections = {name: {**defaults.get(name, {}), **changes.get(name, {})} for name in defaults.keys() | changes.keys()}
    roots = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in ("a", "b")]
    job = write_job(folder, {**sections, "roots": roots})
    tiny_config(folder / "model")
    (folder / "dumps").mkdir(exist_ok=True)
    rng = random.Random(samples * 1000 + longest)
    rows = [{"id": f"s{i}", "input_ids": rng.choices(range(500), k=rng.randint(1, longest))} for i in range(samples)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TinyJob(load(job), folder)
