"""A job over two roots, all of it committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.testing.kept_job import KeptJob, keep_job

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def job(tmp_path: Path) -> KeptJob:
    job = keep_job(tmp_path)
    job.extract()
    return job
