"""The matrix itself can fail: what every row demands is missed when it is not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.commands import log_lines
from hsx.testing.fault_matrix import ROWS, Matrix, run_logged

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.servers import RunningServer
    from hsx.testing.tiny_job import TinyJob

GENERATOR = Path(__file__).parents[2] / "scripts" / "generate_reliability.py"


async def test_each_demand_fails_when_it_is_not_met(
    job_of: Callable[..., TinyJob], server: RunningServer, tmp_path: Path
) -> None:
    job = job_of()
    await server.fault("http_400", match="-3-1-")
    _, log = await run_logged(job)
    matrix = Matrix(tmp_path / "results")
    sound: dict[str, Any] = {"log": log, "quarantined": {"request_refused": 1}, "events": ("sample.quarantined",)}
    result = matrix.seen("too_long", job.loaded, **sound)
    assert (result.samples, result.stored, result.quarantined) == (12, 11, {"request_refused": 1})
    assert (tmp_path / "results" / "too_long.reference.json").exists()

    last = next(line for line in reversed(log) if line["event"] == "sample.committed")
    revoked = {"event": "samples.revoked", "count": 1}
    gone = {**last, "index": 3}
    unmet: dict[str, dict[str, Any]] = {
        "wrong states": {"truth": lambda _loaded: [5]},
        "quarantined": {"quarantined": {}},
        "restarts": {"restarts": 1},
        "the log lacks": {"events": ("engine.restarted",)},
        "committed and gone": {"log": [*log, gone]},
        "committed again": {"log": [*log, last]},
        "rejected=0": {"rejected": 1},
    }
    for words, changes in unmet.items():
        with pytest.raises(AssertionError, match=words):
            matrix.seen("too_long", job.loaded, **{**sound, **changes})
    matrix.seen("too_long", job.loaded, **{**sound, "log": [*log, revoked, last]})
    with pytest.raises(KeyError):
        matrix.seen("no_such_row", job.loaded, **sound)

    shard = next((tmp_path / "root-a").rglob("c.*"))
    other = next((tmp_path / "root-b").rglob("c.*")).with_name(shard.name)
    shutil.copyfile(shard, other)
    with pytest.raises(AssertionError, match="shards on the roots"):
        matrix.seen("too_long", job.loaded, **sound)


def test_a_log_is_read_around_torn_lines(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text('{"event": "job.began"}\nTraceback\n{"event": "sample.comm')
    second.write_text('{"event": "epoch.began"}\n')
    assert [line["event"] for line in log_lines(first, second)] == ["job.began", "epoch.began"]


def test_a_row_without_a_result_is_told_and_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = subprocess.run(
        [sys.executable, GENERATOR, "--results", tmp_path, "--page", page], check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    missing = sum(len(row.engines) for row in ROWS.values()) + 1
    assert f"{missing} results are missing" in done.stderr
    assert page.read_text().count("not run") == missing
