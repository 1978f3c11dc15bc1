"""The factory: format detection, limits, and files of no known form."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hsx.core.spec import ModelShape
from hsx.datasets import detect_format, longest_allowed, open_dataset
from hsx.datasets.jsonl import JsonlFile
from hsx.errors import RunError
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config

Write = Callable[[bytes], Path]
SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=259, context_length=64)


def test_longest_sample_is_the_context_less_what_the_server_keeps(tmp_path: Path) -> None:
    assert longest_allowed(dataset_config(tmp_path, tmp_path), SHAPE) == 56
    assert longest_allowed(dataset_config(tmp_path, tmp_path, max_tokens=10), SHAPE) == 10


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"id": 1, "input_ids": [1]}', "tokens"),
        (b'{"id": 1, "messages": []}', "chat"),
        (b'\n[]\nbroken\n{"id": 1}\n{"conversations": 5}\n{"input_ids": [1]}', "chat"),
        (b'{"input_ids": null, "messages": []}', "chat"),
    ],
)
def test_format_is_told_from_the_first_row_that_tells(write: Write, content: bytes, expected: str) -> None:
    assert detect_format(JsonlFile(write(content))) == expected


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"id": 1, "body": "x"}\n[]\n'])
def test_file_without_any_known_row(write: Write, tmp_path: Path, content: bytes) -> None:
    path = write(content)
    with pytest.raises(RunError, match="'input_ids', 'conversations', 'messages' or 'text'") as caught:
        open_dataset(dataset_config(path, tmp_path), SHAPE)
    assert caught.value.kind == "dataset_empty"


def test_fields_of_the_first_row_are_named(write: Write) -> None:
    with pytest.raises(RunError, match=r"none of 2 rows .*; the first row has 'id', 'body'$"):
        detect_format(JsonlFile(write(b'{"id": 1, "body": "x"}\n{"other": 1}\n')))
    wide = b"{" + b", ".join(b'"f%d": 0' % number for number in range(20)) + b"}"
    with pytest.raises(RunError, match=r"none of 1 row .* 'f11' and 8 more$"):
        detect_format(JsonlFile(write(wide)))


def test_auto_opens_both_forms(write: Write, chat_model: Path) -> None:
    (row,) = open_dataset(dataset_config(write(b'{"id": 1, "input_ids": [258]}'), chat_model), SHAPE)
    assert isinstance(row, Row)
    (row,) = open_dataset(
        dataset_config(write(b'{"id": 1, "messages": [{"role": "user", "content": "x"}]}'), chat_model), SHAPE
    )
    assert isinstance(row, Row)
    assert len(row.input_ids) == 9


def test_rows_of_another_form_are_bad_rows(write: Write, chat_model: Path) -> None:
    path = write(b'{"id": 1, "input_ids": [1]}\n{"id": 2, "messages": [{"role": "user", "content": "x"}]}')
    good, bad = open_dataset(dataset_config(path, chat_model), SHAPE)
    assert isinstance(good, Row)
    assert isinstance(bad, BadRow)
    assert bad.reason == "missing_field"
    first, second = open_dataset(dataset_config(path, chat_model, format="chat"), SHAPE)
    assert isinstance(first, BadRow)
    assert isinstance(second, Row)


def test_token_rows_need_no_tokenizer_but_conversations_do(write: Write, tmp_path: Path) -> None:
    path = write(b'{"id": 1, "messages": []}')
    with pytest.raises(RunError, match="tokenise the dataset beforehand") as caught:
        open_dataset(dataset_config(path, tmp_path), SHAPE)
    assert caught.value.kind == "chat_unavailable"
    assert list(open_dataset(dataset_config(path, tmp_path, format="tokens"), SHAPE))


def test_configured_template_is_used(write: Write, chat_model: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0].content }}", encoding="utf-8")
    path = write(b'{"id": 1, "messages": [{"role": "user", "content": "abc"}]}')
    (row,) = open_dataset(dataset_config(path, chat_model, chat_template=str(template)), SHAPE)
    assert isinstance(row, Row)
    assert len(row.input_ids) == 3
