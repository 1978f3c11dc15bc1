"""hsx.open, zarr-python, tensorstore, and a reader that knows nothing of hsx, see the same bits."""

from __future__ import annotations

import hashlib
import json
import pickle
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from collections.abc import Iterator

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


def test_a_store_says_what_it_is(built: BuiltStore, store: Store) -> None:
    assert repr(store) == f"<hsx store {built.info.path}: 5 of 6 samples, states h_1, h_2, post_norm, H = 40>"


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


@pytest.mark.parametrize("chunk_tokens", [64, 16])
def test_documented_recipes_read_without_hsx(packages_without_hsx: Path, tmp_path: Path, chunk_tokens: int) -> None:
    states = [random_bits(np.random.default_rng(7), tokens, 3, 40) for tokens in LENGTHS]
    built = build_store(tmp_path, states, roots=["a", "b", "c"], committed=5, chunk_tokens=chunk_tokens)
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
    assert len(found) == 4
    # -I and -S: neither this folder, nor PYTHONPATH, nor site-packages with its link to hsx.
    arguments = [str(packages_without_hsx), str(built.info.path), str(tmp_path), json.dumps(found)]
    subprocess.run([sys.executable, "-I", "-S", "-c", program, *arguments], check=True, timeout=600, cwd=tmp_path)
    for name in found:
        for index in (0, 3, 4):
            assert np.array_equal(np.load(tmp_path / f"{name}-{index}.npy"), built.states[index])


@pytest.mark.parametrize(("codec", "chunk_tokens"), [("none", 64), ("none", 8), ("blosc", 64), ("zstd", 128)])
def test_the_documented_reader_reads_whatever_is_there(tmp_path: Path, codec: str, chunk_tokens: int) -> None:
    states = [random_bits(np.random.default_rng(i), tokens, 3, 40) for i, tokens in enumerate((1, 300, 64, 10))]
    built = build_store(tmp_path, states, roots=["a", "b"], codec=codec, committed=3, chunk_tokens=chunk_tokens)
    found: dict[str, Any] = {"store": str(built.info.path), "index": 1}
    exec(recipes()["a whole reader"], found)
    reader = found["reader"]
    assert reader.committed() == [0, 1, 2]
    for index, truth in enumerate(states[:3]):
        assert np.array_equal(reader.states(index).view(torch.uint16).numpy(), truth)
        assert reader.input_ids(index).tolist() == built.input_ids[index].tolist()
        record = reader.record(index)
        assert (record["store"], record["index"], record["marker"]) == (built.info.store_id, index, built.rows[index].marker)
        assert record["crc32c"] == built.rows[index].crc32c
        assert record["ids"] == hashlib.sha256(built.input_ids[index].tobytes()).hexdigest()
    assert np.array_equal(reader.states(1, 60, 130).view(torch.uint16).numpy(), states[1][60:130])


def test_what_a_sample_is_fits_a_line(store: Store) -> None:
    assert repr(store.sample(3, 0, 5)) == "<sample 3, 'sample-3': 5 tokens, 3 x 40: h_1, h_2, post_norm>"


def test_slices_and_folders_that_are_not_there_are_told(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"key is a slice; expected an index or an id \(for several: store\.read"):
        store[0:2]  # type: ignore[index]  # what is refused
    with pytest.raises(RunError, match=r"nope\.zarr does not exist; expected the folder of a store"):
        hsx.open(tmp_path / "nope.zarr")
    with pytest.raises(RunError, match=r"is not an hsx store: zarr\.json: No such file or directory"):
        hsx.open(tmp_path)


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


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("start", "stop"), [(0, None), (100, 300), (64, 128), (70, 71), (1400, 1500), (5, 5)])
def test_slices_of_tokens_and_states(built: BuiltStore, start: int, stop: int | None, check: bool) -> None:
    store = hsx.open(built.info.path, check=check)
    truth = built.states[4][start:stop]
    assert np.array_equal(store.hidden_states_numpy(4, start, stop), truth)
    assert np.array_equal(store.hidden_states_numpy(4, start, stop, states=["h_2"]), truth[:, [1]])
    sample = store.sample("sample-4", start, stop, states=["post_norm", "h_1"])
    assert sample.state_names == ("post_norm", "h_1")
    assert np.array_equal(sample.hidden_states_numpy, truth[:, [2, 0]])
    assert np.array_equal(sample.state("h_1").view(torch.uint16).numpy(), truth[:, 0])
    assert sample.input_ids.tolist() == built.input_ids[4][start:stop].tolist()
    assert sample.tokens == len(sample.loss_mask) == len(truth)


def test_slices_go_into_memory_that_is_given(built: BuiltStore, store: Store) -> None:
    out = np.empty((200, 1, 40), np.uint16)
    assert store.hidden_states_numpy(4, 100, 300, states=["h_2"], out=out) is out
    assert np.array_equal(out, built.states[4][100:300, [1]])
    wrongs: list[Any] = [np.empty((199, 1, 40), np.uint16), np.empty((200, 1, 40), np.int16)]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"expected uint16 \(200, 1, 40\)"):
            store.hidden_states_numpy(4, 100, 300, states=["h_2"], out=wrong)


def test_a_slice_reads_only_the_chunks_that_hold_it(tmp_path: Path) -> None:
    """Chunk 1 of three is damaged: what lies in the others is still read."""
    built = build_store(tmp_path, [random_states(np.random.default_rng(0), 192, 2, 8)], roots=["a"])
    content = bytearray(built.shard(0).read_bytes())
    content[built.info.layout.block_bytes] ^= 1
    built.shard(0).write_bytes(content)
    store = hsx.open(built.info.path)
    for states in (None, ["h_1"]):
        assert store.hidden_states_numpy(0, 0, 64, states=states).shape[0] == 64
        assert store.hidden_states_numpy(0, 128, 192, states=states).shape[0] == 64
        with pytest.raises(RunError, match="chunk 1 has crc32c"):
            store.hidden_states_numpy(0, 63, 65, states=states)


@pytest.mark.parametrize(("start", "stop"), [(-1, 4), (4, 3), (0, 1501)])
def test_tokens_that_a_sample_does_not_have_are_refused(store: Store, start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {start} to {stop} are asked for; sample 4 has 1500"):
        store.sample(4, start, stop)


def test_batches_come_in_the_order_asked_for(built: BuiltStore, store: Store) -> None:
    wanted: list[int | str] = [4, "sample-0", -3, 4, 1]
    indices = [4, 0, 3, 4, 1]
    for threads in (0, 1, 3):
        found = store.read(wanted, threads=threads)
        assert [sample.index for sample in found] == indices
        assert all(np.array_equal(sample.hidden_states_numpy, built.states[sample.index]) for sample in found)
    assert store.read([]) == []
    assert [sample.state_names for sample in store.read([2, 3], states=["h_2"])] == [("h_2",), ("h_2",)]
    with pytest.raises(RunError, match=r"sample 5 of store .* is not committed"):
        store.read([0, 5, 1])
    with pytest.raises(ValueError, match="threads is -1 and ahead -1"):
        store.stream([1], threads=-1)


def test_reading_ahead_stops_with_its_reader(store: Store) -> None:
    """No more than `ahead` keys are taken before the first sample is, and no thread outlives the reader."""
    taken = []

    def keys() -> Iterator[int]:
        for index in (0, 1, 2, 3, 4):
            taken.append(index)
            yield index

    samples = store.stream(keys(), threads=2, ahead=2)
    assert next(samples).index == 0
    assert taken == [0, 1, 2]
    assert isinstance(samples, Generator)
    samples.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hsx-read")]


def test_a_shard_of_another_sample_is_not_read(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(i), 70, 2, 8) for i in range(2)], roots=["a"])
    built.shard(0).write_bytes(built.shard(1).read_bytes())
    with pytest.raises(RunError, match="says that it is sample 1") as error:
        hsx.open(built.info.path).sample(0)
    assert error.value.kind == "store_invalid"


def test_a_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(0), 70, 2, 8)], roots=["a"])
    built.shard(0).unlink()
    with pytest.raises(RunError, match=r"shard .*c\.0\.0\.0\.0?.*No such file") as error:
        hsx.open(built.info.path).sample(0)
    assert error.value.kind == "store_invalid"


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


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError) as error:
        hsx.open(tmp_path)
    assert error.value.kind == "store_invalid"
