"""Creating and opening the group, its roots and their identity, and the union view."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import zarr
import zarr.codecs

from hsx.core.layout import StoreLayout
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.stores.attach import attach_roots, usable_roots
from hsx.stores.bfloat16 import BFloat16
from hsx.stores.group import create_store, open_store, read_final_norm, record_final_norm
from hsx.stores.view import UnionView
from hsx.testing.stores import build_store, payload, random_states

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = StoreLayout(samples=4, max_tokens=100, states=3, hidden_size=8)
SPEC = CaptureSpec((2, 5), "post_norm")
MODEL = {"name": "tiny", "layers": 6}


def kind_and_message(error: pytest.ExceptionInfo[RunError]) -> tuple[str, str]:
    return error.value.kind, error.value.message


def test_created_store_opens_as_it_was_made(tmp_path: Path) -> None:
    made = create_store(tmp_path / "new" / "store", LAYOUT, SPEC, MODEL)
    found = open_store(tmp_path / "new" / "store")
    assert (found.store_id, found.layout, found.spec, found.model, found.roots) == (made.store_id, LAYOUT, SPEC, MODEL, {})
    assert found == made


def test_empty_store_is_made_again_in_any_shape(tmp_path: Path) -> None:
    """As after a first run that was cut short, and whose dataset has changed since."""
    made = create_store(tmp_path, LAYOUT, SPEC, MODEL, "0000000a")
    again = create_store(tmp_path, StoreLayout(9, 50, 2, 8), CaptureSpec((1,), "pre_norm"), MODEL, "0000000b")
    assert open_store(tmp_path) == again
    assert (again.run, again.store_id == made.store_id) == ("0000000b", False)
    assert json.loads((tmp_path / "hidden_states" / "zarr.json").read_bytes())["shape"] == [9, 50, 2, 8]


def test_metadata_is_what_zarr_itself_writes(tmp_path: Path) -> None:
    create_store(tmp_path / "store", LAYOUT, SPEC, MODEL)
    ours: dict[str, Any] = json.loads((tmp_path / "store" / "hidden_states" / "zarr.json").read_bytes())
    zarr.create_array(
        tmp_path / "theirs",
        shape=LAYOUT.shape,
        dtype=BFloat16(),
        shards=LAYOUT.shard_shape,
        chunks=LAYOUT.chunk_shape,
        compressors=[zarr.codecs.Crc32cCodec()],
        fill_value=float("nan"),
        chunk_key_encoding={"name": "default", "separator": "."},
        dimension_names=["sample", "token", "state", "channel"],
    )
    theirs: dict[str, Any] = json.loads((tmp_path / "theirs" / "zarr.json").read_bytes())
    assert ours | {"attributes": {}} == theirs


def test_layout_and_spec_must_agree(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout has 3 states; the capture spec has 2"):
        create_store(tmp_path, LAYOUT, CaptureSpec((2,), "post_norm"), MODEL)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "is not Zarr metadata"),
        ("[]", "is not Zarr metadata"),
        ('{"attributes": {}}', "format is None; expected 'hsx-store-2', 'hsx-store-3' or 'hsx-store-1'"),
        ('{"attributes": {"hsx": {"format": "hsx-store-9"}}}', "format is 'hsx-store-9'"),
        ('{"attributes": {"hsx": {"format": "hsx-store-1"}}}', "KeyError: 'final'"),
    ],
)
def test_what_is_no_store_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "zarr.json").write_text(content)
    with pytest.raises(RunError) as error:
        open_store(tmp_path)
    kind, message = kind_and_message(error)
    assert kind == "store_invalid"
    assert words in message


def test_store_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError) as error:
        create_store(tmp_path / "file" / "store", LAYOUT, SPEC, MODEL)
    assert error.value.kind == "store_unwritable"


def test_roots_are_recorded_and_known_again(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    info = create_store(tmp_path / "store", LAYOUT, SPEC, MODEL)
    info, roots = attach_roots(info, {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert [root.name for root in roots] == ["a", "b"]
    assert open_store(tmp_path / "store").roots == {"a": tmp_path / "a", "b": tmp_path / "b"}
    more, roots = attach_roots(open_store(tmp_path / "store"), {"b": tmp_path / "b", "c": tmp_path / "c"})
    assert [root.name for root in roots] == ["b", "c"]
    assert list(more.roots) == ["a", "b", "c"]
    assert roots[0].free() > 0


def test_root_mounted_elsewhere_is_followed(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 3, 8) for i in range(3)])
    (tmp_path / "b").rename(tmp_path / "moved")
    info, _ = attach_roots(store.info, {"a": tmp_path / "a", "b": tmp_path / "moved"})
    view = UnionView(info)
    assert view.repair((row.index, row.root) for row in store.rows) == 1
    assert view.target(1) == tmp_path / "moved" / info.store_id / "c.1.0.0.0"
    assert view.path(1).exists()


def test_empty_mount_point_is_not_the_root_it_was(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(0), 5, 3, 8)], roots=["a"])
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    with pytest.raises(RunError) as error:
        attach_roots(store.info, {"a": tmp_path / "a"})
    kind, message = kind_and_message(error)
    assert kind == "root_unusable"
    assert f"root a: {tmp_path / 'a'} is not the root it was" in message
    assert list((tmp_path / "a").iterdir()) == []


def test_swapped_roots_are_refused(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(0), 5, 3, 8)])
    with pytest.raises(RunError) as error:
        attach_roots(store.info, {"a": tmp_path / "b"})
    kind, message = kind_and_message(error)
    assert kind == "root_unusable"
    assert "it is root 'b' of store" in message


def test_damaged_identity_is_refused(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(0), 5, 3, 8)], roots=["a"])
    (store.roots[0].folder / "hsx-root.json").write_text("[]")
    with pytest.raises(RunError, match="cannot be read") as error:
        attach_roots(store.info, {"a": tmp_path / "a"})
    assert error.value.kind == "root_unusable"


def test_usable_roots_are_told_from_those_that_are_not(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 3, 8) for i in range(2)])
    (tmp_path / "c").mkdir()
    places = {"a": tmp_path / "a", "b": tmp_path / "a", "c": tmp_path / "c", "d": tmp_path / "nowhere"}
    usable, missing = usable_roots(store.info, places)
    assert usable == {"a": tmp_path / "a", "c": tmp_path / "c"}
    assert {name: error.kind for name, error in missing.items()} == {"b": "root_unusable", "d": "root_unusable"}
    assert "it is root 'a' of store" in missing["b"].message
    info, roots = attach_roots(store.info, usable)
    assert [root.name for root in roots] == ["a", "c"]
    assert info.roots["b"] == tmp_path / "b", "a root that is missing keeps its place in the store"
    with pytest.raises(RunError, match=r"no root can be used:\n  root d: .* is not a folder") as error:
        usable_roots(store.info, {"d": tmp_path / "nowhere"})
    assert error.value.kind == "root_unusable"


def test_missing_new_root_is_refused(tmp_path: Path) -> None:
    info = create_store(tmp_path / "store", LAYOUT, SPEC, MODEL)
    with pytest.raises(RunError, match="is not a folder; mount its disk, or make the folder") as error:
        attach_roots(info, {"a": tmp_path / "nowhere"})
    assert error.value.kind == "root_unusable"


def test_vanished_root_fails_every_operation(tmp_path: Path) -> None:
    states = random_states(np.random.default_rng(0), 5, 3, 8)
    root = build_store(tmp_path, [states], roots=["a"]).roots[0]
    (tmp_path / "a").rename(tmp_path / "gone")
    for operation in (root.free, root.sync, root.sweep, lambda: root.write(payload(Marker("deadbeef", 0, 2, 5), states))):
        with pytest.raises(RunError, match=r"root a: .*ENOENT") as error:
            operation()
        assert error.value.kind == "root_unusable"


def test_root_is_an_array_on_its_own(tmp_path: Path) -> None:
    states = [random_states(np.random.default_rng(i), 5 + i, 3, 8) for i in range(4)]
    store = build_store(tmp_path, states)
    array = zarr.open_array(store.roots[1].folder, mode="r")
    assert np.array_equal(np.asarray(array[3, :8]), states[3])
    assert array.attrs["hsx"] == {
        "format": "hsx-store-2",
        "store_id": store.info.store_id,
        "states": ["h_1", "h_2", "post_norm"],
    }


def test_linking_twice_is_harmless_and_a_wrong_link_is_replaced(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 3, 8) for i in range(3)])
    store.view.link(0, "a")
    assert store.view.target(0) == store.shard(0)
    store.view.link(0, "b")
    assert store.view.target(0) == store.info.folder("b") / "c.0.0.0.0"
    with pytest.raises(RunError, match="has no root 'z'; it has a, b") as error:
        store.view.link(0, "z")
    assert error.value.kind == "store_invalid"


def test_repair_makes_what_is_missing(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 3, 8) for i in range(4)])
    store.view.path(1).unlink()
    store.view.link(2, "b")
    committed = [(row.index, row.root) for row in store.rows]
    assert store.view.repair(committed) == 2
    assert store.view.repair(committed) == 0
    assert store.view.indices().tolist() == [0, 1, 2, 3]
    assert {entry.name for entry in os.scandir(store.view.path(0).parent)} == {
        "zarr.json",
        *(store.view.path(i).name for i in range(4)),
    }


def test_repair_removes_what_the_ledger_does_not_hold(tmp_path: Path) -> None:
    """Links alone: the shards stay on their roots, and what is no link in the view stays for `hsx verify` to name."""
    store = build_store(tmp_path, [random_states(np.random.default_rng(i), 5, 3, 8) for i in range(4)])
    shard = store.view.path(3).resolve()
    store.view.path(9).symlink_to("/nowhere")
    store.view.path(2).unlink()
    store.view.path(2).write_bytes(b"no link")
    assert store.view.repair([(0, "a")]) == 3
    assert store.view.indices().tolist() == [0, 2]
    assert shard.exists()


def test_view_that_is_gone_is_reported(tmp_path: Path) -> None:
    store = build_store(tmp_path, [random_states(np.random.default_rng(0), 5, 3, 8)], roots=["a"])
    shutil.rmtree(store.info.path / "hidden_states")
    with pytest.raises(RunError) as error:
        store.view.link(0, "a")
    assert error.value.kind == "store_unwritable"
    with pytest.raises(RunError) as error:
        store.view.indices()
    assert error.value.kind == "store_invalid"


def test_final_norm_is_kept_and_may_not_change(tmp_path: Path) -> None:
    create_store(tmp_path, LAYOUT, SPEC, MODEL)
    assert read_final_norm(tmp_path) is None
    weight = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    record_final_norm(tmp_path, weight, 1e-6)
    record_final_norm(tmp_path, weight, 1e-6)
    found = read_final_norm(tmp_path)
    assert found is not None
    assert np.array_equal(found[0], weight)
    assert found[1] == 1e-6
    array = zarr.open_group(tmp_path, mode="r")["final_norm_weight"]
    assert isinstance(array, zarr.Array)
    assert np.array_equal(np.asarray(array[:]), weight)
    assert array.attrs["eps"] == 1e-6
    with pytest.raises(RunError) as error:
        record_final_norm(tmp_path, weight + 1, 1e-6)
    assert error.value.kind == "job_changed"
    with pytest.raises(ValueError, match=r"final norm is float32 \(7,\); expected float32 \(8,\)"):
        record_final_norm(tmp_path, weight[:7], 1e-6)


def test_damaged_final_norm_is_found(tmp_path: Path) -> None:
    create_store(tmp_path, LAYOUT, SPEC, MODEL)
    record_final_norm(tmp_path, np.ones(8, np.float32), 1e-6)
    chunk = tmp_path / "final_norm_weight" / "c.0"
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    with pytest.raises(RunError, match="does not match its crc32c") as error:
        read_final_norm(tmp_path)
    assert error.value.kind == "store_invalid"
