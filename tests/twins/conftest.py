"""Jobs whose dataset has prompts more than once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.twin_rows import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer


@pytest.fixture
def twin_job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job with twins for the shared server."""

    def make(**options: Any) -> TinyJob:
        job = make_job(tmp_path, server=server, **options)
        write_rows(tmp_path)
        return job

    return make


@pytest.fixture
def twin_job(twin_job_of: Callable[..., TinyJob]) -> TinyJob:
    """One with default settings."""
    return twin_job_of()
