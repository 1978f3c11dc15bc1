"""The environment with the trainers, whose own code judges exports and writes datasets."""

from __future__ import annotations

import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def trainers_python() -> Path:
    """The Python of an environment with the trainers. Without it, tests fail in CI and are skipped elsewhere."""
    import pytest

    path = Path(os.environ.get("HSX_TRAINERS_PYTHON") or REPOSITORY / ".venvs" / "trainers" / "bin" / "python")
    if not path.exists():
        reason = f"{path} is missing; run scripts/setup_trainers.sh, or set HSX_TRAINERS_PYTHON"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
