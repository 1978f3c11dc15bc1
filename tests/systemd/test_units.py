"""The units that `hsx install-units` writes for the shipped job file, judged by systemd itself and by hsx."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from hsx.cli import main
from hsx.config_load import LoadedConfig, load
from hsx.exit_codes import ExitCode
from hsx.serve import Environment, plan_launch
from hsx.testing.jobs import write_job
from hsx.units_text import UNITS, Host, escape_path, files, problems, quote

DEPLOY = Path(__file__).parents[2] / "deploy"
HSX, SERVER = "hsx@kimi.service", "hsx-sglang@kimi.service"
HOST = Host(python="/opt/hsx/bin/python")
EXPOSURE = {HSX: 20, SERVER: 75}
"""Highest `systemd-analyze security` score times ten."""
MOUNT = "srv-hsx-dumps.mount"


def example() -> LoadedConfig:
    """The shipped job file, where it belongs."""
    return replace(load(DEPLOY / "hsx.example.toml"), path=Path("/etc/hsx/kimi.toml"))


def written() -> dict[str, str]:
    """What is written for it, by path."""
    return {str(path): text for path, text in files(example(), HOST).items()}


@pytest.fixture(scope="module")
def analyze() -> str:
    """systemd-analyze; where CI has none, that is a failure, because then nobody has checked the units."""
    path = shutil.which("systemd-analyze")
    if path is None:
        assert os.environ.get("CI") != "true", "systemd-analyze is missing; install Debian's systemd package"
        pytest.skip("systemd-analyze is not installed")
    return path


def installed(folder: Path) -> list[Path]:
    """The units as they are on a host where their programs exist, as instances with all their settings in one file."""
    program = folder / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    found = written()
    texts = {
        HSX: found["/etc/systemd/system/hsx@.service"] + found[f"/etc/systemd/system/{HSX}.d/50-job.conf"],
        SERVER: found["/etc/systemd/system/hsx-sglang@.service"] + found[f"/etc/systemd/system/{SERVER}.d/50-job.conf"],
        "hsx-failed@kimi.service": found["/etc/systemd/system/hsx-failed@.service"],
        MOUNT: found[f"/etc/systemd/system/{MOUNT}"],
    }
    for name, text in texts.items():
        (folder / name).write_text(re.sub(r"(?m)^ExecStart=(/\S+)", f"ExecStart={program}", text.replace("%i", "kimi")))
    return [folder / name for name in texts]


def settings(unit: str, section: str) -> dict[str, list[str]]:
    """Settings of one section of a unit and its drop-in, each with all its values."""
    base = re.sub(r"@[^.]+", "@", unit)
    found: dict[str, list[str]] = {}
    for path, text in sorted(written().items()):
        if not path.endswith((f"/{base}", f"/{unit}", f"/{unit}.d/50-job.conf")):
            continue
        current = ""
        for line in text.splitlines():
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
    service = settings(HSX, "Service")
    assert service["SuccessExitStatus"] == [str(ExitCode.INTERRUPTED.value)]
    hopeless = (ExitCode.REFUSED, ExitCode.INCOMPLETE, ExitCode.DAMAGED, ExitCode.LOCKED)
    assert service["RestartPreventExitStatus"] == [" ".join(str(code.value) for code in hopeless)]
    assert service["Type"] == ["notify"]
    assert service["WatchdogSec"]
    assert settings(HSX, "Unit")["OnFailure"] == ["hsx-failed@%i.service"]
    assert settings(SERVER, "Service")["RestartPreventExitStatus"] == [str(ExitCode.REFUSED.value)]


def test_the_commands_are_the_jobs() -> None:
    assert settings(HSX, "Service")["ExecStart"][-2:] == ["", "/opt/hsx/bin/python -m hsx run /etc/hsx/kimi.toml"]
    command = shlex.split(settings(SERVER, "Service")["ExecStart"][-1])
    assert command[:6] == ["/opt/sglang/bin/python", "-m", "hsx", "serve", "/etc/hsx/kimi.toml", "--"]
    launch = plan_launch(example().config, command[6:], Environment("0.5.23", plugin=True, variables={}))
    assert launch.command[3 : 3 + len(command[6:])] == tuple(command[6:])
    assert (launch.model, launch.port) == ("/srv/models/Kimi-K2.5", 30000)


def test_systemd_changes_nothing_in_a_command(analyze: str, tmp_path: Path) -> None:
    """It would expand `%x` and `$x`, take quotes and backslashes away, and end a command at `;`."""
    words = ["/bin/echo", "a b", "100%", "$HOME", 'say "hi"', "back\\slash", "{'json': 1}", ";"]
    text = quote(words)
    assert text == '/bin/echo "a b" 100%% "$$HOME" "say \\"hi\\"" "back\\\\slash" "{\'json\': 1}" ";"'
    unit = tmp_path / "quoted.service"
    unit.write_text(f"[Service]\nType=oneshot\nExecStart={text}\n")
    run = subprocess.run([analyze, "verify", "--man=no", str(unit)], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_a_unit_does_not_wait_out_the_load_of_the_model() -> None:
    unit = settings(HSX, "Unit")
    assert unit["Wants"] == ["hsx-sglang@%i.service"]
    assert "After" not in unit


@pytest.mark.parametrize("path", ["/srv/hsx/dumps", "/", "/a-b/c", "/x/.hidden", "/.first/y", "/ü/z 1"])
def test_paths_are_spelled_as_systemd_spells_them(path: str) -> None:
    tool = shutil.which("systemd-escape")
    if tool is None:
        assert os.environ.get("CI") != "true", "systemd-escape is missing; install Debian's systemd package"
        pytest.skip("systemd-escape is not installed")
    expected = subprocess.run([tool, "--path", path], capture_output=True, text=True, check=True).stdout.strip()
    assert escape_path(Path(path)) == expected


def test_the_mount_has_room_for_what_the_job_may_stage() -> None:
    mount = settings(MOUNT, "Mount")
    assert mount["Where"] == [str(example().dump_dir)]
    options = dict(option.partition("=")[::2] for option in mount["Options"][0].split(","))
    assert int(options["size"].removesuffix("M")) << 20 > example().staging_bytes
    assert int(options["nr_inodes"]) > 65536
    assert (options["mode"], options["uid"], options["gid"]) == ("0700", "hsx", "hsx")
    assert settings(SERVER, "Unit")["RequiresMountsFor"] == mount["Where"]


def test_hsx_waits_for_the_mounts_of_the_tmpfs_and_of_every_root() -> None:
    loaded = example()
    (required,) = settings(HSX, "Unit")["RequiresMountsFor"]
    assert required.split() == [str(loaded.dump_dir), *(str(root.path) for root in loaded.roots)]


def test_every_place_of_the_example_can_be_written_by_its_unit() -> None:
    loaded = example()
    writable = [Path(place.removeprefix("-")) for place in settings(HSX, "Service")["ReadWritePaths"][0].split()]
    places = [loaded.store, loaded.state_dir, loaded.dump_dir, *(root.path for root in loaded.roots)]
    assert [place for place in places if not any(place.is_relative_to(folder) for folder in writable)] == []


def test_the_rule_is_for_exactly_the_jobs_server() -> None:
    rule = written()["/etc/polkit-1/rules.d/50-hsx-kimi.rules"]
    assert f'action.lookup("unit") == "{SERVER}"' in rule
    assert 'subject.user == "hsx"' in rule


def test_what_the_units_would_not_see_is_refused() -> None:
    loaded = replace(example(), store=Path("/home/me/store.zarr"), path=Path("/etc/hsx/a b.toml"))
    found = problems(loaded, HOST)
    assert [line.split(";")[0] for line in found if "job.store" in line] == ["job.store is /home/me/store.zarr"]
    assert any("a b.toml" in line for line in found)
    assert problems(example(), HOST) == []


def test_the_shipped_units_are_those_that_are_written() -> None:
    for unit in ("hsx@.service", "hsx-sglang@.service", "hsx-failed@.service"):
        assert (DEPLOY / unit).read_text() == (UNITS / unit).read_text() == written()[f"/etc/systemd/system/{unit}"]


def test_the_command_refuses_a_job_that_the_units_would_not_see(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["install-units"])
    job = write_job(tmp_path)
    assert main(["install-units", str(job), "--dry-run"]) == ExitCode.REFUSED


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
