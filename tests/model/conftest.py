"""Where simulated lives are lived."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.testing.lives import Lives

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def lives() -> Iterator[Lives]:
    """A process that has everything imported, and forks."""
    with Lives() as opened:
        yield opened
