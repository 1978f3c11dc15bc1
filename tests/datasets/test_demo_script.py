"""The job that `make demo` writes: one that hsx takes, and whose engine is read back and not guessed."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.config_load import load
from hsx.testing.commands import wait_until

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "scripts" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("real", "engine"), [(True, "sglang"), (False, "reference")])
def test_the_job_is_one_that_hsx_takes(demo: ModuleType, tmp_path: Path, real: bool, engine: str) -> None:
    demo.write_job(tmp_path, real=real)
    loaded = load(tmp_path / "job.toml")
    assert loaded.config.engine.kind == engine
    assert demo.engine_of(tmp_path / "job.toml") == engine
    assert (loaded.config.log.format, loaded.config.log.level) == ("console", "warning")
    assert all(root.path.is_dir() for root in loaded.roots)


def test_a_job_that_was_begun_keeps_its_engine(demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.write_job(tmp_path, real=False)
    before = (tmp_path / "job.toml").read_text()
    assert demo.prepared_job(tmp_path).read_text() == before
    assert "NOT SGLang" in capsys.readouterr().out


def test_ctrl_c_waits_for_the_command_under_way_and_says_how_to_go_on(tmp_path: Path) -> None:
    """Both get it, as from a terminal; a second one changes nothing."""
    child = (
        "import pathlib, signal, sys, time\n"
        "folder, asked = pathlib.Path(sys.argv[1]), []\n"
        "def interrupted(*_):\n"
        "    asked.append(1)\n"
        "    (folder / str(len(asked))).touch()\n"
        "signal.signal(signal.SIGINT, interrupted)\n"
        "(folder / '0').touch()\n"
        "while len(asked) < 2: time.sleep(0.01)\n"
        "(folder / 'drained').touch()\n"
    )
    parent = "import runpy, sys; runpy.run_path(sys.argv[1])['called']([sys.executable, '-c', *sys.argv[2:]], capture=True)"
    command = [sys.executable, "-c", parent, str(SCRIPT), child, str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        for number in range(2):
            wait_until((tmp_path / str(number)).exists, f"{number} signals have come")
            os.killpg(demo.pid, signal.SIGINT)
        _, said = demo.communicate()
    assert (tmp_path / "drained").exists()
    assert demo.returncode == 130
    assert said == "demo: stopped; make demo goes on\n"
