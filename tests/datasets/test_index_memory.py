"""Memory of indexing does not grow with the number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench_index.py"


def measure(out: Path, rows: int) -> dict[str, Any]:
    subprocess.run([sys.executable, str(BENCH), "--rows", str(rows), "--out", str(out)], check=True, timeout=800)
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_follows_neither_rows_nor_form(tmp_path: Path) -> None:
    small, large = measure(tmp_path / "small", 60_000), measure(tmp_path / "large", 240_000)
    for form in ("jsonl", "parquet"):
        assert (small[form]["index"]["rows"], large[form]["index"]["rows"]) == (60_000, 240_000)
        assert large[form]["index"]["tokens"] == 8.5 * 240_000
        assert large[form]["peak_rss_mb"] < 500
        # Offsets and lengths of the further 180,000 rows take about 10 MB; their ids as strings in a set would take 22 MB more.
        assert large[form]["peak_rss_mb"] - small[form]["peak_rss_mb"] < 22
