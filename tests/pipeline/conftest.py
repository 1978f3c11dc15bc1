"""Jobs and servers for the tests of whole runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.servers import RunningServer, running_reference, tiny_config
from hsx.testing.tiny_job import LAYERS, TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def job(tmp_path: Path) -> TinyJob:
    """Twelve samples, and a server of its own to start."""
    return make_job(tmp_path)


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests of a module, as one server serves many runs."""
    folder = tmp_path_factory.mktemp("server")
    with running_reference(folder / "dumps", LAYERS, model=tiny_config(folder / "model"), chunk=32) as server:
        yield server


@pytest.fixture
async def server(shared_server: RunningServer) -> RunningServer:
    """The shared server, without faults."""
    await shared_server.clear_faults()
    return shared_server


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[..., TinyJob]:
    """Makes a job with settings of the test's own."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, **options)

    return make
