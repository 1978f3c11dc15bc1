"""Folders with links, pipes and pointers; files that change; rows that can be read in several ways: told, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from hsx.cli import main
from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset
from hsx.datasets.sniff import LONGEST_SHOWN, sniff
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config, write_job

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=1000, context_length=64)


def lines(*names: str) -> bytes:
    return "".join(json.dumps({"id": name, "input_ids": [1, 2]}) + "\n" for name in names).encode()


def ids(path: Path, **dataset: Any) -> list[str]:
    return [row.sample_id for row in open_dataset(dataset_config(path, **dataset), SHAPE)]


def refused(path: Path, kind: str = "dataset_unreadable", **dataset: Any) -> str:
    with pytest.raises(RunError) as caught:
        ids(path, **dataset)
    assert caught.value.kind == kind
    return caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "rows"
    (made / "b").mkdir(parents=True)
    (made / "a.jsonl").write_bytes(lines("1"))
    (made / "b" / "2.jsonl").write_bytes(lines("2"))
    return made


def test_links_to_folders_are_followed_once(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "3.jsonl").write_bytes(lines("3"))
    (folder / "c").symlink_to(other)
    (folder / "d").symlink_to(other)
    (folder / "e").symlink_to(folder)
    assert ids(folder) == ["1", "2", "3"]
    assert sniff(dataset_config(folder)).ignored == ("d", "e")


@pytest.mark.parametrize("target", ["nowhere", "broken.jsonl"])
def test_link_that_leads_nowhere_or_to_itself(folder: Path, target: str) -> None:
    (folder / "broken.jsonl").symlink_to(folder / target)
    assert "broken.jsonl is a link that leads nowhere" in refused(folder)
    assert "broken.jsonl is a link that leads nowhere" in refused(folder / "*.jsonl")
    (folder / "broken.jsonl").rename(folder / "notes")
    assert ids(folder) == ["1", "2"]


def test_pattern_leaves_out_what_a_folder_leaves_out(folder: Path) -> None:
    (folder / ".a.jsonl").write_bytes(lines("half written"))
    (folder / "_temporary").mkdir()
    (folder / "_temporary" / "a.jsonl").write_bytes(lines("half written"))
    assert ids(folder / "**" / "*.jsonl") == ["1", "2"]
    assert sniff(dataset_config(folder / "*")).ignored == (".a.jsonl", "_temporary", "b")
    assert ids(folder / ".*.jsonl") == ["half written"]


def test_pipe_pointer_and_empty_table(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is a pipe or a device" in refused(tmp_path / "pipe.jsonl")
    (tmp_path / "rows.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert "is a pointer of Git LFS" in refused(tmp_path / "rows.parquet")
    (tmp_path / "rows.parquet").write_bytes(b"")
    assert "rows.parquet is empty; expected a Parquet or Arrow file" in refused(tmp_path / "rows.parquet")


def test_table_that_changes_while_its_rows_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"id": ["a", "b"], "input_ids": [[1], [1]]}), path)
    rows = iter(open_dataset(dataset_config(path, format="tokens"), SHAPE))
    assert isinstance(next(rows), Row)
    os.utime(path, (1, 1))
    with pytest.raises(RunError, match="changed since it was first read"):
        list(rows)


def test_hash_of_a_table_is_of_the_rows_that_were_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.table({"id": ["a"], "input_ids": [[1]]}), path)
    dataset = open_dataset(dataset_config(path, format="tokens"), SHAPE)
    list(dataset)
    parquet.write_table(pa.table({"id": ["b"], "input_ids": [[1, 2]]}), path)
    with pytest.raises(RunError, match="changed since it was first read"):
        dataset.fingerprint()


TURNS = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": "x", "messages": TURNS}, "dataset.format ('chat' reads 'messages', 'text' reads 'text')"),
        ({"input_ids": [1], "conversations": TURNS}, "it has 'input_ids' and 'conversations'; expected to be told which"),
        (
            {"messages": TURNS, "conversations": TURNS},
            "{ messages = 'messages', conversations = 'messages' }",
        ),
    ],
)
def test_row_that_can_be_read_in_several_ways(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("broken\n" + json.dumps({"id": 1, **row}) + "\n", encoding="utf-8")
    message = refused(path, "dataset_ambiguous")
    assert words in message
    assert f"{path}, line 2" in message
    job = write_job(tmp_path)
    path.write_text(json.dumps({"id": 1, **row}) + "\n", encoding="utf-8")
    assert [main([command, str(job)]) for command in ("check", "preview", "plan", "run")] == [ExitCode.REFUSED] * 4


def test_told_how_to_read_it(tmp_path: Path, chat_model: Path) -> None:
    path = tmp_path / "rows.jsonl"
    more = [{"role": "user", "content": "bcd"}]
    all_of_it = {"id": 1, "text": "xy", "messages": TURNS, "conversations": more, "input_ids": None}
    path.write_text(json.dumps(all_of_it), encoding="utf-8")
    lengths = []
    for told in ({"format": "text"}, {"format": "chat"}, {"format": "chat", "columns": {"messages": "conversations"}}):
        (row,) = open_dataset(dataset_config(path, chat_model, **told), SHAPE)
        assert isinstance(row, Row), row
        lengths.append(len(row.input_ids))
    assert lengths == [2, lengths[1], lengths[1] + 2]


def test_conversations_where_messages_are_null(tmp_path: Path, chat_model: Path) -> None:
    """A table of two datasets has both columns, and one of them in each row."""
    table = pa.table({"id": [1, 2, 3], "messages": [None, TURNS, None], "conversations": [TURNS, None, None]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    rows = list(open_dataset(dataset_config(tmp_path / "rows.parquet", chat_model), SHAPE))
    assert [type(row) for row in rows] == [Row, Row, BadRow]


def test_names_of_fields_and_files_do_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"dataset": {"path": "ro\x1bws"}})
    row = {"id": 1, "\x1b]0;owned\x07\n": 1, "long" * 100: 1, **{f"f{number}": 1 for number in range(100)}, "input_ids": [1]}
    (tmp_path / "ro\x1bws").write_text(json.dumps(row), encoding="utf-8")
    for command in ("check", "preview", "plan"):
        assert main([command, str(job)]) == ExitCode.DONE
        screen = capsys.readouterr()
        shown = screen.out + screen.err
        assert "\x1b" not in shown
        assert "\x07" not in shown
        begin = "fields     id: number as id; input_ids: list as input_ids; "
        (fields,) = (line for line in shown.splitlines() if begin in line)
        assert "\\x1b]0;owned\\x07\\n: number" in fields
        assert fields.endswith("; 64 more")
        assert "g" * 2 not in fields
        assert len(fields) < 40 * LONGEST_SHOWN


def test_system_text_beside_the_turns_is_told(tmp_path: Path, chat_model: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 1, "system": "Be kind.", "messages": TURNS}), encoding="utf-8")
    notes = [line for line in sniff(dataset_config(path, chat_model)).lines() if line.startswith("note")]
    assert notes == ["note       the field 'system' is not read; expected as the first turn where it is to be seen"]


def test_name_of_a_file_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"dataset": {"path": "rows"}})
    (tmp_path / "rows").mkdir()
    for name in (b"\xff.jsonl", b"\xfe.txt"):
        (tmp_path / "rows" / os.fsdecode(name)).write_bytes(lines("1"))
    for command in ("check", "preview"):
        assert main([command, str(job), "--json"]) == ExitCode.DONE
        found = json.loads(capsys.readouterr().out)["dataset"]
        assert (found["files"], found["ignored"]) == (["\\udcff.jsonl"], ["\\udcfe.txt"])


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_screen_of_another_encoding(tmp_path: Path, encoding: str) -> None:
    job = write_job(tmp_path)
    (tmp_path / "rows.jsonl").write_bytes(lines("日本😀"))
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    command = [sys.executable, "-m", "hsx", "preview", str(job)]
    shown = subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode(encoding)
    assert "--- '\\u65e5\\u672c\\U0001f600', line 1" in shown
    shown = subprocess.run([*command, "--json"], env=environment, capture_output=True, check=True).stdout.decode(encoding)
    assert json.loads(shown)["samples"][0]["id"] == "日本😀"
