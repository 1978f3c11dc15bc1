"""The token index on disk: written in a stream, read by slices, readable by others, and all or nothing."""

from __future__ import annotations

import json
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tensorstore
import zarr

from hsx.errors import RunError
from hsx.records import Row
from hsx.stores.token_writer import TokenTableWriter
from hsx.stores.tokens import ARRAYS, CHUNK, TokenTable, is_complete

if TYPE_CHECKING:
    from pathlib import Path


def row(number: int, tokens: int) -> Row:
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 1000, tokens, dtype=np.int32)
    return Row(f"id-{number}é", ids, rng.integers(0, 2, tokens, dtype=np.uint8), number + 1)


def build(group: Path, rows: list[Row], extra: dict[str, Any] | None = None) -> TokenTable:
    with TokenTableWriter(group) as writer:
        for index, each in enumerate(rows):
            assert writer.add(each) == index
        writer.finish({"dataset.sha256": "x"}, extra or {})
    return TokenTable(group)


LENGTHS = [1, 7, CHUNK - 9, 1, 2, 300_000, 2 * CHUNK + 5, 3]  # ends on, before and after chunk bounds; one spans three chunks


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row]]:
    group = tmp_path_factory.mktemp("large") / "store"
    rows = [row(number, tokens) for number, tokens in enumerate(LENGTHS)]
    build(group, rows)
    return group, rows


def test_a_row_does_not_keep_the_batch_that_it_is_a_slice_of(tmp_path: Path) -> None:
    ids, mask = np.arange(1000, dtype=np.int32), np.ones(1000, dtype=np.uint8)
    seen_ids, seen_mask = weakref.ref(ids), weakref.ref(mask)
    with TokenTableWriter(tmp_path / "store") as writer:
        writer.add(Row("a", ids[3:5], mask[3:5], 1))
        del ids, mask
        assert (seen_ids(), seen_mask()) == (None, None)
        writer.finish({"dataset.sha256": "x"}, {})
    assert TokenTable(tmp_path / "store").input_ids(0).tolist() == [3, 4]


def test_samples_come_back_across_chunk_bounds(large: tuple[Path, list[Row]]) -> None:
    group, rows = large
    table = TokenTable(group)
    assert (table.count, table.total_tokens) == (len(rows), sum(LENGTHS))
    assert table.lengths.tolist() == LENGTHS
    for index, each in enumerate(rows):
        assert table.tokens(index) == len(each.input_ids)
        assert table.input_ids(index).dtype == np.int32
        assert np.array_equal(table.input_ids(index), each.input_ids)
        assert np.array_equal(table.loss_mask(index), each.loss_mask)
        assert table.sample_id(index) == each.sample_id
        assert table.index_of(each.sample_id) == index


def test_zarr_and_tensorstore_read_the_same(large: tuple[Path, list[Row]]) -> None:
    group, rows = large
    expected = {
        "input_ids": np.concatenate([each.input_ids for each in rows]),
        "loss_mask": np.concatenate([each.loss_mask for each in rows]),
        "offsets": np.cumsum([0, *LENGTHS]),
        "sample_ids": np.frombuffer("".join(each.sample_id for each in rows).encode(), dtype=np.uint8),
        "sample_id_offsets": np.cumsum([0, *(len(each.sample_id.encode()) for each in rows)]),
    }
    opened = zarr.open_group(group, mode="r")
    assert sorted(name for name, _ in opened.arrays()) == sorted(ARRAYS)
    for name, values in expected.items():
        array = opened[name]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(np.asarray(array[:]), values)
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(group / name)}}
        assert np.array_equal(tensorstore.open(spec, read=True).result().read().result(), values)


def test_small_index_takes_small_files(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5)])
    assert (tmp_path / "store/input_ids/c/0").stat().st_size == 5 * 4 + 4


def test_attributes_carry_the_dataset_and_the_callers_values(tmp_path: Path) -> None:
    table = build(tmp_path / "store", [row(0, 5), row(1, 9)], {"rejected": 3})
    assert table.dataset == {"dataset.sha256": "x"}
    assert {key: table.record[key] for key in ("rejected", "samples", "tokens", "longest")} == {
        "rejected": 3,
        "samples": 2,
        "tokens": 14,
        "longest": 9,
    }


def test_existing_group_keeps_its_attributes_and_arrays(tmp_path: Path) -> None:
    group = tmp_path / "store"
    zarr.create_group(group, attributes={"hsx": {"a": 1}}).create_array("other", shape=(1,), dtype="int8")
    build(group, [row(0, 5)])
    opened = zarr.open_group(group, mode="r")
    assert dict(opened.attrs) == {"hsx": {"a": 1}}
    assert "other" in opened


def test_new_index_replaces_the_old_one(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5), row(1, 6)])
    table = build(tmp_path / "store", [row(2, 7)])
    assert [table.sample_id(index) for index in range(table.count)] == ["id-2é"]


def test_leaving_without_finish_leaves_nothing(tmp_path: Path) -> None:
    with TokenTableWriter(tmp_path / "store") as writer:
        writer.add(row(0, 5))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", list(ARRAYS))
def test_index_without_its_last_array_is_incomplete(tmp_path: Path, missing: str) -> None:
    group = tmp_path / "store"
    build(group, [row(0, 5)])
    (group / missing).rename(tmp_path / "away")
    assert is_complete(group) == (missing != "offsets")
    with pytest.raises(RunError, match=r"no complete token index|no readable Zarr array") as caught:
        TokenTable(group)
    assert caught.value.kind == "store_invalid"
    assert build(group, [row(0, 5)]).count == 1


def test_left_over_of_a_killed_writer_is_replaced(tmp_path: Path) -> None:
    group = tmp_path / "store"
    killed = TokenTableWriter(group)
    killed.add(row(0, 5))
    assert not is_complete(group)
    assert build(group, [row(1, 6)]).sample_id(0) == "id-1é"


@pytest.mark.parametrize("index", [-1, 2])
def test_unknown_index(tmp_path: Path, index: int) -> None:
    table = build(tmp_path / "store", [row(0, 5), row(1, 6)])
    for method in (table.tokens, table.input_ids, table.loss_mask, table.sample_id):
        with pytest.raises(RunError, match="expected 0 to 1") as caught:
            method(index)
        assert caught.value.kind == "sample_unknown"


@pytest.mark.parametrize("sample_id", ["", "id-0", "id-0é ", "\ud800"])
def test_unknown_id(tmp_path: Path, sample_id: str) -> None:
    table = build(tmp_path / "store", [row(0, 5)])
    with pytest.raises(RunError, match="no sample has the id") as caught:
        table.index_of(sample_id)
    assert caught.value.kind == "sample_unknown"


def test_ids_with_equal_sums_are_told_apart(tmp_path: Path) -> None:
    ids = [f"{a}{b}" for a in "abcdefghij" for b in ("", *"abcdefghij")]
    one = np.zeros(1, dtype=np.int32)
    table = build(tmp_path / "store", [Row(each, one, one.astype(np.uint8), 1) for each in ids])
    assert [table.index_of(each) for each in ids] == list(range(len(ids)))


def test_flipped_bit_is_noticed(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5)])
    file = tmp_path / "store/input_ids/c/0"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    with pytest.raises(RunError, match="crc32c does not match") as caught:
        TokenTable(tmp_path / "store").input_ids(0)
    assert caught.value.kind == "store_invalid"


def test_torn_and_missing_chunk_files(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5)])
    file = tmp_path / "store/input_ids/c/0"
    file.write_bytes(file.read_bytes()[:7])
    with pytest.raises(RunError, match="7 bytes at 0; expected 24"):
        TokenTable(tmp_path / "store").input_ids(0)
    file.unlink()
    with pytest.raises(RunError, match="No such file"):
        TokenTable(tmp_path / "store").input_ids(0)


def test_array_of_another_form_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5)])
    file = tmp_path / "store/loss_mask/zarr.json"
    metadata = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**metadata, "data_type": "int8"}), encoding="utf-8")
    with pytest.raises(RunError, match=r"int8.*expected.*uint8") as caught:
        TokenTable(tmp_path / "store")
    assert caught.value.kind == "store_invalid"


def test_index_of_another_format_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "store", [row(0, 5)])
    file = tmp_path / "store/offsets/zarr.json"
    metadata = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**metadata, "attributes": {}}), encoding="utf-8")
    with pytest.raises(RunError, match="lacks the attribute 'hsx_index'"):
        TokenTable(tmp_path / "store")


def test_threads_share_a_table(large: tuple[Path, list[Row]]) -> None:
    group, rows = large
    table = TokenTable(group)
    wrong: list[int] = []

    def read(start: int) -> None:
        for step in range(200):
            index = (start + step) % 5
            if not np.array_equal(table.input_ids(index), rows[index].input_ids):
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_unwritable_group(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunError, match="cannot be written") as caught:
        TokenTableWriter(tmp_path / "file" / "store")
    assert caught.value.kind == "store_unwritable"
