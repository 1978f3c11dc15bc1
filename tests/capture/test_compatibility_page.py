"""docs/compatibility.md names every version and every model of the tests, and is made from their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hsx.capture.versions import KNOWN
from hsx.testing.tiny_models import KINDS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "generate_compatibility.py"


def test_the_page_has_every_version_and_a_result_for_each_that_was_run() -> None:
    text = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].lstrip("| "): line for line in text.splitlines() if line.startswith("| 0.")}
    assert list(rows) == list(KNOWN)
    for version, how in KNOWN.items():
        assert rows[version].split(" | ")[1].startswith(how)
    assert "no result here" not in text
    assert [kind for kind in KINDS if kind not in rows["0.5.23"]] == []


def test_the_page_is_made_from_results(tmp_path: Path) -> None:
    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), "--results", str(tmp_path), "--page", str(tmp_path / "page.md")]
        return subprocess.run(command, capture_output=True, text=True)

    assert run().returncode == 1
    result = {"kind": "granite", "architecture": "G", "version": "0.5.23", "layers": [0, 7], "final": "post_norm", "chunk": 37}
    result |= {"method": "norms", "prompts": 64, "worst": 3.2e-6}
    (tmp_path / "a.json").write_text(json.dumps(result))
    assert run().returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert "| `G` | 0.5.23 | h_0, h_7, post_norm | 37 | `norms` | 64 | under 1e-5 |" in text
    assert "| 0.5.23 | run: granite |" in text
    assert "| 0.5.18 | run: no result here |" in text
