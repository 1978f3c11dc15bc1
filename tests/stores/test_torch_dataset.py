"""The torch Dataset, in DataLoaders with several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hsx.errors import RunError
from hsx.stores.samplers import EpochSampler, TokenBudgetSampler
from hsx.stores.torch_dataset import HiddenStatesDataset, Item, collate_packed, collate_padded
from hsx.testing.stores import BuiltStore, build_store, random_states

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    """Twelve samples, eleven of them committed."""
    rng = np.random.default_rng(3)
    return build_store(
        tmp_path_factory.mktemp("dataset"), [random_states(rng, 10 + 7 * i, 2, 8) for i in range(12)], committed=11
    )


def same_bits(tensor: torch.Tensor, bits: np.typing.NDArray[np.uint16]) -> bool:
    return np.array_equal(tensor.view(torch.uint16).numpy(), bits)


def test_items_are_the_committed_samples(built: BuiltStore) -> None:
    dataset = HiddenStatesDataset(built.info.path)
    assert len(dataset) == 11
    assert dataset.state_names == ("h_1", "post_norm")
    item = dataset[10]
    assert int(item["index"]) == 10
    assert item["input_ids"].tolist() == built.input_ids[10].tolist()
    assert item["loss_mask"].shape == item["input_ids"].shape
    assert item["hidden_states"].dtype == torch.bfloat16
    assert same_bits(item["hidden_states"], built.states[10])
    with pytest.raises(IndexError):
        dataset[11]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_read_every_sample_once(built: BuiltStore, method: str) -> None:
    dataset = HiddenStatesDataset(built.info.path)
    assert int(dataset[0]["index"]) == 0  # the store is in use before the workers start
    loader = DataLoader(
        dataset, batch_size=3, num_workers=2, multiprocessing_context=method, collate_fn=collate_padded, timeout=600
    )
    seen = []
    for batch in loader:
        for row, index in enumerate(batch["index"].tolist()):
            tokens = len(built.states[index])
            seen.append(index)
            assert int(batch["attention_mask"][row].sum()) == tokens
            assert batch["input_ids"][row, :tokens].tolist() == built.input_ids[index].tolist()
            assert same_bits(batch["hidden_states"][row, :tokens], built.states[index])
            assert not batch["hidden_states"][row, tokens:].any()
    assert seen == list(range(11))


def test_chosen_indices_keep_their_order(built: BuiltStore) -> None:
    dataset = HiddenStatesDataset(built.info.path, [5, 2, 2])
    assert [int(dataset[i]["index"]) for i in range(len(dataset))] == [5, 2, 2]


def test_uncommitted_index_is_refused(built: BuiltStore) -> None:
    with pytest.raises(RunError, match=r"sample 11 of store .* is not committed") as error:
        HiddenStatesDataset(built.info.path, [1, 11])
    assert error.value.kind == "sample_unknown"


@pytest.mark.parametrize(("states", "columns"), [(None, [0, 1]), (["post_norm"], [1])])
@pytest.mark.parametrize(("workers", "method"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)])
def test_packed_batches(
    built: BuiltStore, states: list[str] | None, columns: list[int], workers: int, method: str | None
) -> None:
    dataset = HiddenStatesDataset(built.info.path, states=states, max_tokens=60)
    assert dataset.lengths.tolist() == [min(10 + 7 * i, 60) for i in range(11)]
    assert dataset.state_names == tuple(states or ("h_1", "post_norm"))
    sampler = TokenBudgetSampler(dataset.lengths, 128, seed=5)
    loader: DataLoader[Item] = DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, multiprocessing_context=method, collate_fn=collate_packed
    )
    seen = []
    for batch, wanted in zip(loader, sampler, strict=True):
        assert batch["index"].tolist() == wanted
        seen += wanted
        bounds = batch["cu_seqlens"].tolist()
        lengths = dataset.lengths[wanted].tolist()
        assert batch["cu_seqlens"].dtype == torch.int32
        assert np.diff(bounds).tolist() == lengths
        assert int(batch["max_seqlen"]) == max(lengths)
        assert batch["position_ids"].tolist() == [position for tokens in lengths for position in range(tokens)]
        assert batch["hidden_states"].shape == (bounds[-1], len(columns), 8)
        for at, index in enumerate(wanted):
            part = slice(bounds[at], bounds[at + 1])
            assert batch["input_ids"][part].tolist() == built.input_ids[index][:60].tolist()
            assert batch["loss_mask"][part].tolist() == [i % 2 for i in range(lengths[at])]
            assert same_bits(batch["hidden_states"][part].contiguous(), built.states[index][:60, columns])
    assert sorted(seen) == list(range(11))


def test_packing_copies_no_states_that_were_read_together(built: BuiltStore) -> None:
    dataset = HiddenStatesDataset(built.info.path)
    items = dataset.__getitems__([3, 1, 7])
    joined = collate_packed(items)["hidden_states"]
    assert joined.data_ptr() == items[0]["hidden_states"].data_ptr()
    assert same_bits(joined, np.concatenate([built.states[i] for i in (3, 1, 7)]))
    apart = collate_packed([dataset[3], dataset[1], dataset[7]])["hidden_states"]
    reordered = collate_packed([items[1], items[0], items[2]])["hidden_states"]
    assert torch.equal(apart.view(torch.uint16), joined.view(torch.uint16))
    assert same_bits(reordered, np.concatenate([built.states[i] for i in (1, 3, 7)]))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_order_does_not_depend_on_the_workers(built: BuiltStore, workers: int) -> None:
    dataset = HiddenStatesDataset(built.info.path)
    sampler = EpochSampler(len(dataset), seed=9)
    sampler.set_epoch(3)
    loader: DataLoader[Item] = DataLoader(
        dataset, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=collate_padded
    )
    assert [index for batch in loader for index in batch["index"].tolist()] == list(sampler)


def test_a_damaged_shard_stops_the_loader_with_its_name(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 2, 8) for i in range(3)], roots=["a"])
    built.shard(1).write_bytes(b"")
    loader: DataLoader[Item] = DataLoader(HiddenStatesDataset(built.info.path), num_workers=1, collate_fn=collate_packed)
    with pytest.raises(RuntimeError, match=r"store_invalid\] shard .*c\.1\.0\.0\.0"):  # torch cannot pass RunError on
        list(loader)


def test_what_the_store_does_not_have_is_refused(built: BuiltStore, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no state 'h_9'; it has h_1, post_norm") as error:
        HiddenStatesDataset(built.info.path, states=["h_9"])
    assert error.value.kind == "sample_unknown"
    with pytest.raises(RunError, match="root 'z' is given"):
        HiddenStatesDataset(built.info.path, roots={"z": tmp_path})
    with pytest.raises(ValueError, match="max_tokens is 0; expected at least 1"):
        HiddenStatesDataset(built.info.path, max_tokens=0)
