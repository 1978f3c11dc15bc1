"""The machine loses power in the middle of a run, and is booted again over the same disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.testing.commands import wait_until
from hsx.testing.systemd_job import install

if TYPE_CHECKING:
    from hsx.testing.systemd_machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLES = 40


@pytest.mark.parametrize("end", ["cut_power", "power_off"])
def test_a_reboot_in_the_middle_goes_on_by_itself(machine: Machine, end: str) -> None:
    job = install(machine, end.replace("_", "-"), SAMPLES)
    args = 'args = ["--allow-faults", "--chunked-prefill-size", "32"'
    # Each server goes no further than a sample in the middle, so that the run lasts until it may.
    held = args + ', "--fault", "{\\"kind\\": \\"hold\\", \\"count\\": -1, \\"match\\": \\"-20-\\"}"'
    assert args in machine.run("cat", job.path).stdout
    machine.write(job.path, machine.run("cat", job.path).stdout.replace(args, held))
    machine.run("/opt/hsx/bin/python", "-m", "hsx", "install-units", job.path)
    machine.systemctl("daemon-reload")
    job.start()
    wait_until(lambda: 0 < job.committed() < SAMPLES, "something is committed, not all", 300)
    epoch, boot = job.epoch(), machine.boot_id
    if end == "cut_power":
        machine.cut_power()
    else:
        machine.power_off()
    machine.boot()  # hsx@ is enabled: nobody starts it
    assert machine.boot_id != boot
    wait_until(lambda: job.epoch() not in ("", epoch), "hsx has come up with another server", 300)
    assert job.committed() > 0
    job.clear_faults()
    job.wait_done()
    job.assert_complete(SAMPLES)
