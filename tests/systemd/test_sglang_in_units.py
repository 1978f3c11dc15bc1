"""The real SGLang in its unit: found, kept through the death of hsx, and its states stored and proved."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hsx.testing import mounts, systemd_machine, tiny_models
from hsx.testing.capture_server import CPU_ARGUMENTS, CPU_VARIABLES, START_S
from hsx.testing.commands import wait_until
from hsx.testing.mounts import private_mounts
from hsx.testing.sglang_job import LAYERS, PATIENCE_S, interpreter
from hsx.testing.systemd_job import OWN, VARIABLES, Environment, install
from hsx.testing.systemd_machine import Machine, started

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]
SAMPLES = 60


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with SGLang's environment as /opt/sglang, and a tiny model."""
    reason = mounts.obstacle() or systemd_machine.obstacle()
    if reason:
        assert os.environ.get("CI") != "true", f"CI runs every test, as root; {reason}"
        pytest.skip(reason)
    sglang = Environment(interpreter().parents[1], "/opt/sglang")
    models = tmp_path_factory.mktemp("models")
    tiny_models.make("llama", models / "llama")
    for path in (models, *models.rglob("*")):
        path.chmod(0o755)  # weights are made for their owner alone, and the unit runs as another user
    binds = {**OWN.binds(), **sglang.binds(), "/srv/models": models}
    with private_mounts(), started(tmp_path_factory.mktemp("machine"), binds, VARIABLES) as running:
        OWN.make(running)
        sglang.make(running)
        yield running


def test_the_real_server_outlives_hsx_and_its_states_are_proved(machine: Machine) -> None:
    job = install(
        machine,
        "real",
        SAMPLES,
        model={"path": "/srv/models/llama"},
        capture={"layers": list(LAYERS)},
        engine={
            "kind": "sglang",
            "python": "/opt/sglang/bin/python",
            "args": list(CPU_ARGUMENTS),
            "env": dict(CPU_VARIABLES),
            "start_timeout_s": START_S,
        },
        # So slowly that the run is under way for a while, however fast the machine.
        pipeline={"concurrency": 4, "dump_deadline_s": 120.0, "start_rate": 2.0},
        watchdog={"grace_s": 300.0, "slowest_tokens_per_s": 5.0},
    )
    job.drop_in(job.unit, "RestartSec=0\n")
    job.start()
    try:
        wait_until(lambda: 0 < job.committed() < SAMPLES, "something is committed, not all", PATIENCE_S)
    except AssertionError as error:
        raise AssertionError(f"{machine.journal(job.unit)[-2000:]}\n{machine.journal(job.server)[-4000:]}") from error
    epoch, server, pid = job.epoch(), job.pid(job.server), job.pid()
    machine.run("kill", "-KILL", str(pid))
    wait_until(lambda: (job.pid() not in (0, pid) and job.is_active()) or job.is_done(), "hsx is restarted", PATIENCE_S)
    job.wait_done(PATIENCE_S)
    assert job.pid(job.server) == server
    assert f'"epoch":"{epoch}","continued":true' in machine.journal(job.unit)
    job.assert_complete(SAMPLES)
    machine.systemctl("stop", job.server)
    assert machine.show(job.server, "TasksCurrent")["TasksCurrent"] in ("0", "[not set]")
