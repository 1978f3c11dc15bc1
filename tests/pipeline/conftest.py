"""Jobs and servers for the tests of whole runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer


@pytest.fixture
def job(tmp_path: Path) -> TinyJob:
    """Twelve samples, and a server of its own to start."""
    return make_job(tmp_path)


@pytest.fixture
def job_of(tmp_path: Path) -> Callable[..., TinyJob]:
    """Makes a job with settings of the test's own."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, **options)

    return make


@pytest.fixture
def served_job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job for the shared server."""

    def make(**options: Any) -> TinyJob:
        return make_job(tmp_path, server=server, **options)

    return make
