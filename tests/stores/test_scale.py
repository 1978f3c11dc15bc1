"""What reading a store costs as samples grow in number, counted in files and bytes, which do not depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hsx
from hsx.core.layout import StoreLayout
from hsx.core.spec import CaptureSpec
from hsx.records import Row
from hsx.stores.group import create_store
from hsx.stores.samplers import TokenBudgetSampler
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.torch_dataset import HiddenStatesDataset
from hsx.testing.stores import build_store, random_states

if TYPE_CHECKING:
    from pathlib import Path

COUNT = """
import json, sys
import numpy
import hsx, hsx.stores.reader, hsx.verify
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event in ("open", "os.scandir", "os.listdir") else None)
counts = {}
def count(name, work):
    before = len(seen)
    result = work()
    counts[name] = len(seen) - before
    return result
store = count("open", lambda: hsx.open(sys.argv[1]))
count("committed", lambda: store.committed)
count("one", lambda: store.sample(len(store) // 2))
count("all", lambda: store.read(range(len(store)), threads=0))
assert count("verify", lambda: hsx.verify.verify(sys.argv[1], threads=1)).ok
print(json.dumps(counts))
"""


def counted(folder: Path, samples: int) -> dict[str, int]:
    """Files and folders opened by each step, on a store of so many samples."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    built = build_store(folder, [random_states(rng, 2, 2, 8) for _ in range(samples)], roots=("a",))
    run = subprocess.run(
        [sys.executable, "-c", COUNT, built.info.path], check=True, capture_output=True, text=True, timeout=600
    )
    counts: dict[str, int] = json.loads(run.stdout)
    return counts


def test_opening_looks_at_the_same_files_whatever_their_number(tmp_path: Path) -> None:
    few, more, many = (counted(tmp_path / str(samples), samples) for samples in (20, 40, 80))
    assert few["open"] == more["open"] == many["open"] < 30
    assert few["committed"] == many["committed"] == 1
    assert few["one"] == many["one"]
    assert many["all"] - more["all"] == 2 * (more["all"] - few["all"]) == 40
    # Of the threads that read for one that verifies, each may open the files of ids and masks that none has kept yet.
    assert abs(many["verify"] - more["verify"] - 2 * (more["verify"] - few["verify"])) <= 3 * 4 * 4


@pytest.mark.slow
def test_a_hundred_thousand_samples_take_bytes_each(tmp_path: Path) -> None:
    samples = 100_000
    with TokenTableWriter(tmp_path / "store") as table:
        for index in range(samples):
            length = 1 + index % 7
            row = Row(f"sample-{index}", np.zeros(length, np.int32), np.ones(length, np.uint8), index + 1)
            table.add(row)
        table.finish({"sha256": "none"}, {})
    info = create_store(tmp_path / "store", StoreLayout(samples, 7, 2, 8), CaptureSpec((1,), "post_norm"), {})
    for index in range(samples):
        (info.path / "hidden_states" / f"c.{index}.0.0.0").symlink_to("/nowhere")
    hsx.open(info.path)  # what is imported and cached is there
    with measured() as opened:
        store = hsx.open(info.path)
    assert opened["kept"] < 24 * samples + (1 << 20)
    assert opened["peak"] < 64 * samples + (16 << 20)  # a chunk of each array is proved
    with measured() as listed:
        assert len(store.committed) == samples
    assert listed["peak"] < 32 * samples + (1 << 20)
    assert store.index("sample-99999") == 99999
    dataset = HiddenStatesDataset(info.path)
    with measured() as batched:
        assert sum(map(len, TokenBudgetSampler(dataset.lengths, 64))) == samples
    assert batched["peak"] < 320 * samples


class measured:  # noqa: N801 - a context manager, used like a function
    """Bytes of Python's and numpy's memory: the peak within, and what is still there at its end."""

    def __enter__(self) -> dict[str, Any]:
        self.found: dict[str, Any] = {}
        tracemalloc.start()
        return self.found

    def __exit__(self, *_: object) -> None:
        kept, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        self.found |= {"kept": kept, "peak": peak}
