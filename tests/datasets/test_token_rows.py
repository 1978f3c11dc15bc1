"""Tokenised rows: what is taken, and every way in which a row can be bad."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import LONGEST_ID, Limits
from hsx.datasets.tokens import TokenRows
from hsx.records import BadRow, Row

Write = Callable[[bytes], Path]
LIMITS = Limits(vocab_size=100, max_tokens=8)


def rows(path: Path) -> list[Row | BadRow]:
    return list(TokenRows(JsonlFile(path), LIMITS))


def only(path: Path) -> Row:
    (row,) = rows(path)
    assert isinstance(row, Row)
    return row


def bad(path: Path) -> BadRow:
    (row,) = rows(path)
    assert isinstance(row, BadRow)
    return row


def test_row_with_mask(write: Write) -> None:
    row = only(write(b'{"id": "a", "input_ids": [0, 99, 5], "loss_mask": [0, 1, true], "extra": {"x": [1.5]}}\n'))
    assert (row.sample_id, row.line) == ("a", 1)
    assert row.input_ids.dtype == np.int32
    assert row.loss_mask.dtype == np.uint8
    assert row.input_ids.tolist() == [0, 99, 5]
    assert row.loss_mask.tolist() == [0, 1, 1]


@pytest.mark.parametrize("mask", [b"", b', "loss_mask": null'])
def test_without_mask_every_token_counts(write: Write, mask: bytes) -> None:
    assert only(write(b'{"id": "a", "input_ids": [1, 2]' + mask + b"}")).loss_mask.tolist() == [1, 1]


def test_integer_ids_become_text(write: Write) -> None:
    assert only(write(b'{"id": -12, "input_ids": [1]}')).sample_id == "-12"


def test_id_of_any_script(write: Write) -> None:
    assert only(write('{"id": "naïve/日本\\ud83d\\ude00", "input_ids": [1]}'.encode())).sample_id == "naïve/日本😀"


def test_duplicate_keys_take_the_last(write: Write) -> None:
    assert only(write(b'{"id": "a", "input_ids": [1], "input_ids": [2]}')).input_ids.tolist() == [2]


def test_longest_row_and_largest_id_are_taken(write: Write) -> None:
    assert only(write(b'{"id": "a", "input_ids": [99, 0, 0, 0, 0, 0, 0, 0]}')).input_ids.tolist() == [99, *[0] * 7]


BAD = [
    (b"not json", "not_json", "malformed"),
    (b'{"id": "a", "input_ids": [1]', "not_json", "truncated"),
    (b'{"id": "a", "input_ids": [1]} {}', "not_json", "trailing"),
    (b'{"id": "a", "input_ids": [NaN]}', "not_json", "malformed"),
    (b'{"id": "a", "input_ids": [1], "weight": NaN}', "not_json", "malformed"),
    (b'{"id": "a", "input_ids": [1], "weight": Infinity}', "not_json", "malformed"),
    (b'{"id": "\\ud800", "input_ids": [1]}', "not_json", "lone surrogate"),
    (b'{"id": "a", "input_ids": [1], "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not_json", "recursion"),
    (b"[1, 2, 3]", "bad_type", "not a JSON object"),
    (b"null", "bad_type", "not a JSON object"),
    (b'"text"', "bad_type", "not a JSON object"),
    (b'{"input_ids": [1]}', "missing_field", "'id' is missing"),
    (b'{"id": null, "input_ids": [1]}', "missing_field", "'id' is null"),
    (b'{"id": "", "input_ids": [1]}', "missing_field", "empty string"),
    (b'{"id": 1.5, "input_ids": [1]}', "bad_type", "1.5.*expected a string or an integer"),
    (b'{"id": true, "input_ids": [1]}', "bad_type", "is true; expected a string or an integer"),
    (b'{"id": ["a"], "input_ids": [1]}', "bad_type", "expected a string or an integer"),
    (b'{"id": "' + b"x" * (LONGEST_ID + 1) + b'", "input_ids": [1]}', "bad_type", "at most 1024"),
    (b'{"id": ' + b"9" * 5000 + b', "input_ids": [1]}', "not_json", "huge number"),
    (b'{"id": "a"}', "missing_field", "'input_ids' is missing"),
    (b'{"id": "a", "input_ids": null}', "missing_field", "'input_ids' is null"),
    (b'{"id": "a", "input_ids": []}', "empty", "at least one"),
    (b'{"id": "a", "input_ids": "1 2"}', "bad_type", "got a string"),
    (b'{"id": "a", "input_ids": {"0": 1}}', "bad_type", "got an object"),
    (b'{"id": "a", "input_ids": 5}', "bad_type", "got an integer"),
    (b'{"id": "a", "input_ids": [1, 2.0]}', "bad_type", r"got a number.*\[1\]"),
    (b'{"id": "a", "input_ids": [true]}', "bad_type", "got a boolean"),
    (b'{"id": "a", "input_ids": ["1"]}', "bad_type", "got a string"),
    (b'{"id": "a", "input_ids": [null]}', "bad_type", "got null"),
    (b'{"id": "a", "input_ids": [[1, 2]]}', "bad_type", "got a list"),
    (b'{"id": "a", "input_ids": [1, 100]}', "out_of_vocabulary", r"input_ids\[1\] is 100; expected 0 to 99"),
    (b'{"id": "a", "input_ids": [-1]}', "out_of_vocabulary", r"input_ids\[0\] is -1"),
    (b'{"id": "a", "input_ids": [4294967296]}', "out_of_vocabulary", "4294967296"),
    (b'{"id": "a", "input_ids": [4294967301]}', "out_of_vocabulary", "4294967301"),
    (b'{"id": "a", "input_ids": [9223372036854775808]}', "out_of_vocabulary", "9223372036854775808"),
    (b'{"id": "a", "input_ids": [123456789012345678901234567890]}', "out_of_vocabulary", "123456789012345678901234567890"),
    (b'{"id": "a", "input_ids": [' + b"9" * 5000 + b"]}", "out_of_vocabulary", "out of range"),
    (b'{"id": "a", "input_ids": [1,1,1,1,1,1,1,1,1]}', "too_long", "9 tokens; expected at most 8"),
    (b'{"id": "a", "input_ids": [1, 2], "loss_mask": [1]}', "mask_length", "1 values; expected 2"),
    (b'{"id": "a", "input_ids": [1], "loss_mask": []}', "mask_length", "0 values; expected 1"),
    (b'{"id": "a", "input_ids": [1, 2], "loss_mask": [1, 2]}', "bad_mask", r"loss_mask\[1\] is 2"),
    (b'{"id": "a", "input_ids": [1], "loss_mask": [-1]}', "bad_mask", "expected 0 or 1"),
    (b'{"id": "a", "input_ids": [1], "loss_mask": [0.5]}', "bad_mask", "got a number"),
    (b'{"id": "a", "input_ids": [1], "loss_mask": ["1"]}', "bad_mask", "got a string"),
    (b'{"id": "a", "input_ids": [1], "loss_mask": 1}', "bad_mask", "got an integer"),
]


@pytest.mark.parametrize(("line", "reason", "message"), BAD, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD)])
def test_bad_row(write: Write, line: bytes, reason: str, message: str) -> None:
    row = bad(write(b"\n" + line + b"\n"))
    assert (row.line, row.reason) == (2, reason)
    assert re.search(message, row.message), row.message
    assert len(row.message) < 400


def test_duplicate_id_names_both_lines(write: Write) -> None:
    good, other, double, text = rows(
        write(
            b'{"id": "7", "input_ids": [1]}\n{"id": "8", "input_ids": [1]}\n\n'
            b'{"id": 7, "input_ids": [2]}\n{"id": "7", "input_ids": [3]}\n'
        )
    )
    assert isinstance(good, Row)
    assert isinstance(other, Row)
    assert isinstance(double, BadRow)
    assert (double.line, double.sample_id, double.reason) == (4, "7", "duplicate_id")
    assert "line 1" in double.message
    assert isinstance(text, BadRow)
    assert "line 1" in text.message


def test_row_after_a_bad_one_of_the_same_id_is_reported(write: Write) -> None:
    first, second = rows(write(b'{"id": "a", "input_ids": []}\n{"id": "a", "input_ids": [1]}\n'))
    assert isinstance(first, BadRow)
    assert isinstance(second, BadRow)
    assert [first.reason, second.reason] == ["empty", "duplicate_id"]


def test_second_pass_gives_the_same_rows(write: Write) -> None:
    dataset = TokenRows(JsonlFile(write(b'{"id": "a", "input_ids": [1]}\n{"id": "b", "input_ids": [2]}\n')), LIMITS)
    assert [row.sample_id for row in dataset] == [row.sample_id for row in dataset] == ["a", "b"]


def test_fingerprint_changes_with_content_and_limits(write: Write) -> None:
    path = write(b'{"id": "a", "input_ids": [1]}\n')
    first = TokenRows(JsonlFile(path), LIMITS).fingerprint()
    assert TokenRows(JsonlFile(path), LIMITS).fingerprint() == first
    assert TokenRows(JsonlFile(path), Limits(100, 9)).fingerprint() != first
    assert TokenRows(JsonlFile(path), Limits(101, 8)).fingerprint() != first
    path.write_bytes(b'{"id": "a", "input_ids": [2]}\n')
    assert TokenRows(JsonlFile(path), LIMITS).fingerprint() != first
