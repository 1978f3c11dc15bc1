"""hsx and its server in their units, under a real systemd: what becomes of a run when something dies or hangs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.commands import wait_until
from hsx.testing.systemd_job import PYTHON, UnitJob, install

if TYPE_CHECKING:
    from hsx.testing.systemd_machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAMPLES = 40
PATIENCE_S = 300.0
QUICK = "RestartSec=0\n"


HELD = 20


def hold(job: UnitJob) -> None:
    """The server goes no further than a sample in the middle, at whatever attempt, so that the run lasts until it may."""
    job.fault("hold", count=-1, match=f"-{HELD}-")


def ready_epoch(job: UnitJob) -> str:
    wait_until(lambda: bool(job.epoch()), "the engine is ready", PATIENCE_S)
    return job.epoch()


def begun(machine: Machine, name: str, unit: str = QUICK, samples: int = SAMPLES) -> tuple[UnitJob, str]:
    """A run that is held in the middle: the job, and the server's epoch."""
    job = install(machine, name, samples)
    if unit:
        job.drop_in(job.unit, unit)
    # The server's own unit first, so that it can be told to hold before the first sample.
    machine.systemctl("start", job.server)
    wait_until(lambda: answers(job), "the server answers", PATIENCE_S)
    hold(job)
    job.start()
    epoch = ready_epoch(job)
    wait_until(lambda: 0 < job.committed() < samples, "something is committed, not all", PATIENCE_S)
    return job, epoch


def events(job: UnitJob, name: str) -> list[dict[str, Any]]:
    """What hsx said under this name, as far as the journal has it yet."""
    lines = [line for line in job.machine.journal(job.unit).splitlines() if line.startswith("{") and line.endswith("}")]
    return [line for line in map(json.loads, lines) if line["event"] == name]


def answers(job: UnitJob) -> bool:
    try:
        job.clear_faults()
    except OSError:
        return False
    return True


def finish(job: UnitJob, samples: int = SAMPLES) -> None:
    """Lets it end, and proves what it has stored."""
    job.clear_faults()
    job.wait_done()
    job.assert_complete(samples)


def test_start_status_and_end(machine: Machine) -> None:
    job, epoch = begun(machine, "start")
    shown = machine.show(job.unit, "ActiveState", "Type", "StatusText", "NRestarts")
    assert shown["ActiveState"] == "active"
    said = machine.show(job.unit, "StatusText")["StatusText"]
    assert said.startswith(("samples ", "extracting")), said
    wait_until(lambda: f"/{SAMPLES}, " in machine.show(job.unit, "StatusText")["StatusText"], "STATUS tells of samples")
    said = machine.show(job.unit, "StatusText")["StatusText"]
    for word in ("samples ", "tokens/s", "engine "):
        assert word in said
    assert epoch in machine.run("ls", f"/srv/dumps/{job.name}").stdout
    options = machine.run("findmnt", "--noheadings", "--output=FSTYPE,OPTIONS", f"/srv/dumps/{job.name}").stdout
    assert options.startswith("tmpfs")
    assert "nr_inodes" in options
    finish(job)
    assert machine.show(job.server, "ActiveState")["ActiveState"] == "active"  # it outlives hsx


def test_reload_takes_what_may_change_and_names_the_rest(machine: Machine) -> None:
    job, epoch = begun(machine, "reload")
    pid = job.pid()
    text = machine.run("cat", job.path).stdout
    changed = text.replace("concurrency = 8", "concurrency = 3").replace("commit_seconds = 0.02", "commit_seconds = 0.5")
    assert changed != text
    machine.write(job.path, changed)
    machine.systemctl("reload", job.unit)
    wait_until(lambda: job.status()["limits"]["requests"] == 3, "the new concurrency is in force")
    wait_until(lambda: bool(events(job, "config.refused")), "the journal has what was refused")
    (taken,) = events(job, "config.reloaded")
    assert taken["changed"] == {"pipeline.concurrency": 3}
    (refused,) = events(job, "config.refused")
    assert refused["keys"] == ["pipeline.commit_seconds"]
    machine.write(job.path, text.replace("concurrency = 8", 'concurrency = "many"'))
    machine.systemctl("reload", job.unit)
    wait_until(lambda: "pipeline.concurrency" in machine.journal(job.unit).rpartition('"config.refused"')[0][-600:], "refused")
    assert job.status()["limits"]["requests"] == 3
    assert (job.pid(), job.epoch()) == (pid, epoch)
    machine.write(job.path, text)
    finish(job)


def test_a_wedged_event_loop_is_restarted_and_the_server_is_not(machine: Machine) -> None:
    command = f"{PYTHON} -m hsx.testing.wedging run /etc/hsx/wedge.toml"
    unit = f"{QUICK}WatchdogSec=20s\nTimeoutAbortSec=5s\nExecStart=\nExecStart={command}\n"
    job, epoch = begun(machine, "wedge", unit)
    pid, invocation = job.pid(), machine.show(job.server, "InvocationID")
    machine.run("kill", "-USR1", str(pid))
    wait_until(lambda: job.pid() not in (0, pid) and job.is_active(), "hsx is restarted", PATIENCE_S)
    assert "Watchdog timeout" in machine.journal(job.unit)
    assert ready_epoch(job) == epoch
    assert machine.show(job.server, "InvocationID") == invocation
    finish(job)


def test_sigkill_of_hsx(machine: Machine) -> None:
    job, epoch = begun(machine, "killed")
    pid = job.pid()
    machine.run("kill", "-KILL", str(pid))
    wait_until(lambda: job.pid() not in (0, pid) and job.is_active(), "hsx is restarted", PATIENCE_S)
    assert ready_epoch(job) == epoch
    assert machine.show(job.unit, "NRestarts")["NRestarts"] == "1"
    finish(job)


def test_sigkill_of_the_server_has_hsx_restart_its_unit(machine: Machine) -> None:
    job, epoch = begun(machine, "server")
    invocation = machine.show(job.server, "InvocationID")
    machine.run("kill", "-KILL", str(job.pid(job.server)))
    job.wait_done()  # nothing holds the next server
    wait_until(lambda: len(events(job, "epoch.began")) == 2, "the journal has another epoch", PATIENCE_S)
    assert [event["epoch"] == epoch for event in events(job, "epoch.began")] == [True, False]
    assert machine.show(job.server, "InvocationID") != invocation
    assert machine.show(job.unit, "NRestarts")["NRestarts"] == "0"
    job.assert_complete(SAMPLES)
    # RestartSec of the server's unit is 10 s: had hsx waited for systemd, it would not be hsx that restarts it.
    assert "unit_refused" not in machine.journal(job.unit)


def test_hsx_may_restart_its_own_server_and_nothing_else(machine: Machine) -> None:
    job = install(machine, "polkit")
    other = install(machine, "polkit-other")
    machine.run("rm", "/etc/polkit-1/rules.d/50-hsx-polkit-other.rules")
    machine.systemctl("restart", "polkit.service")
    for unit in (job.server, other.server):
        machine.systemctl("start", unit)
    before = machine.show(job.server, "InvocationID")
    machine.systemctl("restart", job.server, user="hsx")
    assert machine.show(job.server, "InvocationID") != before
    for unit in (other.server, job.unit, "dbus.service", "systemd-journald.service"):
        before = machine.show(unit, "InvocationID")
        for verb in ("restart", "stop"):
            done = machine.run("systemctl", "--no-ask-password", verb, unit, user="hsx", check=False)
            assert done.returncode != 0, (verb, unit)
            assert "authentication required" in done.stderr
        assert machine.show(unit, "InvocationID") == before
    for words in (("kill", job.server), ("mask", job.server), ("daemon-reload",)):
        assert machine.run("systemctl", "--no-ask-password", *words, user="hsx", check=False).returncode != 0
    nobody = machine.run(
        "setpriv", "--reuid=65534", "--clear-groups", "systemctl", "--no-ask-password", "restart", job.server, check=False
    )
    assert nobody.returncode != 0
    for unit in (job.server, other.server):
        machine.systemctl("stop", unit)


def test_a_drain_may_take_longer_than_the_stop_timeout(machine: Machine) -> None:
    job, _ = begun(machine, "drain", f"{QUICK}TimeoutStopSec=20s\n")
    wait_until(lambda: job.status()["in_flight"]["requests"] > 0, "requests are held")
    machine.systemctl("stop", "--no-block", job.unit)
    wait_until(lambda: state(machine, job.unit) == "deactivating", "the drain has begun")
    machine.run("sleep", "25")  # longer than TimeoutStopSec: what systemd would wait without a word of hsx
    assert state(machine, job.unit) == "deactivating"
    job.clear_faults()
    wait_until(lambda: state(machine, job.unit) in ("inactive", "failed"), "drained", PATIENCE_S)
    shown = machine.show(job.unit, "Result", "ExecMainStatus", "ActiveState")
    assert (shown["Result"], shown["ActiveState"]) == ("success", "inactive")
    assert "timed out" not in machine.journal(job.unit)
    job.start()
    job.wait_done()
    job.assert_complete(SAMPLES)


def test_the_start_limit_and_the_call_for_help(machine: Machine) -> None:
    job = install(machine, "limit", engine={"start_timeout_s": 1.0, "ownership": "external"}, watchdog={"restart_budget": 0})
    machine.write("/etc/hsx/on-failure", '#!/bin/sh\necho "$1 $MONITOR_SERVICE_RESULT $MONITOR_EXIT_STATUS" >> /var/called\n')
    machine.run("chmod", "755", "/etc/hsx/on-failure")
    machine.write(f"/etc/systemd/system/{job.unit}.d/90-test.conf", f"[Unit]\nStartLimitBurst=2\n[Service]\n{QUICK}")
    machine.systemctl("mask", job.server)
    machine.systemctl("daemon-reload")
    machine.systemctl("start", job.unit, check=False)
    wait_until(lambda: state(machine, job.unit) == "failed", "systemd has given up", PATIENCE_S)
    wait_until(lambda: machine.run("cat", "/var/called", check=False).returncode == 0, "somebody is called", PATIENCE_S)
    assert machine.run("cat", "/var/called").stdout == "limit exit-code 4\n"
    assert "Start request repeated too quickly" in machine.journal(job.unit)
    machine.run("rm", "/etc/hsx/on-failure", "/var/called")


def state(machine: Machine, unit: str) -> str:
    return machine.show(unit, "ActiveState")["ActiveState"]
