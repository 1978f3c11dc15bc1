"""The fault matrix: `hsx.testing.fault_matrix.ROWS` lists the rows, and each test reports its own with the fixture `seen`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.fault_matrix import Matrix
from hsx.testing.servers import RunningServer, running_reference, tiny_config
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hsx.testing.fault_matrix import Result

RESULTS = Path(__file__).parents[2] / "build" / "faults"


@pytest.fixture
def seen() -> Callable[..., Result]:
    """Reports a row: `seen(row, loaded, log=..., quarantined=..., restarts=..., events=...)`; see `Matrix.seen`."""
    return Matrix(RESULTS).seen


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One reference engine for all tests of a module, as one server serves many runs."""
    folder = tmp_path_factory.mktemp("server")
    with running_reference(folder / "dumps", LAYERS, model=tiny_config(folder / "model"), chunk=32) as server:
        yield server


@pytest.fixture
async def server(shared_server: RunningServer) -> RunningServer:
    """The shared server, without faults."""
    await shared_server.clear_faults()
    return shared_server


@pytest.fixture
def job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job of twelve samples for the shared server, with settings of the test's own."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, server=server, **options)

    return make
