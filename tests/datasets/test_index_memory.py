"""Memory of indexing does not grow with the number of rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench_index.py"


def measure(rows: int, *more: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(BENCH), "--rows", str(rows), "--json", *more],
        capture_output=True,
        text=True,
        check=True,
        timeout=500,
    )
    result: dict[str, float] = json.loads(done.stdout)
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_rows_take_little_more_memory_than_ten_thousand() -> None:
    small, large = measure(10_000), measure(1_000_000)
    assert (small["rows"], large["rows"]) == (10_000, 1_000_000)
    # A million Python strings and their set would take about 120 MB more; buffers, SQLite's cache and offsets take about 60.
    assert large["rss_peak_mb"] - small["rss_peak_mb"] < 100


@pytest.mark.slow
def test_bench_runs_on_a_few_rows() -> None:
    assert measure(500)["tokens"] == 4226


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rows_of_a_table_stay_below_half_a_gigabyte() -> None:
    result = measure(100_000, "--form", "parquet")
    assert (result["rows"], result["tokens"]) == (100_000, 850_000)
    assert result["rss_peak_mb"] < 500
