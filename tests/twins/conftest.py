"""Jobs whose dataset has prompts more than once."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.tiny_job import TinyJob, make_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.testing.servers import RunningServer

PROMPTS = (0, 1, 0, 2, 1, 0, 3, 4, 4, 5)
"""Which prompt each sample has: 0, 2 and 5 have the same one, as have 1 and 4, and 7 and 8."""


def write_rows(folder: Path) -> None:
    """The dataset. Twins differ in their loss masks, on which no state depends."""
    rng = random.Random(3)
    prompts = [rng.choices(range(500), k=length) for length in (40, 70, 1, 64, 90, 33)]
    rows = []
    for number, prompt in enumerate(PROMPTS):
        ids = prompts[prompt]
        rows.append({"id": f"s{number}", "input_ids": ids, "loss_mask": [(number + at) % 2 for at in range(len(ids))]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


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
