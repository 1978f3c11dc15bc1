"""`hsx.integrations.specforge` as a DataLoader uses it: forked workers, threads, odd indices."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader

from hsx.errors import RunError
from hsx.export import load_format
from hsx.export_run import export
from hsx.exporting import Request, plan
from hsx.integrations.specforge import Eagle3Dataset
from hsx.stores.reader import Store
from hsx.testing.exports import LENGTHS, Truth, exportable_store

if TYPE_CHECKING:
    from pathlib import Path

MAX_LEN = 96


def normalised(path: Path) -> dict[str, torch.Tensor]:
    """What SpecForge's normaliser makes of a file of its own format."""
    raw = torch.load(path, weights_only=True)
    mask = raw["loss_mask"][:MAX_LEN].clone()
    mask[-1] = 0
    return {
        "attention_mask": torch.ones_like(mask)[None],
        "loss_mask": mask[None],
        "target": raw["hidden_state"][:, :MAX_LEN],
        "hidden_state": raw["aux_hidden_state"][:, :MAX_LEN],
        "input_ids": raw["input_ids"][None, :MAX_LEN],
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[key].dtype and torch.equal(value, other[key]) for key, value in one.items()
    )


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_workers_and_threads_give_what_an_export_does(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    truth: Truth = request.getfixturevalue(kind)
    export(plan(Store(truth.path), load_format("specforge"), tmp_path, Request()))
    wanted = [normalised(tmp_path / "rows_0-2000" / f"data_{row}.ckpt") for row in range(len(LENGTHS))]
    dataset = Eagle3Dataset(truth.path, MAX_LEN)
    assert len(dataset) == len(LENGTHS)
    assert all(same(dataset[row], wanted[row]) for row in range(len(LENGTHS)))
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=300)
    assert [same(item, wanted[row]) for row, item in enumerate(loader)] == [True] * len(LENGTHS)
    rows = [row for _ in range(20) for row in range(len(LENGTHS))]
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda row: same(dataset[row], wanted[row]), rows))
    assert same(dataset[-1], wanted[-1])
    with pytest.raises(IndexError):
        dataset[len(LENGTHS)]
    chosen = Eagle3Dataset(truth.path, MAX_LEN, indices=[3, 1])
    assert [same(chosen[at], wanted[row]) for at, row in enumerate((3, 1))] == [True, True]


def test_samples_that_are_not_there_are_told_at_once(tmp_path: Path) -> None:
    truth = exportable_store(tmp_path / "store", "post_norm", committed=3)
    assert Eagle3Dataset(truth.path).indices == [0, 1, 2]
    for strange in (3, -1, 99):
        with pytest.raises(RunError, match=f"sample {strange} of store .* is not committed"):
            Eagle3Dataset(truth.path, indices=[0, strange])
    dataset = Eagle3Dataset(truth.path)
    truth.built.shard(1).unlink()
    with pytest.raises(RunError) as caught:
        dataset[1]
    assert caught.value.kind == "store_invalid"
    loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=300)
    with pytest.raises(RuntimeError, match=r"\[store_invalid\] shard .* cannot be opened"):
        list(loader)


def test_importing_hsx_brings_no_trainer_and_no_torch() -> None:
    program = (
        "import sys, hsx, hsx.integrations, hsx.export, hsx.ingest, hsx.cli;"
        "sys.exit(bool({'torch', 'pyarrow', 'specforge', 'speculators', 'hs_connectors', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 0
