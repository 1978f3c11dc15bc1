"""The chat dataset that ships with the project: its form and its variety."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hsx.datasets.chat import ChatRows
from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import Limits
from hsx.datasets.template import ChatTemplate
from hsx.records import Row

DEMO = Path(__file__).parents[2] / "demo" / "chat.jsonl"


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in DEMO.read_text(encoding="utf-8").splitlines()]


def texts(row: dict[str, Any]) -> list[str]:
    return [turn.get("content") or turn.get("value") for turn in row.get("messages") or row["conversations"]]


def test_at_least_64_conversations_in_both_forms(rows: list[dict[str, Any]]) -> None:
    assert len(rows) >= 64
    assert len({row["id"] for row in rows}) == len(rows)
    assert sum("messages" in row for row in rows) > 20
    assert sum("conversations" in row for row in rows) > 20


def test_variety(rows: list[dict[str, Any]]) -> None:
    everything = "".join(text for row in rows for text in texts(row))
    for name, first, last in (
        ("Cyrillic", 0x430, 0x44F),
        ("Han", 0x4E00, 0x9FA5),
        ("Hiragana", 0x3041, 0x3093),
        ("Arabic", 0x627, 0x64A),
        ("Devanagari", 0x905, 0x939),
        ("Hangul", 0xAC00, 0xD7A3),
        ("Greek", 0x3B1, 0x3C9),
        ("emoji", 0x1F600, 0x1F939),
    ):
        assert any(first <= ord(character) <= last for character in everything), name
    assert "```python" in everything
    roles = {turn.get("role") or turn.get("from") for row in rows for turn in row.get("messages") or row["conversations"]}
    assert roles == {"system", "user", "assistant", "tool", "human", "gpt"}


def test_every_row_is_usable(chat_model: Path) -> None:
    read = list(ChatRows(JsonlFile(DEMO), Limits(259, 8184), ChatTemplate(chat_model)))
    assert [row for row in read if not isinstance(row, Row)] == []
