"""The fault matrix: `hsx.testing.fault_matrix.ROWS` lists the rows, and each test reports its own with the fixture `seen`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.fault_matrix import Matrix
from hsx.testing.servers import RunningServer, free_port
from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result

RESULTS = Path(__file__).parents[2] / "build" / "faults"


@pytest.fixture
def matrix() -> Matrix:
    """Where rows are reported."""
    return Matrix(RESULTS)


@pytest.fixture
def seen(matrix: Matrix) -> Callable[..., Result]:
    """Reports a row: `seen(row, loaded, log=..., quarantined=..., restarts=..., events=...)`; see `Matrix.seen`."""
    return matrix.seen


@pytest.fixture
def job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job of twelve samples for the shared server, with settings of the test's own."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, server=server, **options)

    return make


@pytest.fixture
def spawned(tmp_path: Path) -> Callable[..., TinyJob]:
    """Makes a job that owns its server: `spawned(fault, ..., samples=..., pipeline=...)`.

    Each life of the server arms the faults, JSON objects as for `/_fault`, so those of first attempts strike once. It dies at
    boot while the file `deaths` in the job's folder holds a number above 0.
    """

    def make(*faults: dict[str, Any], watchdog: dict[str, Any] | None = None, **options: Any) -> TinyJob:
        engine = {
            "ownership": "spawn",
            "port": free_port(),
            "args": ["--allow-faults", "--die-at-boot", str(tmp_path / "deaths")]
            + [word for fault in faults for word in ("--fault", json.dumps(fault))],
            "stop_grace_s": 5.0,
        }
        timing = {"backoff_first_s": 0.05, "backoff_longest_s": 0.1, **(watchdog or {})}
        return make_job(tmp_path, engine=engine, watchdog=timing, **options)

    return make
