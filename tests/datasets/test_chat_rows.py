"""Conversations as rows: forms, roles, masks, and every way in which one can be bad."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsx.datasets.chat import ChatRows
from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import Limits
from hsx.datasets.template import ChatTemplate
from hsx.records import BadRow, Row

Write = Callable[[bytes], Path]
LIMITS = Limits(vocab_size=259, max_tokens=400)
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def template(chat_model: Path) -> ChatTemplate:
    return ChatTemplate(chat_model)


def read(path: Path, template: ChatTemplate, limits: Limits = LIMITS) -> Row | BadRow:
    (row,) = ChatRows(JsonlFile(path), limits, template)
    return row


def line(**fields: Any) -> bytes:
    return json.dumps({"id": "a", **fields}).encode()


def parts(template: ChatTemplate, row: Row | BadRow) -> tuple[str, str]:
    """The whole text of a row, and the masked part of it."""
    assert isinstance(row, Row), row
    decode = template.tokenizer.decode
    masked = [int(token) for token, kept in zip(row.input_ids, row.loss_mask, strict=True) if kept]
    return decode(row.input_ids.tolist()), decode(masked)


def test_messages_and_conversations_give_the_same_row(write: Write, template: ChatTemplate) -> None:
    messages = [{"role": "system", "content": "be kind"}, USER, {"role": "assistant", "content": "Hello 😀"}]
    share = [{"from": "system", "value": "be kind"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "Hello 😀"}]
    first = read(write(line(messages=messages)), template)
    second = read(write(line(conversations=share)), template)
    assert isinstance(first, Row)
    assert isinstance(second, Row)
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.loss_mask.tolist() == second.loss_mask.tolist()
    text, masked = parts(template, first)
    assert (
        text
        == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nHello 😀<|im_end|>\n"
    )
    assert masked == "Hello 😀<|im_end|>"


def test_every_assistant_turn_is_masked_and_nothing_else(write: Write, template: ChatTemplate) -> None:
    turns = [
        {"role": "user", "content": "assistant"},
        {"role": "assistant", "content": "assistant"},
        {"role": "tool", "content": "<result>"},
        {"role": "assistant", "content": "user"},
        {"role": "user", "content": "user"},
    ]
    assert parts(template, read(write(line(messages=turns)), template))[1] == "assistant<|im_end|>user<|im_end|>"


def test_conversation_without_assistant_has_an_empty_mask(write: Write, template: ChatTemplate) -> None:
    row = read(write(line(messages=[USER])), template)
    assert isinstance(row, Row)
    assert not row.loss_mask.any()


def test_text_parts_are_joined(write: Write, template: ChatTemplate) -> None:
    content = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert (
        "user\none two<|im_end|>"
        in parts(template, read(write(line(messages=[{"role": "user", "content": content}])), template))[0]
    )


def test_white_space_of_a_turn_survives(write: Write, template: ChatTemplate) -> None:
    turns = [USER, {"role": "assistant", "content": "\n  two  words \n"}]
    assert parts(template, read(write(line(messages=turns)), template))[1].endswith("two  words \n<|im_end|>")


def test_row_of_one_turn_with_only_white_space(write: Write, template: ChatTemplate) -> None:
    row = read(write(line(messages=[USER, {"role": "assistant", "content": " "}])), template)
    assert isinstance(row, Row)
    assert not row.loss_mask.any()


BAD: list[tuple[bytes, str, str]] = [
    (b'{"id": "a"}', "missing_field", "'conversations' is missing"),
    (line(messages=None), "missing_field", "'messages' is null"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "missing_field", "'id' is missing"),
    (line(messages=[]), "empty", "no turns"),
    (line(conversations=[]), "empty", "no turns"),
    (line(messages="hi"), "bad_type", "is a string; expected a list"),
    (line(messages=["hi"]), "bad_type", "turn 1 is a string"),
    (line(messages=[USER, {"content": "x"}]), "bad_chat", "turn 2 has no role"),
    (line(messages=[{"role": 3, "content": "x"}]), "bad_chat", "role 3"),
    (line(messages=[{"role": "user"}]), "bad_chat", "has no content"),
    (line(messages=[{"role": "user", "content": 7}]), "bad_chat", "an integer as content"),
    (line(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "bad_chat", "not text"),
    (line(messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}]), "bad_chat", "calls null; expected the name"),
    (line(messages=[{"role": "assistant", "content": "x", "reasoning_content": "y"}]), "bad_chat", "leaves out the thinking"),
    (line(messages=[USER], tools=[{"name": "f"}]), "bad_chat", "leaves out the declared function 'f'"),
    (b'{"id": "a", "messages": [{"role": "user", "content": "\\ud800"}]}', "not_json", "lone surrogate"),
    (b'{"id": "a", "messages": [{"role": "user", "content": "\\udc00 x"}]}', "not_json", "surrogate"),
    (line(messages=[{"role": "user", "content": "x" * 400}]), "too_long", "expected at most 400"),
]


@pytest.mark.parametrize(("text", "reason", "message"), BAD, ids=[f"{i}-{case[1]}" for i, case in enumerate(BAD)])
def test_bad_row(write: Write, template: ChatTemplate, text: bytes, reason: str, message: str) -> None:
    row = read(write(text), template)
    assert isinstance(row, BadRow)
    assert row.reason == reason
    assert re.search(message, row.message), row.message


def test_tokenizer_larger_than_the_model_is_caught(write: Write, template: ChatTemplate) -> None:
    row = read(write(line(messages=[{"role": "user", "content": "~"}])), template, Limits(vocab_size=20, max_tokens=400))
    assert isinstance(row, BadRow)
    assert row.reason == "out_of_vocabulary"


def test_duplicate_ids_name_both_lines(write: Write, template: ChatTemplate) -> None:
    path = write(line(messages=[USER]) + b"\n" + line(messages=[USER]) + b"\n")
    first, second = ChatRows(JsonlFile(path), LIMITS, template)
    assert isinstance(first, Row)
    assert isinstance(second, BadRow)
    assert (second.reason, second.line) == ("duplicate_id", 2)
    assert "line 1" in second.message


def test_fingerprint_knows_tokenizer_and_template(
    write: Write, template: ChatTemplate, model_with: Callable[[str | None], Path]
) -> None:
    path = write(line(messages=[USER]))
    first = ChatRows(JsonlFile(path), LIMITS, template).fingerprint()
    other = ChatRows(JsonlFile(path), LIMITS, ChatTemplate(model_with("{{ messages[0].content }}"))).fingerprint()
    assert first.keys() == other.keys()
    assert {key for key in first if first[key] != other[key]} == {"dataset.chat_template"}
