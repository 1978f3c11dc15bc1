"""Files of all kinds, folders and patterns of them: the right rows in the right order, or a clear error."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from pyarrow import ipc, parquet

from hsx.cli import main
from hsx.config_load import load
from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset, open_source
from hsx.datasets.sniff import sniff
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.prepare import prepare
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config, write_job

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=1000, context_length=64)
LIST_TYPES = [
    pa.list_(pa.int32()),
    pa.large_list(pa.int64()),
    pa.list_(pa.uint16()),
    pa.list_(pa.int64(), 3),
    pa.large_list(pa.uint64()),
]
Rows = list[Row | BadRow]


def read(path: Path, **dataset: Any) -> Rows:
    return list(open_dataset(dataset_config(path, **dataset), SHAPE))


def ids(rows: Rows) -> list[str]:
    return [row.sample_id for row in rows]


def bad(rows: Rows) -> list[tuple[str, str]]:
    return [(row.reason, row.message) for row in rows if isinstance(row, BadRow)]


def lines(names: list[str]) -> bytes:
    return "".join(json.dumps({"id": name, "input_ids": [1, 2]}) + "\n" for name in names).encode()


def save_to_disk(folder: Path, tables: list[pa.Table], **state: Any) -> Path:
    """A folder as `datasets` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{len(tables):05d}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with ipc.new_stream(folder / name, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    document = {"_data_files": [{"filename": name} for name in names], "_indices_data_files": None, **state}
    (folder / "state.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", LIST_TYPES, ids=str)
@pytest.mark.parametrize("form", ["parquet", "arrow file", "arrow stream"])
def test_columns_of_every_list_and_integer_type(tmp_path: Path, kind: pa.DataType, form: str) -> None:
    tokens = [[1, 2, 3], [4, 5, 6], [7, 8, 999]]
    masks = pa.array([[0, 1, 1], None, [0, 1, 0]], pa.list_(pa.int8()))
    table = pa.table({"id": pa.array([3, 4, 5], pa.int32()), "input_ids": pa.array(tokens, kind), "loss_mask": masks})
    path = tmp_path / "rows"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        writer = ipc.new_file if form == "arrow file" else ipc.new_stream
        with writer(path, table.schema) as file:
            file.write_table(table.slice(0, 1))
            file.write_table(table.slice(1))  # a slice keeps its parent's buffers: offsets count
    rows = read(path)
    assert ids(rows) == ["3", "4", "5"]
    assert [row.input_ids.tolist() for row in rows if isinstance(row, Row)] == tokens
    assert [row.loss_mask.tolist() for row in rows if isinstance(row, Row)] == [[0, 1, 1], [1, 1, 1], [0, 1, 0]]
    assert all(row.input_ids.dtype == np.int32 for row in rows if isinstance(row, Row))


def test_bad_rows_of_a_table(tmp_path: Path) -> None:
    tokens = pa.array([[1, None], None, [], [2**63], [1000], [1]], pa.list_(pa.uint64()))
    table = pa.table({"id": ["null", "none", "empty", "huge", "vocab", "good"], "input_ids": tokens})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = read(tmp_path / "rows.parquet")
    assert [reason for reason, _ in bad(rows)] == [
        "bad_type",
        "missing_field",
        "empty",
        "out_of_vocabulary",
        "out_of_vocabulary",
    ]
    assert ids(rows)[-1] == "good"
    assert isinstance(rows[-1], Row)


@pytest.mark.parametrize(
    "values", [[[1.0]], ["1"], [1], [[True]], [[[1]]]], ids=["floats", "text", "number", "flags", "nested"]
)
def test_column_that_holds_no_token_ids(tmp_path: Path, values: list[Any]) -> None:
    parquet.write_table(pa.table({"id": ["a"], "input_ids": values}), tmp_path / "rows.parquet")
    ((reason, message),) = bad(read(tmp_path / "rows.parquet"))
    assert reason == "bad_type"
    assert "'input_ids'" in message


def test_flags_are_a_mask(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": ["a"], "input_ids": [[1, 2]], "loss_mask": [[False, True]]}), tmp_path / "rows")
    (row,) = read(tmp_path / "rows")
    assert isinstance(row, Row)
    assert row.loss_mask.tolist() == [0, 1]


def test_saved_dataset_in_the_order_that_it_says(tmp_path: Path) -> None:
    tables = [pa.table({"id": names, "input_ids": [[1]] * len(names)}) for names in (["a", "b", "c"], ["d"])]
    folder = save_to_disk(tmp_path / "saved", tables)
    (folder / "cache-0123.arrow").write_bytes(b"left behind by a map")
    assert ids(read(folder)) == ["a", "b", "c", "d"]
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state["_data_files"].reverse()
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    assert ids(read(folder)) == ["d", "a", "b", "c"]


def test_saved_dataset_of_splits(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"], "input_ids": [[1]]})
    save_to_disk(tmp_path / "saved" / "train", [table])
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}', encoding="utf-8")
    assert ids(read(tmp_path / "saved")) == ["a"]
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}', encoding="utf-8")
    assert "2 splits (train, test); expected one: name its folder" in unreadable(tmp_path / "saved")


def test_saved_dataset_with_an_index(tmp_path: Path) -> None:
    table = pa.table({"id": ["a"], "input_ids": [[1]]})
    folder = save_to_disk(tmp_path / "saved", [table], _indices_data_files=[{"filename": "indices.arrow"}])
    assert "expected one that was flattened" in unreadable(folder)


def unreadable(path: Path, kind: str = "dataset_unreadable") -> str:
    with pytest.raises(RunError) as caught:
        read(path)
    assert caught.value.kind == kind
    return caught.value.message


def test_folder_of_files_of_all_levels_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    (folder / "b").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "c.jsonl").write_bytes(lines(["5"]))
    (folder / "b" / "2.jsonl.gz").write_bytes(gzip.compress(lines(["3", "4"])))
    (folder / "a.jsonl.zst").write_bytes(zstandard.compress(lines(["1", "2"])))
    (folder / "README.md").write_bytes(b"# no data")
    (folder / ".cache" / "x.jsonl").write_bytes(lines(["no"]))
    assert ids(read(folder)) == ["1", "2", "3", "4", "5"]
    seen = sniff(dataset_config(folder))
    assert (seen.files, seen.ignored) == (("a.jsonl.zst", "b/2.jsonl.gz", "c.jsonl"), ("README.md",))
    assert "not read: README.md" in seen.lines()[0]
    assert ids(read(tmp_path / "rows" / "**" / "*.gz")) == ["3", "4"]
    assert ids(read(tmp_path / "rows" / "[ac].*")) == ["1", "2", "5"]


def test_lines_of_several_files_are_counted_through_and_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(["1"]) + b"\n\n" + lines(["2"]))
    (tmp_path / "b.jsonl").write_bytes(b"broken\n" + lines(["2", "3"]))
    rows = read(tmp_path / "*.jsonl")
    assert [row.line for row in rows] == [1, 4, 5, 6, 7]
    assert [(row.line, row.reason) for row in rows if isinstance(row, BadRow)] == [(5, "not_json"), (6, "duplicate_id")]
    (_, broken), (_, twice) = bad(rows)
    assert broken.endswith("(line 1 of b.jsonl)")
    assert twice == "id '2' was used in line 4 of a.jsonl already (line 2 of b.jsonl)"


def test_tables_have_rows_and_no_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"dataset": {"path": "t"}})
    (tmp_path / "t").mkdir()
    one = pa.table({"id": ["a", "b", "a"], "input_ids": [[1], [600], [2]]})
    parquet.write_table(one, tmp_path / "t" / "a.parquet")
    assert main(["preview", str(job)]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "bad row    row 2, id 'b': out_of_vocabulary" in shown
    assert "bad row    row 3, id 'a': duplicate_id: id 'a' was used in row 1 already" in shown
    assert "--- 'a', row 1: 1 token" in shown
    parquet.write_table(pa.table({"id": ["b"], "input_ids": [[1]]}), tmp_path / "t" / "b.parquet")
    assert main(["plan", str(job)]) == ExitCode.REFUSED
    error = capsys.readouterr().err
    assert "row 4, id 'b': duplicate_id: id 'b' was used in row 2 of a.parquet already (row 1 of b.parquet)" in error
    with pytest.raises(RunError, match=r"\n  row 2, id 'b': out_of_vocabulary"):
        prepare(load(job), lambda *_: None)
    assert "line" not in error
    both = {"id": ["a"], "input_ids": [[1]], "text": ["x"]}
    parquet.write_table(pa.table(both), tmp_path / "t" / "a.parquet")
    assert main(["preview", str(job)]) == ExitCode.REFUSED
    assert "a.parquet, row 1: it has 'input_ids' and 'text'" in capsys.readouterr().err


def test_rows_without_a_token_to_train_on_are_rows_of_a_table_too(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"id": ["a"], "input_ids": [[1]], "loss_mask": [[0]]}), tmp_path / "rows.parquet")
    config = dataset_config(tmp_path / "rows.parquet")
    config = msgspec.structs.replace(config, storage=msgspec.structs.replace(config.storage, tokens="loss"))
    (row,) = open_dataset(config, SHAPE)
    assert isinstance(row, BadRow)
    assert (row.named, row.reason) == ("row 1, id 'a'", "no_loss")


def test_files_of_two_kinds_may_be_the_same_rows_twice(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_bytes(lines(["1"]))
    parquet.write_table(pa.table({"id": ["1"], "input_ids": [[1]]}), tmp_path / "rows" / "a.parquet")
    assert "several kinds (jsonl, parquet)" in unreadable(tmp_path / "rows")
    assert ids(read(tmp_path / "rows" / "*.parquet")) == ["1"]


def test_nothing_there(tmp_path: Path) -> None:
    assert "none.jsonl: No such file" in unreadable(tmp_path / "none.jsonl")
    assert "no file is called so" in unreadable(tmp_path / "*.parquet")
    (tmp_path / "notes.txt").write_bytes(b"x")
    assert "is a folder without a data file; expected files ending in" in unreadable(tmp_path)


@pytest.mark.parametrize("cut", [4, 40, -5])
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_truncated_table(tmp_path: Path, form: str, cut: int) -> None:
    table = pa.table({"id": [str(number) for number in range(1000)], "input_ids": [[1]] * 1000})
    path = tmp_path / "rows"
    if form == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    content = path.read_bytes()
    path.write_bytes((content[:8] + content[8:cut]) if cut > 0 else content[:cut])
    assert str(path) in unreadable(path)


def test_arrow_stream_cut_between_two_batches(tmp_path: Path) -> None:
    """Readers take it for a shorter file: only the marker at the end tells."""
    table = pa.table({"id": ["a", "b"], "input_ids": [[1], [1]]})
    with ipc.new_stream(tmp_path / "rows", table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    content = (tmp_path / "rows").read_bytes()
    (tmp_path / "rows").write_bytes(content[:-8])
    assert len(ipc.open_stream(content[:-8]).read_all()) == 2
    assert "has no mark at its end; expected a whole Arrow stream" in unreadable(tmp_path / "rows")


def test_content_decides_the_fingerprint_and_names_do_not(tmp_path: Path) -> None:
    for name, content in (("a", ["1"]), ("b", ["2"])):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(content))
    both = open_source(dataset_config(tmp_path / "*.jsonl"))
    first = both.sha256()
    list(both.records())
    manifest = both.manifest()
    assert manifest["sha256"] == first
    assert [(file["name"], file["lines"], file["first"]) for file in manifest["files"]] == [
        ("a.jsonl", 1, 1),
        ("b.jsonl", 1, 2),
    ]
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    assert open_source(dataset_config(tmp_path / "*.jsonl")).sha256() == first
    (tmp_path / "c.jsonl").rename(tmp_path / "A.jsonl")  # now it is the first
    assert open_source(dataset_config(tmp_path / "*.jsonl")).sha256() != first


def test_table_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"id": ["a"], "input_ids": [[1]]}), path)
    dataset = open_dataset(dataset_config(path), SHAPE)
    dataset.fingerprint()
    parquet.write_table(pa.table({"id": ["b"], "input_ids": [[1, 2]]}), path)
    with pytest.raises(RunError, match="changed since it was first read"):
        list(dataset)


def test_names_of_columns_and_numbers_as_ids(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"uid": ["x", "y"], "tokens": [[1, 2], [3]], "id": [7, 7]}), path)
    columns = {"id": "uid", "input_ids": "tokens"}
    rows = read(path, columns=columns)
    assert ids(rows) == ["x", "y"]
    seen = sniff(dataset_config(path, columns=columns))
    assert seen.used == {"tokens": "input_ids", "uid": "id"}
    assert ids(read(path, columns={"input_ids": "tokens"}, ids="number")) == ["0", "1"]
    assert [reason for reason, _ in bad(read(path, columns={"input_ids": "tokens"}))] == ["duplicate_id"]
    standard = open_dataset(dataset_config(path, format="tokens"), SHAPE).fingerprint()
    named = open_dataset(dataset_config(path, format="tokens", columns=columns, ids="number"), SHAPE).fingerprint()
    assert {key: named[key] for key in named.keys() - standard.keys()} == {
        "dataset.columns.id": "uid",
        "dataset.columns.input_ids": "tokens",
        "dataset.ids": "number",
    }


def test_what_was_sniffed_is_told(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'not JSON\n{"id": 1, "input_ids": [1], "text": "x", "ok": true, "none": null, "meta": {}}\n')
    seen = sniff(dataset_config(path, format="tokens"))
    assert seen.lines() == [
        f"dataset    rows.jsonl, jsonl, {path.stat().st_size} bytes",
        "format     tokens, as the job file says",
        "fields     id: number as id; input_ids: list as input_ids; text: text; ok: boolean; none: null; meta: object",
        "note       text could be read as well; dataset.format chooses",
        "note       the first row has no loss mask, labels or prompt length: every token of such a row counts for the loss",
    ]


def test_memory_follows_the_batch_and_not_the_row_group(tmp_path: Path) -> None:
    from hsx.datasets.table import BATCH_BYTES, _batch_rows

    path = tmp_path / "wide.parquet"
    table = pa.table({"id": [str(number) for number in range(64)], "input_ids": [[1] * 100_000] * 64})
    parquet.write_table(table, path, row_group_size=64)  # equal numbers: a few bytes on the disk, 51 MB decoded
    rows = _batch_rows(parquet.read_metadata(path))
    assert rows * 100_000 * 8 <= BATCH_BYTES
    assert len(read(path, max_tokens=200_000)) == 64
