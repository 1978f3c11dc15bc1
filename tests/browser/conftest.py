"""A real browser, and runs for it to look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("selenium", reason="needs the extra dev")

from hsx.testing.browser import Browser, browser, obstacle

if TYPE_CHECKING:
    from collections.abc import Iterator

PICTURES = Path(__file__).parents[2] / "build" / "screenshots"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    """One window for all tests of a module."""
    reason = obstacle()
    if reason:
        assert os.environ.get("CI") != "true", f"CI runs every test; {reason}"
        pytest.skip(reason)
    with browser() as opened:
        yield opened


@pytest.fixture
def pictures() -> Path:
    """Where screenshots are kept: `make test` leaves them as its artifacts."""
    return PICTURES
