"""Rate and memory of indexing a dataset of many small samples.

    python scripts/bench_index.py [--rows 1000000] [--form jsonl|parquet] [--tokens 16] [--json]

Writes a file of small tokenised rows, indexes it, reads samples back, and prints rates and the peak resident memory of
the process. The peak should not depend on the number of rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from hsx.datasets.rows import Limits
from hsx.datasets.sources import Source, find_files
from hsx.datasets.tokens import TokenRows
from hsx.index import build_index
from hsx.stores.tokens import TokenTable

BATCH = 10_000


def ids_of(number: int, tokens: int) -> list[int]:
    """The ids of row `number`: 1 to `tokens` of them."""
    return [(number + place) % 1000 for place in range(1 + number % tokens)]


def write_table(path: Path, rows: int, tokens: int) -> None:
    """Writes the same rows as Parquet, in row groups of 100,000."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema({"id": pa.string(), "input_ids": pa.large_list(pa.int32())})
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, BATCH * 10):
            numbers = range(start, min(rows, start + BATCH * 10))
            table = {"id": [f"sample-{n:08d}" for n in numbers], "input_ids": [ids_of(n, tokens) for n in numbers]}
            writer.write_table(pa.table(table, schema))


def write_rows(path: Path, rows: int, tokens: int) -> None:
    """Writes `rows` rows of 1 to `tokens` tokens."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            file.write(f'{{"id": "sample-{number:08d}", "input_ids": {ids_of(number, tokens)}}}\n')


def write_apart(form: str, path: Path, rows: int, tokens: int) -> None:
    """Writes the file in a process of its own, so that this one's peak memory is that of indexing."""
    written = multiprocessing.get_context("spawn").Process(
        target=write_table if form == "parquet" else write_rows, args=(path, rows, tokens)
    )
    written.start()
    written.join()
    if written.exitcode:
        raise RuntimeError(f"writing {path} ended with {written.exitcode}")


def measure(folder: Path, rows: int, form: str, tokens: int) -> dict[str, float]:
    """Indexes a fresh file of `rows` rows in `folder`; seconds, rates and bytes."""
    path = folder / "rows"
    write_apart(form, path, rows, tokens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    dataset = TokenRows(Source(find_files(path)), Limits(vocab_size=1000, max_tokens=tokens))
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
        "dataset_mb": round(path.stat().st_size / 1e6, 1),
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
    parser.add_argument("--form", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--tokens", type=int, default=16, help="of the longest row (default: 16)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), arguments.rows, arguments.form, arguments.tokens)
    if arguments.json:
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        sys.stdout.write(f"{'form':>20}  {arguments.form:>12}\n")
        for name, value in result.items():
            sys.stdout.write(f"{name:>20}  {value:>12}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
