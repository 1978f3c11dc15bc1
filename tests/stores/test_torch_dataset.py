"""The torch Dataset, in DataLoaders with several workers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hsx.errors import RunError
from hsx.stores.torch_dataset import HiddenStatesDataset, collate_padded
from hsx.testing.stores import BuiltStore, build_store, random_states


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
        dataset, batch_size=3, num_workers=2, multiprocessing_context=method, collate_fn=collate_padded, timeout=100
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
