"""hsx.open, zarr-python, tensorstore, and a reader that knows nothing of hsx, see the same bits."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tensorstore
import torch
import zarr

import hsx
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.stores.group import record_final_norm
from hsx.stores.reader import Store
from hsx.testing.stores import BuiltStore, build_store, payload, random_bits, random_states

LENGTHS = (1, 63, 64, 65, 1500, 128)
DOCS = Path(__file__).parents[2] / "docs" / "on-disk-format.md"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltStore:
    """Six samples of any bits over three roots; the last is not committed."""
    rng = np.random.default_rng(7)
    states = [random_bits(rng, tokens, 3, 40) for tokens in LENGTHS]
    return build_store(tmp_path_factory.mktemp("readers"), states, roots=["a", "b", "c"], committed=5)


@pytest.fixture
def store(built: BuiltStore) -> Store:
    """It, opened."""
    return hsx.open(built.info.path)


def test_hsx_reads_every_sample(built: BuiltStore, store: Store) -> None:
    assert len(store) == 6
    assert store.committed.tolist() == [0, 1, 2, 3, 4]
    for index, sample in enumerate(store):
        assert (sample.index, sample.id, sample.tokens) == (index, f"sample-{index}", LENGTHS[index])
        assert sample.state_names == ("h_1", "h_2", "post_norm")
        assert sample.input_ids.dtype == sample.loss_mask.dtype == torch.int64
        assert sample.input_ids.tolist() == built.input_ids[index].tolist()
        assert sample.loss_mask.tolist() == [i % 2 for i in range(LENGTHS[index])]
        assert sample.hidden_states.dtype == torch.bfloat16
        assert sample.hidden_states.shape == (LENGTHS[index], 3, 40)
        assert np.array_equal(sample.hidden_states_numpy, built.states[index])
        assert np.array_equal(sample.hidden_states.view(torch.uint16).numpy(), built.states[index])
        assert np.array_equal(sample.state("h_2").view(torch.uint16).numpy(), built.states[index][:, 1])


def test_zarr_and_tensorstore_read_the_same_bits(built: BuiltStore) -> None:
    group = zarr.open_group(built.info.path, mode="r")
    assert {name for name, _ in group.arrays()} >= {"hidden_states", "input_ids", "loss_mask", "offsets", "sample_ids"}
    assert list(group.groups()) == []
    array = group["hidden_states"]
    assert isinstance(array, zarr.Array)
    theirs = tensorstore.open(
        {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(built.info.path / "hidden_states")}}, read=True
    ).result()
    assert theirs.dtype == tensorstore.bfloat16
    assert theirs.shape == tuple(array.shape) == (6, 1500, 3, 40)
    for index, states in enumerate(built.states[:5]):
        assert np.array_equal(np.asarray(array[index, : len(states)]), states)
        assert np.array_equal(theirs[index, : len(states)].read().result().view(np.uint16), states)
        assert bool((np.asarray(array[index, len(states) :]) == 0x7FC0).all())


def test_zarr_finds_bfloat16_without_importing_hsx(built: BuiltStore) -> None:
    program = "import sys, zarr; print(zarr.open_group(sys.argv[1], mode='r')['hidden_states'][1, 62, 2, 39])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, built.info.path], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) == int(built.states[1][62, 2, 39])


def recipes() -> dict[str, str]:
    """The code blocks of the documentation that are marked as recipes, by name."""
    parts = DOCS.read_text().split("```python\n# recipe: ")[1:]
    return {part.split("\n")[0]: part.split("\n", 1)[1].split("```")[0] for part in parts}


@pytest.fixture(scope="module")
def packages_without_hsx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages that has all that are installed here, by links, except hsx and its metadata."""
    folder = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("hsx", "_hsx", "__editable__")):
            (folder / entry.name).symlink_to(entry)
    return folder


def test_documented_recipes_read_without_hsx(built: BuiltStore, packages_without_hsx: Path, tmp_path: Path) -> None:
    program = """
import importlib.util, json, sys
sys.path.append(sys.argv[1])
assert importlib.util.find_spec("hsx") is None
import numpy, torch
for name, recipe in json.loads(sys.argv[4]).items():
    for index in (0, 3, 4):
        found = {"store": sys.argv[2], "index": index}
        exec(recipe, found)
        assert found["states"].dtype == torch.bfloat16
        numpy.save(f"{sys.argv[3]}/{name}-{index}.npy", found["states"].view(torch.uint16).numpy())
"""
    found = recipes()
    assert len(found) == 3
    # -I and -S: neither this folder, nor PYTHONPATH, nor site-packages with its link to hsx.
    arguments = [str(packages_without_hsx), str(built.info.path), str(tmp_path), json.dumps(found)]
    subprocess.run([sys.executable, "-I", "-S", "-c", program, *arguments], check=True, timeout=100, cwd=tmp_path)
    for name in found:
        for index in (0, 3, 4):
            assert np.array_equal(np.load(tmp_path / f"{name}-{index}.npy"), built.states[index])


def test_samples_are_found_by_index_and_id(store: Store) -> None:
    assert store["sample-3"].index == store[3].index == store[-3].index == store[np.int64(3)].index == 3
    assert "sample-3" in store
    assert 3 in store
    assert 5 not in store
    assert "nobody" not in store
    assert 3.5 not in store
    assert store.tokens("sample-5") == 128
    assert store.sample_id(5) == "sample-5"


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (6, "has no sample 6; it has 6 samples"),
        (-7, "has no sample -7"),
        ("nobody", "nobody"),
        (5, "sample 5 of store .* is not committed"),
    ],
)
def test_unknown_samples_are_refused(store: Store, key: int | str, words: str) -> None:
    with pytest.raises(RunError, match=words) as error:
        store.sample(key)
    assert error.value.kind == "sample_unknown"


def test_unknown_state_is_refused(store: Store) -> None:
    with pytest.raises(RunError, match="no state 'h_9'; it has h_1, h_2, post_norm") as error:
        store[0].state("h_9")
    assert error.value.kind == "sample_unknown"


def test_slices_of_tokens(built: BuiltStore, store: Store) -> None:
    assert np.array_equal(store.hidden_states_numpy(4, 100, 300), built.states[4][100:300])
    assert store.hidden_states("sample-4", 1400).shape == (100, 3, 40)


def test_metadata_tells_what_is_stored(built: BuiltStore, store: Store) -> None:
    assert store.metadata == json.loads((built.info.path / "zarr.json").read_bytes())["attributes"]["hsx"]
    assert store.metadata["states"] == list(store.state_names)
    assert (store.hidden_size, store.info.spec.final) == (40, "post_norm")
    record_final_norm(built.info.path, np.ones(40, np.float32), 1e-5)
    norm = store.final_norm
    assert norm is not None
    assert norm[0].tolist() == [1.0] * 40
    assert norm[1] == 1e-5


def test_store_survives_pickling(built: BuiltStore, store: Store) -> None:
    again = pickle.loads(pickle.dumps(store))
    assert np.array_equal(again[2].hidden_states_numpy, built.states[2])


def test_commits_of_a_running_job_show_after_refresh(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    built = build_store(tmp_path, [random_states(rng, 5, 2, 8) for _ in range(3)], committed=2)
    store = hsx.open(built.info.path)
    assert store.committed.tolist() == [0, 1]
    built.roots[0].write(payload(Marker("deadbeef", 2, 1, 5), built.states[2]))
    built.view.link(2, "a")
    assert store.committed.tolist() == [0, 1]
    store.refresh()
    assert store.committed.tolist() == [0, 1, 2]


def test_damaged_shard_is_not_read(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(0), 70, 2, 8)], roots=["a"])
    content = bytearray(built.shard(0).read_bytes())
    content[3] ^= 1
    built.shard(0).write_bytes(content)
    store = hsx.open(built.info.path)
    with pytest.raises(RunError, match="chunk 0 has crc32c") as error:
        store.sample(0)
    assert error.value.kind == "store_invalid"
    unchecked = Store(built.info.path, check=False)
    assert unchecked[0].tokens == 70


def test_unmounted_root_is_named(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(0), 70, 2, 8)], roots=["a"])
    (tmp_path / "a").rename(tmp_path / "away")
    store = hsx.open(built.info.path)
    with pytest.raises(RunError, match="No such file") as error:
        store.sample(0)
    assert error.value.kind == "store_invalid"


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        hsx.open(tmp_path)
    assert error.value.kind == "store_invalid"
