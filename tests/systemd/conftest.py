"""A real systemd, process 1 of a machine of its own, for the tests of the units."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hsx.testing import mounts, systemd_machine
from hsx.testing.mounts import private_mounts
from hsx.testing.systemd_job import OWN, VARIABLES
from hsx.testing.systemd_machine import Machine, started

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine for all tests of a module, with this environment as /opt/hsx."""
    reason = mounts.obstacle() or systemd_machine.obstacle()
    if reason:
        assert os.environ.get("CI") != "true", f"CI runs every test, as root; {reason}"
        pytest.skip(reason)
    with private_mounts(), started(tmp_path_factory.mktemp("machine"), OWN.binds(), VARIABLES) as running:
        OWN.make(running)
        yield running
