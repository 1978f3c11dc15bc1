"""JSON in the words of those who write it."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
import pytest

from hsx.core.json_words import in_words, kind_of, shown

KINDS = [
    (None, "null", "null"),
    (True, "true", "true"),
    (0, "an integer", "0"),
    (0.5, "a number", "0.5"),
    ("x", "a string", "'x'"),
    ([1], "a list", "[1]"),
    ({"a": 1}, "an object", "{'a': 1}"),
    (datetime.date(2026, 1, 2), "a value of type date", "datetime.date(2026, 1, 2)"),
]


@pytest.mark.parametrize(("value", "kind", "text"), KINDS)
def test_what_a_value_is(value: Any, kind: str, text: str) -> None:
    assert (kind_of(value), shown(value)) == (kind, text)


@pytest.mark.parametrize(
    ("document", "expected", "words"),
    [
        (b"[1]", dict[str, int], "expected an object, got a list"),
        (b'{"a": "1"}', dict[str, int], "expected an integer, got a string at [...]"),
        (b"[1, null]", list[int], "expected an integer, got null at [1]"),
        (b"[0, 0.5]", list[int | bool], "expected a boolean or an integer, got a number at [1]"),
        (b"[true]", list[int], "expected an integer, got a boolean at [0]"),
    ],
)
def test_what_the_decoder_says(document: bytes, expected: Any, words: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.json.decode(document, type=expected)
    assert in_words(str(caught.value)) == words


def test_other_messages_stay_as_they_are() -> None:
    assert in_words("Integer value out of range - at `$[0]`") == "Integer value out of range at [0]"
    assert in_words("JSON is malformed: expected `:` (byte 3)") == "JSON is malformed: expected `:` (byte 3)"
