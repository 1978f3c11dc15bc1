"""Real disks, in a mount namespace of each module's own: needs root, and leaves nothing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hsx.testing.mounts import obstacle, private_mounts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def _private_mounts() -> Iterator[None]:
    """What the module's tests mount, only they and what they start can see."""
    reason = obstacle()
    if reason:
        assert os.environ.get("CI") != "true", f"CI runs every test, as root; {reason}"
        pytest.skip(reason)
    with private_mounts():
        yield
