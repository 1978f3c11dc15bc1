"""Rate and memory of indexing a dataset of many small samples.

    python scripts/bench_index.py [--rows 1000000] [--json]

Writes a JSONL file of tiny tokenised rows, indexes it, reads samples back, and prints rates and the peak resident memory of
the process. The peak should not depend on the number of rows.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import Limits
from hsx.datasets.tokens import TokenRows
from hsx.index import build_index
from hsx.stores.tokens import TokenTable


def write_rows(path: Path, rows: int) -> None:
    """Writes `rows` rows of 1 to 16 tokens."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            ids = [(number + place) % 1000 for place in range(1 + number % 16)]
            file.write(f'{{"id": "sample-{number:08d}", "input_ids": {ids}}}\n')


def measure(folder: Path, rows: int) -> dict[str, float]:
    """Indexes a fresh file of `rows` rows in `folder`; seconds, rates and bytes."""
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    dataset = TokenRows(JsonlFile(path), Limits(vocab_size=1000, max_tokens=64))
    summary = build_index(dataset, folder / "store", "refuse", lambda _rows, _tokens: None, folder / "job")
    index_s = time.perf_counter() - start
    table = TokenTable(folder / "store")
    picks = [random.Random(2).randrange(rows) for _ in range(10_000)]
    start = time.perf_counter()
    read = sum(len(table.input_ids(index)) for index in picks)
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    found = table.index_of(f"sample-{rows - 1:08d}")
    lookup_s = time.perf_counter() - start
    assert found == rows - 1
    assert read == sum(int(table.lengths[index]) for index in picks)
    return {
        "rows": summary.samples,
        "tokens": summary.tokens,
        "index_s": round(index_s, 2),
        "rows_per_s": round(rows / index_s),
        "read_us_per_sample": round(read_s / len(picks) * 1e6, 2),
        "first_id_lookup_s": round(lookup_s, 3),
        "rss_before_mb": round(before / 1024, 1),
        "rss_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> int:
    """Prints the measurements; exit code 0."""
    parser = argparse.ArgumentParser(description="Rate and peak memory of the token index.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.rows)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        for name, value in result.items():
            sys.stdout.write(f"{name:>20}  {value:>12}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
