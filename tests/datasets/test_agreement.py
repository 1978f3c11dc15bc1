"""A tokenizer that transformers loads otherwise than `tokenizer.json` says is refused before a row is read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset
from hsx.datasets.agreement import PROBES, compare, probes_of, require_agreement
from hsx.datasets.tokenizer import RawTokenizer
from hsx.errors import RunError
from hsx.records import Row
from hsx.testing.jobs import dataset_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=259, context_length=64)
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
REPLACED = {"tokenizer_class": "LlamaTokenizerFast"}
"""transformers puts a pre-tokenizer of its own in place of such a tokenizer's."""


@pytest.fixture
def doctored(model_with: Callable[[str | None], Path]) -> Callable[[dict[str, Any]], Path]:
    """A tokenizer folder with other settings in its `tokenizer_config.json`."""

    def doctor(changes: dict[str, Any]) -> Path:
        file = model_with(TEMPLATE) / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes), encoding="utf-8")
        return file.parent

    return doctor


def test_tokenizer_that_is_loaded_as_it_is(chat_model: Path) -> None:
    tokenizer = RawTokenizer(chat_model)
    found = compare(tokenizer)
    assert (found.loaded, found.problem, found.difference) == ("TokenizersBackend", "", None)
    assert str(found) == "as transformers loads it (TokenizersBackend)"
    require_agreement(tokenizer)


def test_special_tokens_are_tried_within_text(chat_model: Path) -> None:
    tokenizer = RawTokenizer(chat_model)
    tried = probes_of(tokenizer)
    assert tried[: len(PROBES)] == list(PROBES)
    assert {token for token in tokenizer.added if any(token in text for text in tried)} == set(tokenizer.added)


def test_difference_names_the_text_and_both_ids(doctored: Callable[[dict[str, Any]], Path]) -> None:
    tokenizer = RawTokenizer(doctored(REPLACED))
    difference = compare(tokenizer).difference
    assert difference is not None
    assert difference.ours == tokenizer.encode(difference.text)[0]
    with pytest.raises(RunError) as caught:
        require_agreement(tokenizer)
    assert caught.value.kind == "chat_unavailable"
    for part in (
        repr(difference.text),
        f"[{', '.join(map(str, difference.theirs[:24]))}",
        f"[{', '.join(map(str, difference.ours[:24]))}",
        "AutoTokenizer (LlamaTokenizer)",
        "dataset.tokenizer_differs = 'allow'",
    ):
        assert part in caught.value.message


@pytest.mark.parametrize("row", [{"text": "a b"}, {"messages": [{"role": "user", "content": "a b"}]}], ids=["text", "chat"])
def test_dataset_is_refused_before_its_first_row_unless_that_is_allowed(
    tmp_path: Path, doctored: Callable[[dict[str, Any]], Path], row: dict[str, Any]
) -> None:
    model = doctored(REPLACED)
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": "a", **row}) + "\n", encoding="utf-8")
    dataset = open_dataset(dataset_config(path, model), SHAPE)
    assert dataset.fingerprint()  # a job that was begun before goes on: its index is there, and no row is read
    with pytest.raises(RunError, match="gives 'How are you doing"):
        iter(dataset)
    (read,) = open_dataset(dataset_config(path, model, tokenizer_differs="allow"), SHAPE)
    assert isinstance(read, Row)
    assert read.input_ids.tolist() == RawTokenizer(model).encode("a b")[0]


def test_tokenizer_that_needs_code_of_its_own_is_not_compared(doctored: Callable[[dict[str, Any]], Path]) -> None:
    tokenizer = RawTokenizer(doctored({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    found = compare(tokenizer)
    assert (found.loaded, found.difference) == ("", None)
    assert str(found).startswith("not compared with transformers: ValueError: ")
    require_agreement(tokenizer)
