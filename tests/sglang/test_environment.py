"""The server's environment has SGLang's dependencies and none of hsx's own: what runs there needs no more."""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import importlib.metadata, importlib.util, json, sys

def of_hsx():
    return sorted(name for name in sys.modules if name.split(".")[0] == "hsx")

absent = [name for name in ("zarr", "asyncinotify", "asyncio_throttle") if importlib.util.find_spec(name) is None]
import hsx.serve, hsx.commands.serve
serve = of_hsx()
light = "torch" not in sys.modules and "sglang" not in sys.modules
found = hsx.serve.look_around()
for name in of_hsx():
    del sys.modules[name]
[entry] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="hsx")
entry.load()
import hsx.capture.hooks
plugin = of_hsx()
from hsx.capture.targets import missing_at_run_time
print(json.dumps({
    "absent": absent, "serve": serve, "light": light, "plugin": plugin, "missing": [*found.missing, *missing_at_run_time()],
    "version": found.engine_version, "entry": found.plugin,
}))
"""


@pytest.mark.parametrize("fixture", ["sglang_python", "sglang_python_0518"])
def test_serve_and_plugin_need_what_a_server_has(fixture: str, request: pytest.FixtureRequest) -> None:
    python: Path = request.getfixturevalue(fixture)
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run([str(python), "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["absent"] == ["zarr", "asyncinotify", "asyncio_throttle"]
    assert (found["entry"], found["light"], found["missing"]) == (True, True, [])
    assert found["version"] == ("0.5.18" if "0518" in fixture else "0.5.23")
    parts = {name.split(".")[1] for name in found["plugin"] if "." in name}
    assert parts == {"capture", "core", "errors"}
    allowed = {"capture", "cli", "commands", "config", "config_load", "core", "engines", "errors", "exit_codes", "serve"}
    assert {name.split(".")[1] for name in found["serve"] if "." in name} <= allowed
    assert [name for name in found["serve"] if name.startswith("hsx.engines.")] == ["hsx.engines.process"]
