"""The shipped units and the shipped job file, judged by systemd itself and by hsx."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from hsx.config_load import load
from hsx.exit_codes import ExitCode
from hsx.serve import Environment, plan_launch

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = ("hsx.service", "hsx-sglang.service", "srv-hsx-dumps.mount")
EXPOSURE = {"hsx.service": 20, "hsx-sglang.service": 75}
"""Highest `systemd-analyze security` score times ten."""


@pytest.fixture(scope="module")
def analyze() -> str:
    """systemd-analyze; where CI has none, that is a failure, because then nobody has checked the units."""
    path = shutil.which("systemd-analyze")
    if path is None:
        assert os.environ.get("CI") != "true", "systemd-analyze is missing; install Debian's systemd package"
        pytest.skip("systemd-analyze is not installed")
    return path


def installed(folder: Path) -> list[Path]:
    """The units as they are on a host where their programs exist."""
    program = folder / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    paths = [folder / name for name in UNITS]
    for path in paths:
        text = (DEPLOY / path.name).read_text(encoding="utf-8")
        path.write_text(re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={program}", text), encoding="utf-8")
    return paths


def settings(unit: str, section: str) -> dict[str, list[str]]:
    """Settings of one section, each with all its values."""
    found: dict[str, list[str]] = {}
    current = ""
    for line in (DEPLOY / unit).read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = line.strip("[]")
        elif current == section and "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_finds_no_fault_in_the_units(analyze: str, tmp_path: Path) -> None:
    command = [analyze, "verify", "--man=no", *map(str, installed(tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_systemd_would_find_a_fault(analyze: str, tmp_path: Path) -> None:
    """That the check above can fail at all."""
    path = installed(tmp_path)[0]
    path.write_text(path.read_text(encoding="utf-8") + "\n[Service]\nNonsense=1\n", encoding="utf-8")
    run = subprocess.run([analyze, "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert "Nonsense" in run.stderr


@pytest.mark.parametrize("unit", EXPOSURE)
def test_the_units_stay_as_hardened_as_they_are(analyze: str, tmp_path: Path, unit: str) -> None:
    installed(tmp_path)
    command = [analyze, "security", "--offline=yes", f"--threshold={EXPOSURE[unit]}", str(tmp_path / unit)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-300:]


def test_exit_codes_are_the_documented_ones() -> None:
    service = settings("hsx.service", "Service")
    assert service["SuccessExitStatus"] == [str(ExitCode.INTERRUPTED.value)]
    hopeless = (ExitCode.REFUSED, ExitCode.INCOMPLETE, ExitCode.DAMAGED, ExitCode.LOCKED)
    assert service["RestartPreventExitStatus"] == [" ".join(str(code.value) for code in hopeless)]
    assert service["Type"] == ["notify"]
    assert service["WatchdogSec"]
    assert settings("hsx-sglang.service", "Service")["RestartPreventExitStatus"] == [str(ExitCode.REFUSED.value)]


def server_command() -> str:
    (command,) = settings("hsx-sglang.service", "Service")["ExecStart"]
    return command


def test_the_servers_arguments_pass_hsx_serve() -> None:
    arguments = shlex.split(server_command().partition(" -- ")[2])
    launch = plan_launch(load(DEPLOY / "hsx.example.toml").config, arguments, Environment("0.5.23", plugin=True, variables={}))
    assert launch.command[3 : 3 + len(arguments)] == tuple(arguments)
    assert (launch.model, launch.port) == ("/srv/models/Kimi-K2.5", 30000)


def test_systemd_changes_nothing_in_the_servers_command() -> None:
    """It would expand `%x` and `$x`, take quotes and backslashes away, and end a command at `;`."""
    assert server_command().startswith("/opt/sglang/bin/hsx serve /etc/hsx/job.toml -- ")
    assert set(server_command()).isdisjoint("%$\"'\\;")


def test_a_unit_does_not_wait_out_the_load_of_the_model() -> None:
    unit = settings("hsx.service", "Unit")
    assert unit["Wants"] == ["hsx-sglang.service"]
    assert "After" not in unit


def test_the_mount_is_named_after_its_place() -> None:
    where = settings("srv-hsx-dumps.mount", "Mount")["Where"][0]
    assert where.strip("/").replace("/", "-") == "srv-hsx-dumps"
    assert settings("hsx-sglang.service", "Unit")["RequiresMountsFor"] == [where]
    assert str(load(DEPLOY / "hsx.example.toml").dump_dir) == where


def test_hsx_waits_for_the_mounts_of_the_tmpfs_and_of_every_root() -> None:
    loaded = load(DEPLOY / "hsx.example.toml")
    (required,) = settings("hsx.service", "Unit")["RequiresMountsFor"]
    assert required.split() == [str(loaded.dump_dir), *(str(root.path.parent) for root in loaded.roots)]


def test_every_place_of_the_example_can_be_written_by_its_unit() -> None:
    loaded = load(DEPLOY / "hsx.example.toml")
    writable = [Path(place.removeprefix("-")) for place in settings("hsx.service", "Service")["ReadWritePaths"][0].split()]
    places = [loaded.store, loaded.state_dir, loaded.dump_dir, *(root.path for root in loaded.roots)]
    assert [place for place in places if not any(place.is_relative_to(folder) for folder in writable)] == []


def test_the_example_reads_and_fits_its_comments() -> None:
    loaded = load(DEPLOY / "hsx.example.toml")
    config = loaded.config
    assert config.capture.layers == [4, 32, 60]
    assert len({root.name for root in loaded.roots}) == 2
    # 8192 tokens of 4 states of 7168 bf16 values: what the comment on max_bytes says.
    assert round(8192 * 4 * 7168 * 2 / 1e6) == 470
    assert loaded.staging_bytes > 64 * 8192 * 4 * 7168 * 2


def test_the_example_points_editors_to_the_schema() -> None:
    first = (DEPLOY / "hsx.example.toml").read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("#:schema ")
    assert (DEPLOY / first.removeprefix("#:schema ")).resolve() == DEPLOY.parent / "docs" / "job.schema.json"
    assert (DEPLOY.parent / "docs" / "job.schema.json").exists()
