"""What README says to try works as it stands there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hsx
from hsx.testing.servers import free_port

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_try_without_sglang(tmp_path: Path) -> None:
    commands = README.read_text(encoding="utf-8").split("```sh\n")[1].split("```")[0]
    # Ports and a folder that another test, or the reader's own try, may have at the moment.
    dumps = Path("/dev/shm") / f"hsx-{tmp_path.parent.parent.name}-readme-{os.getpid()}"
    commands = commands.replace("/dev/shm/hsx-try", str(dumps))
    commands = commands.replace('ownership = "spawn"', f'ownership = "spawn", port = {free_port()}')
    commands = commands.replace("\nEND\n", "\nstatus.port = 0\nEND\n")
    home = f'python() {{ "{sys.executable}" "$@"; }}; hsx() {{ python -m hsx "$@"; }}\nset -e\n'
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    try:
        done = subprocess.run(
            ["bash", "-c", home + commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
    finally:
        shutil.rmtree(dumps, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "it fits" in done.stdout
    assert "result     whole: everything that was read is proved" in done.stdout
    assert hsx.open(tmp_path / "store.zarr").committed.tolist() == [0, 1, 2]
    assert len(list((tmp_path / "files").rglob("data_*.ckpt"))) == 3
