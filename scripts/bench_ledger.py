"""The ledger of a very large job: how long things take, and how much memory. Writes build/bench/ledger.json.

Each measurement runs in a process of its own, so that its peak of memory is its own. Roots and view are measured with as many
files as `--files` says: ten million of them would measure the file system.

Run it alone: `python scripts/bench_ledger.py [--rows 10000000] [--files 200000]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from hsx.core.layout import StoreLayout, shard_key
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.records import Commit, Receipt
from hsx.stores.attach import attach_roots
from hsx.stores.group import StoreInfo, create_store
from hsx.stores.ledger import SqliteLedger, create
from hsx.stores.ledger_backup import backup
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import RECKONED, TOTALS
from hsx.stores.root import discard_strays
from hsx.stores.view import UnionView

RUN = "0000abcd"
EPOCHS = [f"00000000-0000-4000-8000-{number:012d}" for number in range(8)]
OUT = Path("build/bench/ledger.json")


def making(folder: Path, rows: int) -> dict[str, Any]:
    """A ledger of which all but every hundredth sample is committed, in 8 epochs of which 7 are vouched for."""
    path = folder / "ledger.sqlite"
    began = time.perf_counter()
    create(path, RUN, {}, (1 + index % 4000 for index in range(rows)), [])
    seconds = time.perf_counter() - began
    trigger = next(part for part in TOTALS.split("CREATE ") if part.startswith("TRIGGER"))
    with closing(sqlite3.connect(path)) as db:
        db.execute("DROP TRIGGER moved")
        share = -(-rows // len(EPOCHS))
        for number, epoch in enumerate(EPOCHS):
            db.execute(
                "UPDATE samples SET state = 'committed', attempts = 1, marker = 'hsx1-0000abcd-' || idx || '-1-' || tokens, "
                "epoch = ?, sequence = idx, root = CASE idx % 2 WHEN 0 THEN 'a' ELSE 'b' END, nbytes = tokens * 57344, "
                "crc32c = idx, adopted = 0, committed_at = 1.7e9 + idx / 10, "
                'timings = \'{"request": 1.234567, "dump": 0.012345, "validate": 0.123456, "write": 0.234567}\' '
                "WHERE idx >= ? AND idx < ? AND idx % 100 != 0",
                (epoch, number * share, (number + 1) * share),
            )
            vouched = rows if number < len(EPOCHS) - 1 else 0
            db.execute("INSERT INTO epochs (epoch, began, record, vouched) VALUES (?, ?, '{}', ?)", (epoch, number, vouched))
        db.execute("DELETE FROM totals")
        db.commit()
        db.executescript(RECKONED + "CREATE " + trigger)
    return {"create_s": seconds, "file_mb": path.stat().st_size / 1e6}


def opening(folder: Path, _: int) -> dict[str, Any]:
    """What every start of a run does with the ledger alone."""
    began = time.perf_counter()
    ledger = SqliteLedger(folder / "ledger.sqlite")
    opened = time.perf_counter() - began

    async def work() -> dict[str, float]:
        steps = {}
        for name, step in {
            "counts_s": ledger.counts(),
            "unvouched_s": ledger.unvouched(),
            "last_doubtful_s": ledger.last_doubtful(EPOCHS[-1], 64),
            "overdue_s": ledger.overdue(),
        }.items():
            at = time.perf_counter()
            await step
            steps[name] = time.perf_counter() - at
        at = time.perf_counter()
        leases = await ledger.acquire(64)
        steps["acquire_64_s"] = time.perf_counter() - at
        group = [
            Commit(
                lease,
                Marker(RUN, lease.sample.index, lease.attempt, lease.sample.tokens),
                EPOCHS[-1],
                lease.sample.index,
                Receipt("a", 57344, 1),
                {"request": 1.0},
                adopted=False,
            )
            for lease in leases
        ]
        at = time.perf_counter()
        await ledger.commit(group)
        steps["commit_64_s"] = time.perf_counter() - at
        at = time.perf_counter()
        await ledger.requeue_damaged([lease.sample.index for lease in leases], "chunk", "a bit")
        steps["requeue_64_s"] = time.perf_counter() - at
        await ledger.close()
        return steps

    return {"open_s": opened, **asyncio.run(work())}


def reading(folder: Path, _: int) -> dict[str, Any]:
    """What commands that only read do first."""
    began = time.perf_counter()
    with LedgerReader(folder / "ledger.sqlite") as reader:
        opened = time.perf_counter() - began
        reader.counts()
        counted = time.perf_counter() - began - opened
        reader.longest()
        return {"open_s": opened, "counts_s": counted, "longest_s": time.perf_counter() - began - opened - counted}


def streaming(folder: Path, _: int) -> dict[str, Any]:
    """Every committed row, as `hsx verify` reads them."""
    began = time.perf_counter()
    with LedgerReader(folder / "ledger.sqlite") as reader:
        rows = sum(1 for _row in reader.committed())
    return {"rows": rows, "seconds": time.perf_counter() - began}


def strays(folder: Path, rows: int) -> dict[str, Any]:
    """`discard_strays` on a root without files: what it reads of the ledger, and the memory for each sample."""
    store = _store(folder / "strays", rows)
    _, roots = attach_roots(store, {"a": folder / "strays"})
    ledger = SqliteLedger(folder / "ledger.sqlite")
    began = time.perf_counter()
    discard_strays(roots, ledger.committed_roots(), rows, ledger.revoked())
    seconds = time.perf_counter() - began
    asyncio.run(ledger.close())
    return {"seconds": seconds}


def copying(folder: Path, _: int) -> dict[str, Any]:
    """The online backup."""
    began = time.perf_counter()
    (error,) = backup(folder / "ledger.sqlite", {"a": folder}).values()
    assert error is None, error
    seconds = time.perf_counter() - began
    nbytes = (folder / "hsx-ledger.sqlite").stat().st_size
    (folder / "hsx-ledger.sqlite").unlink()
    return {"seconds": seconds, "nbytes": nbytes}


def migrating(folder: Path, _: int) -> dict[str, Any]:
    """A ledger of version 2 that is opened by this hsx."""
    old = folder / "old.sqlite"
    shutil.copyfile(folder / "ledger.sqlite", old)
    with closing(sqlite3.connect(old)) as db:
        db.executescript("DROP TRIGGER moved; DROP TABLE totals; DROP INDEX captured; PRAGMA user_version = 2")
    began = time.perf_counter()
    ledger = SqliteLedger(old)
    seconds = time.perf_counter() - began
    asyncio.run(ledger.close())
    old.unlink()
    return {"seconds": seconds}


def linking(folder: Path, files: int) -> dict[str, Any]:
    """`UnionView.repair` where every link is right, and `discard_strays` among as many shards."""
    place = folder / f"links-{files}"
    store, roots = attach_roots(_store(place, files), {"a": place})
    view = UnionView(store)
    for index in range(files):
        (roots[0].folder / shard_key(index)).touch()
        view.link(index, "a")
    before = _peak_mb()
    began = time.perf_counter()
    view.repair((index, "a") for index in range(files))
    repaired = time.perf_counter() - began
    discard_strays(roots, ((index, "a") for index in range(files)), files)
    discarded = time.perf_counter() - began - repaired
    shutil.rmtree(place)
    return {
        "files": files,
        "repair_us_per_sample": repaired / files * 1e6,
        "strays_us_per_sample": discarded / files * 1e6,
        "more_mb": _peak_mb() - before,
    }


def _store(path: Path, samples: int) -> StoreInfo:
    path.mkdir(exist_ok=True)
    return create_store(path / "store", StoreLayout(samples, 64, 2, 8), CaptureSpec((1,), "post_norm"), {}, RUN)


def _peak_mb() -> float:
    """Of this program alone: getrusage counts in what its parent had when it forked."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


STEPS = {step.__name__: step for step in (making, opening, reading, streaming, strays, copying, migrating, linking)}


def measure(step: str, folder: Path, number: int) -> dict[str, Any]:
    """One step in a process of its own; `peak_mb` is its whole memory, the interpreter included."""
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--rows", str(number)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--files", type=int, default=200_000)
    parser.add_argument("--step", choices=STEPS)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.step:
        result = STEPS[args.step](args.folder, args.rows)
        print(json.dumps({**result, "peak_mb": _peak_mb()}))  # noqa: T201 - for the parent process
        return
    found: dict[str, Any] = {}
    for rows in (args.rows // 100, args.rows):
        with tempfile.TemporaryDirectory(dir=args.folder) as name:
            folder = Path(name)
            of_rows: dict[str, Any] = {}
            for step in ("making", "opening", "reading", "streaming", "strays", "copying", "migrating"):
                of_rows[step] = measure(step, folder, rows)
            found[str(rows)] = of_rows
            print(json.dumps({str(rows): of_rows}, indent=2))  # noqa: T201
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        found["links"] = [measure("linking", Path(name), files) for files in (args.files // 10, args.files)]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found["links"], indent=2))  # noqa: T201


if __name__ == "__main__":
    main()
