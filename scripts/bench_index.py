"""Rate and memory of indexing a dataset of many small samples, JSONL and Parquet, beside a plain reader of the same file.

    python scripts/bench_index.py [--rows 1000000] [--form jsonl|parquet] [--tokens 16] [--out build/bench/index.json]

Writes a file of tokenised rows with loss masks, reads it with what people would take otherwise (`json.loads` a line; pyarrow's
`to_pylist` a batch), which neither checks nor keeps anything, and indexes it. Each in a process of its own, for its peak
resident memory; that of indexing should not depend on the number of rows. The ratio to the plain reader does not depend on the
machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from hsx.datasets.rows import Limits
from hsx.datasets.sources import Source, find_files
from hsx.datasets.tokens import TokenRows
from hsx.index import build_index
from hsx.stores.tokens import TokenTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")
GROUP: Final = 100_000
OUT: Final = Path(__file__).parent.parent / "build" / "bench" / "index.json"
PEERS: Final = {"jsonl": "json.loads", "parquet": "pyarrow to_pylist"}


def ids_of(number: int, tokens: int) -> list[int]:
    """The ids of row `number`: 1 to `tokens` of them."""
    return [(number + place) % 1000 for place in range(1 + number % tokens)]


def mask_of(ids: list[int]) -> list[int]:
    """Its loss mask: the second half counts, the last token always."""
    return [int(2 * place >= len(ids) - 1) for place in range(len(ids))]


def write_table(path: Path, rows: int, tokens: int) -> None:
    """Writes the rows as Parquet, in row groups of 100,000."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema({"id": pa.string(), "input_ids": pa.large_list(pa.int32()), "loss_mask": pa.list_(pa.int8())})
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, GROUP):
            numbers = range(start, min(rows, start + GROUP))
            ids = [ids_of(number, tokens) for number in numbers]
            table = {"id": [f"sample-{n:08d}" for n in numbers], "input_ids": ids, "loss_mask": list(map(mask_of, ids))}
            writer.write_table(pa.table(table, schema))


def write_rows(path: Path, rows: int, tokens: int) -> None:
    """Writes the rows as JSONL."""
    with path.open("w", encoding="utf-8") as file:
        for number in range(rows):
            ids = ids_of(number, tokens)
            file.write(f'{{"id": "sample-{number:08d}", "input_ids": {ids}, "loss_mask": {mask_of(ids)}}}\n')


def write(form: str, path: Path, rows: int, tokens: int) -> None:
    """Writes the file."""
    (write_table if form == "parquet" else write_rows)(path, rows, tokens)


def read_plainly(form: str, path: Path) -> dict[str, float]:
    """Reads all rows as Python objects and does nothing with them."""
    count = 0
    with spent() as cost:
        if form == "jsonl":
            with path.open("rb") as file:
                for line in file:
                    count += len(json.loads(line)["input_ids"])
        else:
            from pyarrow.parquet import ParquetFile

            with ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=4096, use_threads=False):
                    for row in batch.to_pylist():
                        count += len(row["input_ids"])
    return {**cost, "tokens": count}


def index(path: Path, folder: Path, tokens: int) -> dict[str, float]:
    """Indexes the file into `folder`."""
    with spent() as cost:
        dataset = TokenRows(Source(find_files(path)), Limits(vocab_size=1000, max_tokens=tokens))
        summary = build_index(dataset, folder / "store", "refuse", lambda _rows, _tokens: None, folder / "job")
    return {**cost, "rows": summary.samples, "tokens": summary.tokens}


def read_back(folder: Path, rows: int) -> dict[str, float]:
    """Microseconds a sample of random reads, and seconds of the first look-up of an id."""
    table = TokenTable(folder / "store")
    drawn = random.Random(2)
    picks = [drawn.randrange(rows) for _ in range(10_000)]
    start = time.perf_counter()
    read = sum(len(table.input_ids(pick)) for pick in picks)
    read_s = time.perf_counter() - start
    start = time.perf_counter()
    found = table.index_of(f"sample-{rows - 1:08d}")
    lookup_s = time.perf_counter() - start
    assert found == rows - 1
    assert read == sum(int(table.lengths[pick]) for pick in picks)
    return {"us_per_sample": round(read_s / len(picks) * 1e6, 2), "first_lookup_s": round(lookup_s, 3)}


@contextmanager
def spent() -> Iterator[dict[str, float]]:
    """Seconds, processor seconds and peak resident memory of what is done meanwhile; filled in at the end."""
    cost: dict[str, float] = {}
    wall, cpu = time.perf_counter(), time.process_time()
    yield cost
    cost["seconds"] = round(time.perf_counter() - wall, 3)
    cost["cpu_s"] = round(time.process_time() - cpu, 3)
    cost["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def apart(work: Callable[..., T], *arguments: Any) -> T:  # noqa: ANN401 - whatever the function takes
    """What the function returns, called in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def measure(folder: Path, form: str, rows: int, tokens: int) -> dict[str, Any]:
    """One form: a fresh file, the plain reader, the index, and reading back."""
    path = folder / f"rows.{form}"
    apart(write, form, path, rows, tokens)
    plain = apart(read_plainly, form, path)
    indexed = apart(index, path, folder / form, tokens)
    assert plain["tokens"] == indexed["tokens"]
    nbytes = path.stat().st_size
    return {
        "peer": PEERS[form],
        "input_mb": round(nbytes / 1e6, 1),
        "rows_per_s": round(rows / indexed["seconds"]),
        "mb_per_s": round(nbytes / 1e6 / indexed["seconds"], 1),
        "peak_rss_mb": indexed["peak_rss_mb"],
        "seconds_x_peer": round(indexed["seconds"] / plain["seconds"], 2),
        "cpu_x_peer": round(indexed["cpu_s"] / plain["cpu_s"], 2),
        "index": indexed,
        "plain": plain,
        "read_back": read_back(folder / form, rows),
    }


def main() -> int:
    """Prints the measurements; exit code 0."""
    parser = argparse.ArgumentParser(description="Rate and peak memory of the token index.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--form", choices=tuple(PEERS), help="default: both")
    parser.add_argument("--tokens", type=int, default=16, help="of the longest row (default: 16)")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in [arguments.form] if arguments.form else PEERS:
            results[form] = measure(Path(folder), form, arguments.rows, arguments.tokens)
    document = {"rows": arguments.rows, "cores": os.cpu_count(), "load_before": load, **results}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    names = ("input_mb", "rows_per_s", "mb_per_s", "peak_rss_mb", "seconds_x_peer", "cpu_x_peer", "peer")
    sys.stdout.write(f"{arguments.rows} rows, load {load:.1f}\n\n{'':<10}" + "".join(f"{name:>20}" for name in names) + "\n")
    for form, result in results.items():
        sys.stdout.write(f"{form:<10}" + "".join(f"{result[name]:>20}" for name in names) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
