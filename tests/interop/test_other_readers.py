"""Every reader sees the same bits: zarr-python 3.1 and 3.4, zarrs, tensorstore and hsx; raw and compressed stores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hsx.core.layout import NAN_BITS
from hsx.testing.stores import build_store, random_bits

LENGTHS = (1, 64, 65, 300)
REPOSITORY = Path(__file__).parents[2]


def zarr_34() -> Path:
    """The Python of an environment with zarr 3.4. Without it, tests fail in CI and are skipped elsewhere.

    Skipped in CI, too, where the set-up found no Python that is new enough.
    """
    path = Path(os.environ.get("HSX_ZARR_PYTHON") or REPOSITORY / ".venvs" / "zarr-3.4" / "bin" / "python")
    if not path.exists():
        absent = path.parents[1] / "absent"
        if absent.exists():
            pytest.skip(absent.read_text())
        reason = f"{path} is missing; run scripts/setup_zarr.sh, or set HSX_ZARR_PYTHON"
        assert os.environ.get("CI", "").lower() != "true", reason
        pytest.skip(reason)
    return path


@pytest.fixture(params=["zarr 3.1", pytest.param("zarr 3.4", marks=pytest.mark.slow)])
def python(request: pytest.FixtureRequest) -> Path:
    """An interpreter, of this environment or the other."""
    return Path(sys.executable) if request.param == "zarr 3.1" else zarr_34()


@pytest.mark.parametrize("codec", ["none", "blosc", "zstd"])
def test_every_reader_sees_the_same_bits(tmp_path: Path, python: Path, codec: str) -> None:
    rng = np.random.default_rng(0)
    states = [random_bits(rng, tokens, 3, 40) for tokens in LENGTHS]
    built = build_store(tmp_path, states, roots=["a", "b"], codec=codec)
    out = tmp_path / "out"
    out.mkdir()
    program = Path(__file__).with_name("program.py")
    arguments = [str(program), str(built.info.path), str(len(LENGTHS)), str(out)]
    subprocess.run([python, "-W", "error", *arguments], check=True, timeout=600, cwd=tmp_path)
    for way in ("zarr", "zarrs", "tensorstore"):
        for index, truth in enumerate(states):
            found = np.load(out / f"{way}-{index}.npy")
            assert np.array_equal(found[: len(truth)], truth), (way, index)
            assert bool((found[len(truth) :] == NAN_BITS).all()), (way, index)
    for index, truth in enumerate(states):
        assert np.array_equal(np.load(out / f"hsx-{index}.npy"), truth)
