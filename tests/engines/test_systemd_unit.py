"""The owner of a server in its unit, where systemd says no, or says nothing; the rest is tested with a real systemd."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.engines.systemd_unit import SystemdOwner
from hsx.errors import EngineError, RunError

if TYPE_CHECKING:
    from pathlib import Path

UNIT = "hsx-sglang@job.service"


def owner(folder: Path, script: str, wait_s: float = 0.0) -> SystemdOwner:
    """An owner that talks to a systemctl of our own."""
    program = folder / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n{script}\n')
    program.chmod(0o755)
    return SystemdOwner(UNIT, folder / "dumps", 30000, wait_s, systemctl=str(program))


def shown(active: str, sub: str = "dead", loaded: str = "loaded", result: str = "success", invocation: str = "") -> str:
    lines = (
        f"ActiveState={active}",
        f"SubState={sub}",
        f"Result={result}",
        f"InvocationID={invocation}",
        f"LoadState={loaded}",
    )
    text = "\\n".join((*lines, "ExecMainStatus=9"))
    return f"case \"$3\" in show) printf '{text}\\n'; exit 0;; esac"


async def test_an_unknown_unit_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not-found") as caught:
        await owner(tmp_path, shown("inactive", loaded="not-found")).start()
    assert caught.value.kind == "unit_refused"


async def test_a_refusal_of_polkit_ends_the_run(tmp_path: Path) -> None:
    script = f"{shown('inactive')}\necho 'Failed to start: Interactive authentication required.' >&2; exit 1"
    with pytest.raises(RunError, match="Interactive authentication required") as caught:
        await owner(tmp_path, script).start()
    assert caught.value.kind == "unit_refused"


async def test_a_unit_that_does_not_start_is_a_failed_start(tmp_path: Path) -> None:
    script = f"{shown('inactive')}\ncase \"$3\" in reset-failed) exit 0;; esac\necho 'Job failed.' >&2; exit 1"
    with pytest.raises(EngineError, match="Job failed") as caught:
        await owner(tmp_path, script).start()
    assert caught.value.kind == "server_start_failed"
    assert (tmp_path / "calls").read_text().splitlines()[1:] == [
        f"--no-ask-password --no-pager {verb} {UNIT}" for verb in ("reset-failed", "start")
    ]


async def test_a_unit_that_fails_while_it_is_waited_for(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"failed \(start-limit-hit, status 9\)"):
        await owner(tmp_path, f"{shown('failed', 'failed', result='start-limit-hit')}\nexit 0").start()


async def test_a_running_unit_without_a_record_is_waited_for_and_not_started(tmp_path: Path) -> None:
    waiting = owner(tmp_path, f"{shown('active', 'running')}\nexit 1")
    with pytest.raises(EngineError, match="no epoch record") as caught:
        await waiting.start()
    assert caught.value.kind == "epoch_unknown"
    assert "no epoch record" in waiting.situation
    assert "start" not in (tmp_path / "calls").read_text()


async def test_a_systemd_that_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="says nothing of"):
        await owner(tmp_path, "exit 1").start()
    with pytest.raises(EngineError, match="cannot be run"):
        await SystemdOwner(UNIT, tmp_path, 30000, 0, systemctl=str(tmp_path / "none")).start()


async def test_leaving_touches_nothing_and_stopping_stops_what_runs(tmp_path: Path) -> None:
    running = owner(tmp_path, f"{shown('active', 'running')}\nexit 0")
    await running.leave(0)
    assert not (tmp_path / "calls").exists()
    await running.stop(0)
    assert f"stop {UNIT}" in (tmp_path / "calls").read_text()
    at_rest = owner(tmp_path, f"{shown('inactive')}\nexit 1")
    await at_rest.stop(0)
    with pytest.raises(RuntimeError, match="no server"):
        await at_rest.ended()
