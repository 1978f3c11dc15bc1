"""A sealed store proves itself without its ledger, is one ordinary Zarr group, and is sealed or not at every moment."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr

from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.stores.attach import attach_roots
from hsx.stores.group import open_store, record_roots, require_unsealed
from hsx.stores.reader import Store
from hsx.stores.seal import (
    MANIFEST,
    SEAL_ARRAYS,
    SealedArrays,
    manifest_faults,
    read_seal,
    remove_seal,
    small_files,
    write_seal,
)
from hsx.stores.view import UnionView
from hsx.testing.stores import RUN, BuiltStore, build_store, payload, random_states
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = (70, 5, 130, 64)
FACTS = {"at": "2026-11-30T00:00:00+00:00", "samples": 4, "committed": 3, "verified": True}


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Four samples on two roots, of which the last is not committed."""
    rng = np.random.default_rng(5)
    return build_store(tmp_path, [random_states(rng, tokens, 3, 16) for tokens in LENGTHS], committed=3)


def seal(built: BuiltStore) -> None:
    arrays = SealedArrays.empty(built.info)
    for row in built.rows:
        arrays.put(row.index, row.root, row.crc32c)
    write_seal(open_store(built.info.path), arrays, FACTS)


def content(store: Path) -> dict[str, bytes]:
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def test_an_older_attempt_of_a_sealed_sample_is_not_read(built: BuiltStore) -> None:
    older = np.random.default_rng(9)
    seal(built)
    _, (root, _) = attach_roots(built.info, built.info.roots)
    assert Store(built.info.path)[0].hidden_states.shape[0] == LENGTHS[0]
    root.write(payload(Marker(RUN, 0, 7, LENGTHS[0]), random_states(older, LENGTHS[0], 3, 16)))  # an old copy of its disk
    with pytest.raises(RunError, match="as sealed"):
        _ = Store(built.info.path)[0].hidden_states


def test_arrays_say_where_each_sample_lies_and_its_checksum(built: BuiltStore) -> None:
    seal(built)
    info = open_store(built.info.path)
    assert info.sealed == FACTS
    arrays = read_seal(info)
    assert [arrays.root_of(index) for index in range(4)] == ["a", "b", "a", None]
    assert arrays.crc32c.tolist() == [*(row.crc32c for row in built.rows), 0]
    assert arrays.committed.tolist() == [1, 1, 1, 0]
    assert manifest_faults(info) == []


@pytest.mark.parametrize("consolidated", [None, False])
def test_zarr_reads_it_as_one_group(built: BuiltStore, consolidated: bool | None) -> None:
    seal(built)
    group = zarr.open_group(built.info.path, mode="r", use_consolidated=consolidated)

    def array(name: str) -> zarr.Array[Any]:
        found = group[name]
        assert isinstance(found, zarr.Array)
        return found

    assert (group.metadata.consolidated_metadata is not None) == (consolidated is None)
    assert np.array_equal(np.asarray(array("root")[:]), [0, 1, 0, -1])
    assert array("root").attrs["names"] == ["a", "b"]
    assert array("crc32c").dtype == np.uint32
    assert array("committed").dtype == np.uint8
    assert array("hidden_states").shape == built.info.layout.shape
    assert np.array_equal(np.asarray(array("hidden_states")[2, :130]), built.states[2])
    assert np.array_equal(np.asarray(array("offsets")[:]), np.cumsum([0, *LENGTHS]))
    if consolidated is None:
        assert {"hidden_states", "input_ids", "offsets", "root", "crc32c", "committed"} <= set(group.array_keys())


def test_it_is_verified_without_its_ledger(built: BuiltStore) -> None:
    seal(built)
    report = verify(built.info.path)
    assert (report.ok, report.sealed, report.committed, report.read) == (True, True, 3, 3)
    shutil.copy(built.shard(0), built.shard(2))
    built.shard(1).unlink()
    UnionView(built.info).link(3, "b")
    found = {(damage.index, damage.kind) for damage in verify(built.info.path).damage}
    assert found == {(2, "record"), (1, "missing"), (3, "uncommitted_visible")}


def test_a_shard_that_is_another_commit_of_its_sample_is_told(built: BuiltStore) -> None:
    arrays = SealedArrays.empty(built.info)
    for row in built.rows:
        arrays.put(row.index, row.root, row.crc32c ^ (row.index == 1))
    write_seal(built.info, arrays, FACTS)
    assert [(damage.index, damage.kind) for damage in verify(built.info.path).damage] == [(1, "crc32c")]


@pytest.mark.parametrize("name", ["zarr.json", "hidden_states/zarr.json", "input_ids/c/0", "offsets/zarr.json", "crc32c/c.0"])
def test_a_changed_file_is_told_by_the_manifest(built: BuiltStore, name: str) -> None:
    seal(built)
    path = built.info.path / name
    before = path.read_bytes()
    path.write_bytes(before.replace(b"\n", b"\n ", 1) if name.endswith(".json") else before[:-1] + b"\0")
    faults = manifest_faults(open_store(built.info.path))
    assert len(faults) == 1
    assert str(path) in faults[0]
    path.unlink()
    if name != "zarr.json":
        assert "cannot be read" in manifest_faults(open_store(built.info.path))[0]


def test_every_small_file_is_in_the_manifest(built: BuiltStore) -> None:
    seal(built)
    store = built.info.path
    listed = {*small_files(store), "zarr.json", MANIFEST}
    assert listed == {name for name in content(store) if not name.startswith("hidden_states/c.")}
    manifest = json.loads((store / MANIFEST).read_bytes())
    assert set(manifest["files"]) == listed - {MANIFEST}
    assert set(manifest["roots"]) == {"a", "b"}
    assert manifest["store_id"] == built.info.store_id


def test_a_root_with_other_metadata_is_told(built: BuiltStore) -> None:
    seal(built)
    path = built.info.folder("b") / "hsx-root.json"
    path.write_text(path.read_text() + " ")
    assert [str(path) in fault for fault in manifest_faults(open_store(built.info.path))] == [True]
    assert [(damage.index, damage.kind) for damage in verify(built.info.path).damage] == [(None, "manifest")]


def test_without_its_manifest_a_sealed_store_is_refused(built: BuiltStore) -> None:
    seal(built)
    (built.info.path / MANIFEST).unlink()
    with pytest.raises(RunError, match=r"manifest\.json cannot be read") as error:
        manifest_faults(open_store(built.info.path))
    assert error.value.kind == "store_invalid"


@pytest.mark.parametrize("name", SEAL_ARRAYS)
def test_torn_arrays_are_refused(built: BuiltStore, name: str) -> None:
    seal(built)
    path = built.info.path / name / "c.0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunError, match=name) as error:
        read_seal(open_store(built.info.path))
    assert error.value.kind == "store_invalid"


def test_a_store_that_is_not_sealed_has_no_seal_to_read(built: BuiltStore) -> None:
    with pytest.raises(RunError, match="is not sealed"):
        read_seal(open_store(built.info.path))


def test_nothing_may_change_a_sealed_store(built: BuiltStore, tmp_path: Path) -> None:
    require_unsealed(built.info)
    seal(built)
    info = open_store(built.info.path)
    with pytest.raises(RunError) as error:
        require_unsealed(info)
    assert error.value.kind == "store_sealed"
    with pytest.raises(RunError) as error:
        record_roots(info, {"c": tmp_path})
    assert error.value.kind == "store_sealed"
    assert record_roots(info, {"a": info.roots["a"]}) == info


def test_the_seal_can_be_taken_away_and_leaves_nothing(built: BuiltStore) -> None:
    before = content(built.info.path)
    seal(built)
    assert content(built.info.path) != before
    for _ in range(2):
        assert remove_seal(open_store(built.info.path)).sealed is None
        assert content(built.info.path) == before
    assert open_store(built.info.path) == built.info


def test_what_a_seal_that_was_cut_short_has_left_is_replaced_or_cleared_away(built: BuiltStore) -> None:
    before = content(built.info.path)
    seal(built)
    sealed = content(built.info.path)
    (built.info.path / "zarr.json").write_bytes(before["zarr.json"])  # all but the last step was done
    (built.info.path / "root" / "c.0").unlink()
    assert open_store(built.info.path).sealed is None
    assert verify(built.info.path, built.rows).ok
    seal(built)
    assert content(built.info.path) == sealed
    (built.info.path / "zarr.json").write_bytes(before["zarr.json"])
    built.info.path.with_name("store.seal.partial").mkdir()
    remove_seal(open_store(built.info.path))
    assert content(built.info.path) == before
    assert not built.info.path.with_name("store.seal.partial").exists()


def test_a_sample_on_a_root_that_the_store_does_not_know(built: BuiltStore) -> None:
    with pytest.raises(RunError, match="root 'z'"):
        SealedArrays.empty(built.info).put(0, "z", 1)
