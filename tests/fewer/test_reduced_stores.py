"""Reading a store that keeps less: rows with their positions, in parts, spread out, and as batches for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from torch.utils.data import DataLoader

import hsx
from hsx.core.layout import StoreLayout, shard_key
from hsx.errors import RunError
from hsx.stores.samplers import TokenBudgetSampler
from hsx.stores.torch_dataset import HiddenStatesDataset, collate_packed, collate_padded
from hsx.testing.stores import BuiltStore, build_store, random_states
from hsx.verify import verify

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTHS = (150, 5, 64, 90, 1, 300)
CONTEXT = 3
DOCS = Path(__file__).parents[2] / "docs" / "on-disk-format.md"


def masks() -> list[NDArray[np.uint8]]:
    made = [(np.random.default_rng(tokens).random(tokens) < 0.04).astype(np.uint8) for tokens in LENGTHS]
    for mask in made:
        mask[-1] = 1
    return made


def wanted_positions(mask: NDArray[np.uint8]) -> list[int]:
    return [at for at in range(len(mask)) if mask[max(at - CONTEXT, 0) : at + CONTEXT + 1].any()]


@pytest.fixture(scope="module", params=["bf16", "fp8_e4m3"])
def built(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> BuiltStore:
    """Six samples, of which the tokens near those of the loss mask are kept."""
    rng = np.random.default_rng(5)
    states = [random_states(rng, tokens, 3, 16) for tokens in LENGTHS]
    folder = tmp_path_factory.mktemp("store")
    return build_store(folder, states, masks=masks(), kept="loss", context=CONTEXT, dtype=request.param)


def values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return np.asarray(bits.view(ml_dtypes.bfloat16), np.float32)


def assert_close(built: BuiltStore, found: torch.Tensor, wanted: NDArray[np.uint16]) -> None:
    """Equal in a bf16 store, within half a step of e4m3 in an fp8 one."""
    assert found.dtype == torch.bfloat16
    if built.info.layout.dtype == "bf16":
        assert np.array_equal(found.view(torch.uint16).numpy(), wanted)
        return
    truth = values(wanted)
    scale = np.abs(truth).max(axis=-1, keepdims=True, initial=0) / 448
    bound = np.maximum(2.0**-4 * np.abs(truth), 2.0**-10 * scale) + 2.0**-8 * np.abs(truth)
    assert bool((np.abs(found.float().numpy() - truth) <= bound).all())


@pytest.mark.parametrize("index", range(len(LENGTHS)))
def test_rows_come_with_their_positions(built: BuiltStore, index: int) -> None:
    store = hsx.open(built.info.path)
    sample, wanted = store[index], wanted_positions(masks()[index])
    assert sample.positions.tolist() == store.positions_numpy(index).tolist() == wanted
    assert int(store.row_counts[index]) == len(wanted)
    assert sample.tokens == len(sample.input_ids) == LENGTHS[index]
    assert sample.input_ids.tolist() == built.input_ids[index].tolist()
    assert sample.loss_mask.tolist() == masks()[index].tolist()
    assert_close(built, sample.hidden_states, built.states[index][wanted])
    assert torch.equal(sample.state("post_norm"), sample.hidden_states[:, 2])
    whole, there = sample.spread()
    assert torch.nonzero(there)[:, 0].tolist() == wanted
    assert torch.equal(whole[there], sample.hidden_states)
    assert bool(whole[~there].isnan().all())


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 70), (65, 131), (17, 18), (100, 300), (299, 300)])
def test_a_part_has_the_rows_of_its_tokens(built: BuiltStore, start: int, stop: int) -> None:
    part = hsx.open(built.info.path).sample(5, start, stop, states=["post_norm", "h_1"])
    wanted = [at for at in wanted_positions(masks()[5]) if start <= at < stop]
    assert part.positions.tolist() == [at - start for at in wanted]
    assert_close(built, part.hidden_states, built.states[5][wanted][:, [2, 0]])
    assert part.tokens == stop - start


def test_rows_are_had_as_they_are_stored(built: BuiltStore) -> None:
    store = hsx.open(built.info.path)
    raw = store.stored_numpy(3)
    assert raw.shape == (store.row_counts[3], 3, 32 if built.info.layout.dtype == "bf16" else 20)
    if built.info.layout.dtype == "bf16":
        assert np.array_equal(raw.view(np.uint16), store[3].hidden_states_numpy)
        return
    q, scale = raw[..., :16].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32), raw[..., 16:].copy().view("<f4")
    assert np.array_equal((q * scale).astype(ml_dtypes.bfloat16).view(np.uint16), store[3].hidden_states_numpy)


def test_the_documented_snippets_undo_it(built: BuiltStore) -> None:
    """With zarr-python and what the documentation says alone."""
    parts = (part.split("```")[0] for part in DOCS.read_text().split("```python\n# snippet: ")[1:])
    snippets = dict(part.split("\n", 1) for part in parts)
    assert len(snippets) == 2
    path = built.info.path
    store = hsx.open(path)
    given = {name: zarr.open_array(path / name, mode="r")[:] for name in ("loss_mask", "offsets")}
    for i in range(len(LENGTHS)):
        found: dict[str, Any] = {**given, "i": i, "context": CONTEXT, "numpy": np, "torch": torch}
        exec(snippets["positions of the rows"], found)
        positions = found["positions"].tolist()
        assert positions == store.positions_numpy(i).tolist()
        if built.info.layout.dtype == "fp8_e4m3":
            found["rows"] = np.asarray(zarr.open_array(path / "hidden_states", mode="r")[i, : len(positions)])
            exec(snippets["fp8 to bf16"], found)
            assert torch.equal(found["states"], store[i].hidden_states)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_have_the_rows_and_say_which_tokens_they_are_of(built: BuiltStore, workers: int) -> None:
    dataset = HiddenStatesDataset(built.info.path, max_tokens=120)
    wanted = [[at for at in wanted_positions(mask) if at < 120] for mask in masks()]
    assert dataset.lengths.tolist() == [min(tokens, 120) for tokens in LENGTHS]
    assert dataset.rows.tolist() == list(map(len, wanted))
    sampler = TokenBudgetSampler(dataset.rows, 60, seed=1)
    seen = []
    for batch in DataLoader(
        dataset, batch_sampler=sampler, collate_fn=collate_packed, num_workers=workers, timeout=600 * bool(workers)
    ):
        assert len(batch["hidden_states"]) == len(batch["positions"])
        bounds = batch["cu_seqlens"].tolist()
        for index, begin, end in zip(batch["index"].tolist(), bounds, bounds[1:], strict=False):
            mine = (batch["positions"] >= begin) & (batch["positions"] < end)
            assert (batch["positions"][mine] - begin).tolist() == wanted[index]
            assert_close(built, batch["hidden_states"][mine], built.states[index][wanted[index]])
            assert batch["input_ids"][begin:end].tolist() == built.input_ids[index][:120].tolist()
            seen.append(index)
    assert sorted(seen) == list(range(len(LENGTHS)))


def test_padded_batches_mark_rows_that_are_padding(built: BuiltStore) -> None:
    dataset = HiddenStatesDataset(built.info.path)
    batch = collate_padded([dataset[1], dataset[0]])
    assert batch["input_ids"].shape == (2, 150)
    for row, index in enumerate((1, 0)):
        real = batch["positions"][row] >= 0
        assert batch["positions"][row][real].tolist() == wanted_positions(masks()[index])
        assert torch.equal(batch["hidden_states"][row][real], hsx.open(built.info.path)[index].hidden_states)


def test_verify_reads_every_row_and_knows_whose_it_is(built: BuiltStore, tmp_path: Path) -> None:
    report = verify(built.info.path, built.rows)
    assert (report.ok, report.read) == (True, len(LENGTHS))
    assert verify(built.info.path, built.rows, cold=True).ok
    wrong = build_store(tmp_path, built.states, masks=masks(), kept="loss", context=CONTEXT, dtype=built.info.layout.dtype)
    content = bytearray(wrong.shard(0).read_bytes())
    content[100] ^= 4
    wrong.shard(0).write_bytes(content)
    damage = verify(wrong.info.path, wrong.rows).damage
    assert [(one.index, one.kind) for one in damage] == [(0, "chunk")]
    with pytest.raises(RunError, match="chunk 0 has crc32c"):
        hsx.open(wrong.info.path)[0]


def test_rows_of_other_tokens_are_no_rows_of_the_sample(tmp_path: Path) -> None:
    """A shard of the very same ids and as many rows, made by another mask, is refused by readers and by verify."""
    ids = [np.arange(20, dtype=np.int32)] * 2
    states = random_states(np.random.default_rng(0), 20, 2, 8)
    given = [np.array([at == one for at in range(20)], np.uint8) for one in (4, 9)]
    built = build_store(tmp_path, [states, states], input_ids=ids, masks=given, roots=["a"], kept="loss")
    built.shard(1).write_bytes(built.shard(0).read_bytes())
    with pytest.raises(RunError, match=r"expected .* by the loss mask") as error:
        hsx.open(built.info.path)[1]
    assert error.value.kind == "store_invalid"
    assert [(one.index, one.kind) for one in verify(built.info.path, built.rows).damage] == [(1, "record")]
    assert hsx.open(built.info.path)[0].positions.tolist() == [4]
    assert built.shard(1).name == shard_key(1)


@pytest.mark.parametrize(
    ("less", "words"),
    [
        ({"kept": "some"}, "kept is 'some'"),
        ({"dtype": "fp4"}, "dtype 'fp4'"),
        ({"context": 3}, "context is 3"),
        ({"kept": "loss", "context": -1}, "context is -1"),
        ({"dtype": "fp8_e4m3", "hidden_size": 7}, "hidden_size is 7"),
        ({"kept": "loss", "records": False}, "shards without records"),
    ],
)
def test_layouts_that_cannot_be(less: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StoreLayout(**{"samples": 1, "max_tokens": 10, "states": 2, "hidden_size": 8} | less)


def test_an_older_hsx_does_not_take_such_a_store_for_a_whole_one(built: BuiltStore) -> None:
    assert built.info.attributes["hsx"]["format"] == "hsx-store-3"
    assert StoreLayout(1, 100, 2, 8).token_bytes == 32
    assert StoreLayout(1, 100, 2, 8, dtype="fp8_e4m3").token_bytes == 24
