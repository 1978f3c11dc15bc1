"""Jobs with prompts more than once and loss masks of their own."""

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
def job_of(tmp_path: Path, server: RunningServer) -> Callable[..., TinyJob]:
    """Makes a job that keeps less, by keys of `[storage]`, for the shared server."""

    def make(**storage: Any) -> TinyJob:
        job = make_job(tmp_path, server=server, storage=storage)
        write_rows(tmp_path)
        return job

    return make
