"""Real disks, in a mount namespace of each module's own: needs root, and leaves nothing."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _private_disks(private_disks: None) -> None:
    """For every module here."""
