"""The fault matrix: `hsx.testing.fault_matrix.ROWS` lists the rows, and each test reports its own with the fixture `seen`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.testing.fault_matrix import Matrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.testing.fault_matrix import Result

RESULTS = Path(__file__).parents[2] / "build" / "faults"


@pytest.fixture
def seen() -> Callable[..., Result]:
    """Reports a row: `seen(row, loaded, log=..., quarantined=..., restarts=..., events=...)`; see `Matrix.seen`."""
    return Matrix(RESULTS).seen
