"""The job that `make demo` writes: one that hsx takes, and whose engine is read back and not guessed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.config_load import load

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
