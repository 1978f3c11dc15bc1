"""The tiny models are what the tests take them for: the same every time, with a tokenizer that loses nothing."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, get_args

import pytest

from hsx.testing import tiny_models

if TYPE_CHECKING:
    from pathlib import Path


def digest(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


@pytest.mark.parametrize("kind", get_args(tiny_models.Kind))
def test_equal_seeds_give_equal_models(kind: tiny_models.Kind, tmp_path: Path) -> None:
    first = tiny_models.make(kind, tmp_path / "a")
    assert digest(first) == digest(tiny_models.make(kind, tmp_path / "b"))
    other = digest(tiny_models.make(kind, tmp_path / "c", seed=1))
    assert other["model.safetensors"] != digest(first)["model.safetensors"]
    config = json.loads((first / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (tiny_models.LAYERS, tiny_models.HIDDEN_SIZE)
    assert (config["vocab_size"], config["dtype"]) == (tiny_models.VOCAB_SIZE, "float32")


def test_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tiny_models.make_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    text = "How are you doing?\n\tनमस्ते 潮水 🙂 naïve  x=1;"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < tiny_models.VOCAB_SIZE


def test_chat_template_renders_every_turn(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tiny_models.make("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    assert text == ("<s><|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n")
    assert tokenizer("<|im_start|>").input_ids == [tiny_models.SPECIAL_TOKENS.index("<|im_start|>")]


def test_unknown_kind_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tiny_models.main(["gpt", str(tmp_path)]) == 2
    assert "usage:" in capsys.readouterr().err
