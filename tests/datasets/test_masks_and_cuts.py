"""Loss masks in all their forms, rows that are too long, and formatted text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset
from hsx.index import build_index
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=259, context_length=64)
IDS = [10, 11, 12, 13]


def read(tmp_path: Path, fields: dict[str, Any], model: Path | str = "model", **dataset: Any) -> Row | BadRow:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", **fields}) + "\n", encoding="utf-8")
    (row,) = open_dataset(dataset_config(path, model, **dataset), SHAPE)
    return row


@pytest.mark.parametrize(
    ("fields", "mask"),
    [
        ({}, [1, 1, 1, 1]),
        ({"loss_mask": None}, [1, 1, 1, 1]),
        ({"loss_mask": [0, True, 1, False]}, [0, 1, 1, 0]),
        ({"labels": [-100, 11, 12, -100]}, [0, 1, 1, 0]),
        ({"prompt_length": 0}, [1, 1, 1, 1]),
        ({"prompt_length": 3}, [0, 0, 0, 1]),
        ({"prompt_length": 4}, [0, 0, 0, 0]),
        ({"prompt_length": 1, "labels": [-100, 11, 12, 13], "loss_mask": [0, 1, 1, 1]}, [0, 1, 1, 1]),
    ],
)
def test_mask(tmp_path: Path, fields: dict[str, Any], mask: list[int]) -> None:
    row = read(tmp_path, {"input_ids": IDS, **fields})
    assert isinstance(row, Row), row
    assert row.loss_mask.tolist() == mask


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"loss_mask": [0, 2, 1, 1]}, "bad_mask", "loss_mask[1] is 2; expected 0 or 1"),
        ({"loss_mask": [0, 1]}, "mask_length", "loss_mask has 2 values; expected 4"),
        ({"loss_mask": [0.0, 1, 1, 1]}, "bad_mask", "is not a list of 0 and 1"),
        ({"loss_mask": [0, 1, 1, 2**70]}, "bad_mask", "more than 64 bits"),
        ({"labels": [-100, 11, 12, True]}, "bad_mask", "is not a list of token ids and -100"),
        ({"labels": [-100, 11]}, "mask_length", "labels has 2 values"),
        ({"labels": [-100, 11, 12, 99]}, "bad_mask", "labels[3] is 99; expected -100 or 13, the token that stands there"),
        ({"labels": [11, 12, 13, -100]}, "bad_mask", "they look shifted by one"),
        ({"prompt_length": 5}, "bad_mask", "prompt_length is 5; expected 0 to 4"),
        ({"prompt_length": -1}, "bad_mask", "prompt_length is -1"),
        ({"prompt_length": 1.5}, "bad_type", "'prompt_length' is a number"),
        ({"prompt_length": True}, "bad_type", "'prompt_length' is true"),
        ({"prompt_length": 1, "loss_mask": [0, 1, 0, 1]}, "bad_mask", "loss_mask says 0 of token 2, and prompt_length says 1"),
    ],
)
def test_bad_mask(tmp_path: Path, fields: dict[str, Any], reason: str, words: str) -> None:
    row = read(tmp_path, {"input_ids": IDS, **fields})
    assert isinstance(row, BadRow), row
    assert row.reason == reason
    assert words in row.message


MASK = [0, 0, 1, 1, 0, 0, 1, 0, 1, 1]


@pytest.mark.parametrize(
    ("policy", "most", "kept", "mask"),
    [
        ("left", 4, [6, 7, 8, 9], [1, 0, 1, 1]),
        ("right", 4, [0, 1, 2, 3], [0, 0, 1, 1]),
        ("right", 3, [0, 1, 2], [0, 0, 1]),
        ("turns", 9, [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 0, 1]),
        ("turns", 6, [0, 1, 2, 3], [0, 0, 1, 1]),
        ("turns", 4, [0, 1, 2, 3], [0, 0, 1, 1]),
        ("turns", 10, list(range(10)), MASK),
    ],
)
def test_cut(tmp_path: Path, policy: str, most: int, kept: list[int], mask: list[int]) -> None:
    row = read(tmp_path, {"input_ids": list(range(10)), "loss_mask": MASK}, too_long=policy, max_tokens=most)
    assert isinstance(row, Row), row
    assert (row.input_ids.tolist(), row.loss_mask.tolist(), row.cut) == (kept, mask, 10 - len(kept))


@pytest.mark.parametrize(
    ("policy", "most", "words"),
    [
        ("reject", 9, "has 10 tokens; expected at most 9"),
        ("right", 2, "cut to 2, none is left that counts for the loss"),
        ("turns", 3, "no turn of the assistant ends within 3"),
    ],
)
def test_too_long_for_its_policy(tmp_path: Path, policy: str, most: int, words: str) -> None:
    row = read(tmp_path, {"input_ids": list(range(10)), "loss_mask": MASK}, too_long=policy, max_tokens=most)
    assert isinstance(row, BadRow), row
    assert row.reason == "too_long"
    assert words in row.message


def test_row_without_any_token_that_counts_is_cut_like_others(tmp_path: Path) -> None:
    row = read(tmp_path, {"input_ids": list(range(10)), "prompt_length": 10}, too_long="right", max_tokens=3)
    assert isinstance(row, Row)
    assert row.loss_mask.tolist() == [0, 0, 0]


def test_ids_outside_the_vocabulary_are_found_in_what_is_cut_off_too(tmp_path: Path) -> None:
    row = read(tmp_path, {"input_ids": [1, 2, 999]}, too_long="right", max_tokens=2)
    assert isinstance(row, BadRow)
    assert row.reason == "out_of_vocabulary"


def test_formatted_text_gets_no_special_tokens(tmp_path: Path, chat_model: Path) -> None:
    row = read(tmp_path, {"text": "<|im_start|>x"}, chat_model)
    assert isinstance(row, Row)
    assert (len(row.input_ids), row.loss_mask.tolist()) == (2, [1, 1])


def test_markers_say_what_counts_in_formatted_text(tmp_path: Path, chat_model: Path) -> None:
    text = "[u]ab[a]cd[/a][u]e[a]f"
    row = read(tmp_path, {"body": text}, chat_model, format="text", columns={"text": "body"}, text_markers=["[a]", "[/a]"])
    assert isinstance(row, Row)
    counted = [char for char, counts in zip(text, row.loss_mask, strict=True) if counts]
    assert "".join(counted) == "cd[/a]f"


@pytest.mark.parametrize(
    ("value", "reason"),
    [(5, "bad_type"), ("", "empty"), (None, "missing_field"), ("x" * 57, "too_long"), ("é" * 29, "too_long")],
)
def test_bad_text(tmp_path: Path, chat_model: Path, value: object, reason: str) -> None:
    row = read(tmp_path, {"text": value}, chat_model, format="text")
    assert isinstance(row, BadRow), row
    assert row.reason == reason


def test_text_that_begins_with_the_start_token_twice(tmp_path: Path, model_with: Any) -> None:
    model = model_with("{{ messages[0].content }}")
    settings = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8")) | {"bos_token": "<|im_start|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    twice = "<|im_start|><|im_start|>x"
    for fields in ({"text": twice}, {"messages": [{"role": "user", "content": twice}]}):
        row = read(tmp_path, fields, model)
        assert isinstance(row, BadRow), row
        assert (row.reason, "twice; expected once" in row.message) == ("doubled_start", True)


def test_everything_that_breaks_such_tools_is_counted(tmp_path: Path, chat_model: Path) -> None:
    """Rows in are rows accepted and rows rejected, for each reason; the text of each row is its own."""
    good: list[dict[str, Any]] = [
        {"id": 7, "messages": [{"role": "assistant", "content": "first"}, {"role": "user", "content": "x"}]},
        {"id": "../../etc/passwd", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {
            "id": "mixed",
            "messages": [{"from": "human", "value": "q"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}],
        },
        {"id": "empty", "messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}]},
        {"id": "tool", "messages": [{"role": "tool", "content": "r"}, {"role": "assistant", "content": "a"}]},
        *({"id": f"one-{number}", "messages": [{"role": "assistant", "content": "a"}]} for number in range(300)),
    ]
    bad = [
        ('{"id": "7", "messages": [{"role": "user", "content": "x"}]}', "duplicate_id"),
        ('{"id": "null", "messages": [{"role": "user", "content": null}]}', "bad_chat"),
        ('{"id": "lone", "messages": [{"role": "user", "content": "\\ud83d"}]}', "not_json"),
        ('{"id": "nan", "score": NaN, "messages": []}', "not_json"),
        ('{"id": "infinite", "score": -Infinity, "messages": []}', "not_json"),
        ('{"id": "other", "input_ids": [1]}', "missing_field"),
        ('{"id": "parts", "messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}', "bad_chat"),
        ('{"id": 1.5, "messages": [{"role": "user", "content": "x"}]}', "bad_type"),
        ('{"id": "long", "messages": [{"role": "user", "content": "' + "x" * (5 << 20) + '"}]}', "too_long"),
        ('["no", "object"]', "bad_type"),
        ('{"cut": ', "not_json"),
    ]
    lines = [json.dumps(row) for row in good] + [line for line, _ in bad]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    dataset = open_dataset(dataset_config(path, chat_model), SHAPE)
    rows = list(dataset)
    assert [row.reason for row in rows if isinstance(row, BadRow)] == [reason for _, reason in bad]
    summary = build_index(dataset, tmp_path / "store", "skip", lambda *_: None, tmp_path / "state")
    expected: dict[str, int] = {}
    for _, reason in bad:
        expected[reason] = expected.get(reason, 0) + 1
    assert summary.reasons == dict(sorted(expected.items()))
    assert (summary.samples, summary.samples + summary.rejected) == (len(good), len(lines))
    assert not any(part == "passwd" for found in tmp_path.rglob("*") for part in found.parts)
