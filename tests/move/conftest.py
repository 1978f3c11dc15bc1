"""The store that the tests of moving begin with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.testing.moving import MoveBench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def bench(tmp_path: Path) -> MoveBench:
    """Nine samples on three roots."""
    return MoveBench(tmp_path)
