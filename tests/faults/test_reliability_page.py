"""docs/reliability.md is whole: every row of the matrix, each with what its test saw."""

from __future__ import annotations

from pathlib import Path

from hsx.testing.fault_matrix import ROWS

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


def test_the_page_has_every_row_and_every_result() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")]
    assert named == list(ROWS)
    assert "not run" not in text
