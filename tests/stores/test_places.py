"""Stores whose roots are not where they were: given, moved along, or gone."""

from __future__ import annotations

import json
import pickle
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hsx
from hsx.errors import RunError
from hsx.show import show
from hsx.stores.seal import SealedArrays, write_seal
from hsx.testing.stores import BuiltStore, build_store, random_states

if TYPE_CHECKING:
    from os import PathLike
    from pathlib import Path

    from hsx.stores.reader import Store


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Four samples over two roots, all in the folder `job`."""
    rng = np.random.default_rng(0)
    (tmp_path / "job").mkdir()
    return build_store(tmp_path / "job", [random_states(rng, 5 + i, 2, 8) for i in range(4)], roots=["a", "b"])


def require_all(store: Store, built: BuiltStore) -> None:
    assert store.committed.tolist() == [0, 1, 2, 3]
    for sample in store:
        assert np.array_equal(sample.hidden_states_numpy, built.states[sample.index])


def test_roots_mounted_elsewhere_are_given(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "job" / "a").rename(tmp_path / "mnt-a")
    (tmp_path / "job" / "b").rename(tmp_path / "mnt-b")
    roots: dict[str, str | PathLike[str]] = {"a": tmp_path / "mnt-a", "b": str(tmp_path / "mnt-b" / built.info.store_id)}
    store = hsx.open(built.info.path, roots=roots)
    require_all(store, built)
    require_all(pickle.loads(pickle.dumps(store)), built)
    assert store.roots == {name: tmp_path / f"mnt-{name}" / built.info.store_id for name in ("a", "b")}
    assert store.info.roots == built.info.roots


def test_a_given_root_goes_before_the_recorded_one(built: BuiltStore, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "job" / "a", tmp_path / "copy")
    built.shard(0).unlink()
    require_all(hsx.open(built.info.path, roots={"a": tmp_path / "copy"}), built)


def test_a_tree_that_was_moved_opens_by_its_path_alone(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job").rename(tmp_path / "elsewhere" / "renamed")
    store = hsx.open(tmp_path / "elsewhere" / "renamed" / "store")
    require_all(store, built)
    view = show(tmp_path / "elsewhere" / "renamed" / "store", 1)
    assert view.shard == str(store.roots["b"] / "c.1.0.0.0") == str(store.shard_path(1))
    assert view.nbytes == built.rows[1].nbytes
    assert store.roots["b"] == tmp_path / "elsewhere" / "renamed" / "b" / built.info.store_id


def test_disks_that_were_put_into_another_machine(built: BuiltStore, tmp_path: Path) -> None:
    """The whole of what was below a folder is now below another one: store and roots at different depths."""
    (tmp_path / "new").mkdir()
    (tmp_path / "job" / "store").rename(tmp_path / "store")
    for name in ("a", "b"):
        (tmp_path / "new" / "job").mkdir(exist_ok=True)
        (tmp_path / "job" / name).rename(tmp_path / "new" / "job" / name)
    (tmp_path / "store").rename(tmp_path / "new" / "store")
    require_all(hsx.open(tmp_path / "new" / "store"), built)


def test_a_folder_of_the_right_name_is_not_taken_for_the_root(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job" / "store").rename(tmp_path / "elsewhere" / "store")
    (tmp_path / "job" / "a").rename(tmp_path / "gone")
    (tmp_path / "elsewhere" / "a" / built.info.store_id).mkdir(parents=True)
    identity = {"format": 1, "store_id": built.info.store_id, "name": "b"}
    (tmp_path / "elsewhere" / "a" / built.info.store_id / "hsx-root.json").write_text(json.dumps(identity))
    store = hsx.open(tmp_path / "elsewhere" / "store")
    assert list(store.roots) == ["b"]
    assert store[1].tokens == 6
    with pytest.raises(RunError, match=r"lies on root 'a', which is not at .*/job/a/.*roots={'a': PATH}") as error:
        store.sample(0)
    assert error.value.kind == "root_unusable"


def test_a_root_that_is_not_mounted_is_named(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "job" / "a").rename(tmp_path / "away")
    (tmp_path / "job" / "a").mkdir()
    store = hsx.open(built.info.path)
    assert store.committed.tolist() == [0, 1, 2, 3]
    assert store[3].tokens == 8
    with pytest.raises(RunError, match="lies on root 'a'"):
        store.shard_path(2)
    with pytest.raises(RunError, match=r"sample 2 of store .* lies on root 'a'") as error:
        store.sample(2)
    assert error.value.kind == "root_unusable"


@pytest.mark.parametrize(
    ("name", "path", "words"),
    [
        ("c", "job/a", "root 'c' is given as .*; store .* has a, b"),
        ("a", "job/b", "root 'a' is given as .*; expected a folder"),
    ],
)
def test_what_is_no_root_of_the_store_is_refused(built: BuiltStore, tmp_path: Path, name: str, path: str, words: str) -> None:
    with pytest.raises(RunError, match=words) as error:
        hsx.open(built.info.path, roots={name: tmp_path / path})
    assert error.value.kind == "root_unusable"


def test_a_stale_link_is_seen_through(built: BuiltStore) -> None:
    """The sample was moved to another root, and the link not yet made again."""
    old = built.shard(0)
    old.rename(built.info.folder("b") / old.name)
    require_all(hsx.open(built.info.path), built)


def test_two_shards_behind_a_broken_link_are_not_chosen_between(built: BuiltStore) -> None:
    link = built.view.path(0)
    shutil.copy(built.shard(0), built.info.folder("b") / link.name)
    link.unlink()
    link.symlink_to("/nowhere/at/all")
    with pytest.raises(RunError, match="roots a and b both have a shard of it") as error:
        hsx.open(built.info.path).sample(0)
    assert error.value.kind == "store_invalid"


def test_a_copy_in_which_links_have_become_files(built: BuiltStore, tmp_path: Path) -> None:
    shutil.copytree(built.info.path, tmp_path / "whole", symlinks=False)
    shutil.rmtree(tmp_path / "job")
    store = hsx.open(tmp_path / "whole")
    require_all(store, built)
    assert 3 in store
    assert store.roots == {}


def sealed(built: BuiltStore) -> None:
    """Seals a store as `hsx seal` does, without proving it."""
    arrays = SealedArrays.empty(built.info)
    for row in built.rows[:3]:
        arrays.put(row.index, row.root, row.crc32c)
    write_seal(built.info, arrays, {"at": "now"})


def test_a_sealed_store_needs_no_links(built: BuiltStore, tmp_path: Path) -> None:
    """As after a copy by a tool that leaves links out. What its arrays do not have is not committed."""
    sealed(built)
    for index in range(4):
        built.view.path(index).unlink()
    (tmp_path / "job").rename(tmp_path / "copy")
    store = hsx.open(tmp_path / "copy" / "store")
    assert store.committed.tolist() == [0, 1, 2]
    assert [index in store for index in range(4)] == [True, True, True, False]
    for sample in store:
        assert np.array_equal(sample.hidden_states_numpy, built.states[sample.index])
    with pytest.raises(RunError, match=r"sample 3 of store .* is not committed") as unknown:
        store.sample(3)
    assert unknown.value.kind == "sample_unknown"
    (tmp_path / "copy" / "b").rename(tmp_path / "away")
    with pytest.raises(RunError, match=r"sample 1 of store .* lies on root 'b'") as lost:
        hsx.open(tmp_path / "copy" / "store").sample(1)
    assert lost.value.kind == "root_unusable"
