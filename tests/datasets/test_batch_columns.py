"""Rows of tables by the batch: the same as line by line, and one bad value spoils one row only."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset, open_source
from hsx.datasets.batch import Batch, TableFields
from hsx.datasets.columns import TAKEN_WHOLE
from hsx.datasets.fields import Bad
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=1000, context_length=24)
ODD: list[dict[str, Any]] = [
    {"id": None, "input_ids": [1]},
    {"id": "", "input_ids": [1]},
    {"id": "é" * 600, "input_ids": [1]},
    {"id": "row-3", "input_ids": [1]},
    {"id": "none", "input_ids": None},
    {"id": "empty", "input_ids": []},
    {"id": "null", "input_ids": [1, None, 3]},
    {"id": "below", "input_ids": [1, -1]},
    {"id": "above", "input_ids": [1000, 1]},
    {"id": "beyond int32", "input_ids": [1, 2**31]},
    {"id": "beyond int32, below", "input_ids": [-(2**31) - 1]},
    {"id": "wraps to 5", "input_ids": [2**32 + 5]},
    {"id": "long", "input_ids": [1] * 17},
    {"id": "short mask", "input_ids": [1, 2], "loss_mask": [1]},
    {"id": "bad mask", "input_ids": [1, 2], "loss_mask": [1, 2]},
    {"id": "null in the mask", "input_ids": [1, 2], "loss_mask": [1, None]},
    {"id": "label", "input_ids": [1, 2], "labels": [-100, 3]},
    {"id": "shifted", "input_ids": [1, 2, 3], "labels": [2, 3, -100]},
    {"id": "contradicting", "input_ids": [1, 2], "labels": [-100, 2], "prompt_length": 0},
    {"id": "prompt", "input_ids": [1, 2], "prompt_length": 3},
]


def drawn_rows() -> list[dict[str, Any]]:
    """Rows of all forms, the odd ones among them."""
    random_ = random.Random(7)
    rows: list[dict[str, Any]] = []
    for number in range(300):
        ids = [random_.randrange(1000) for _ in range(random_.randrange(1, 17))]
        row: dict[str, Any] = {"id": f"row-{number}", "input_ids": ids}
        prompt = random_.randrange(len(ids) + 1)
        mask = [int(place >= prompt) for place in range(len(ids))]
        labels = [token if counts else -100 for token, counts in zip(ids, mask, strict=True)]
        forms: dict[str, Any] = {"loss_mask": mask, "labels": labels, "prompt_length": prompt}
        row |= {name: value for name, value in forms.items() if random_.random() < 0.4}
        rows.append(row)
    for number, odd in enumerate(ODD):
        rows.insert(random_.randrange(5, len(rows)), {"n": number, **odd})
    return rows


def told(row: Row | BadRow) -> tuple[Any, ...]:
    if isinstance(row, BadRow):
        return row.line, row.sample_id, row.reason
    return row.line, row.sample_id, row.input_ids.tolist(), row.loss_mask.tolist(), row.cut


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_table_gives_what_its_rows_give_line_by_line(tmp_path: Path, form: str, batch: int) -> None:
    rows = drawn_rows()
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    schema = pa.schema(
        {
            "id": pa.string(),
            "input_ids": pa.large_list(pa.int64()),
            "loss_mask": pa.list_(pa.int8()),
            "labels": pa.list_(pa.int32()),
            "prompt_length": pa.int32(),
        }
    )
    table = pa.Table.from_pylist(rows, schema)
    path = tmp_path / f"rows.{form}"
    if form == "parquet":
        parquet.write_table(table, path, row_group_size=batch)
    else:
        with ipc.new_stream(path, schema) as writer:
            writer.write_table(table, max_chunksize=batch)
    expected = [told(row) for row in open_dataset(dataset_config(tmp_path / "rows.jsonl"), SHAPE)]
    assert [told(row) for row in open_dataset(dataset_config(path), SHAPE)] == expected
    assert sum(len(row) == 3 for row in expected) == len(ODD)
    missing = sum(row[-1] == "missing_field" for row in expected)
    cut: dict[str, Any] = {"too_long": "left", "max_tokens": 8}
    expected = [told(row) for row in open_dataset(dataset_config(tmp_path / "rows.jsonl", **cut), SHAPE)]
    assert [told(row) for row in open_dataset(dataset_config(path, **cut), SHAPE)] == expected
    assert sum(row[-1] == 8 for row in expected) > 0
    named: dict[str, Any] = {"columns": {"prompt_length": "prompt"}, "format": "tokens"}
    expected = [told(row) for row in open_dataset(dataset_config(tmp_path / "rows.jsonl", **named), SHAPE)]
    assert [told(row) for row in open_dataset(dataset_config(path, **named), SHAPE)] == expected
    assert sum(row[-1] == "missing_field" for row in expected) > missing


def fields(**columns: Any) -> list[TableFields]:
    """The rows of a batch of these columns."""
    batch = pa.record_batch(columns)
    return [TableFields(Batch(batch), row) for row in range(batch.num_rows)]


def test_text_that_is_not_utf8_spoils_its_own_row_only() -> None:
    offsets, content = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1], pa.py_buffer(b"a\xffc")
    first, second, third = fields(id=pa.StringArray.from_buffers(3, offsets, content))
    assert (first.value("id"), third.value("id")) == ("a", "c")
    with pytest.raises(Bad, match="'id' is not UTF-8 text") as caught:
        second.value("id")
    assert caught.value.reason == "bad_type"


def test_nulls_of_columns_of_every_kind() -> None:
    structs = pa.array([{"a": 1}, None], pa.struct({"a": pa.int8()}))
    kinds = {
        "dictionary": pa.array(["x", None]).dictionary_encode(),
        "dictionary of null": pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["x", None])),
        "struct": structs,
        "large": pa.array(["x" * TAKEN_WHOLE, None]),
        "union": pa.UnionArray.from_dense(pa.array([0, 0], pa.int8()), pa.array([0, 1], pa.int32()), [pa.array([7, None])]),
        "sliced": pa.array([None, 1, None])[1:],
        "flags": pa.array([True, None]),
        "extension": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"x" * 16, None], pa.binary(16))),
    }
    there, absent = fields(**kinds, nothing=pa.nulls(2))
    for name in kinds:
        assert there.has(name), name
        assert not absent.has(name), name
        with pytest.raises(Bad, match="is null") as caught:
            absent.value(name)
        assert caught.value.reason == "missing_field"
    assert not there.has("nothing")
    assert not there.has("other")
    with pytest.raises(Bad, match="'other' is missing"):
        there.integers("other")
    assert [there.value(name) for name in ("dictionary", "struct", "union", "sliced", "flags")] == ["x", {"a": 1}, 7, 1, True]


def test_turns_that_datasets_keeps_as_json(tmp_path: Path) -> None:
    turns: list[Any] = [[{"role": "user", "content": None, "x": [1]}, {"role": "tool"}], [{"role": "user"}], None]
    texts = [None if row is None else [json.dumps(turn) for turn in row] for row in turns]
    kind = pa.list_(pa.json_())
    storage = pa.array(texts, pa.list_(pa.string()))
    column = pa.ListArray.from_arrays(storage.offsets, pa.ExtensionArray.from_storage(pa.json_(), storage.values), kind)
    parquet.write_table(pa.table({"messages": column}), tmp_path / "rows.parquet")
    rows = [row for _, row in open_source(dataset_config(tmp_path / "rows.parquet")).records()]
    assert all(isinstance(row, TableFields) for row in rows)
    assert [row.value("messages") for row in rows[:2] if not isinstance(row, Bad)] == turns[:2]
    (broken,) = fields(messages=pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{"])))
    with pytest.raises(Bad, match="'messages' is declared to be JSON, and is not") as caught:
        broken.value("messages")
    assert caught.value.reason == "not_json"
