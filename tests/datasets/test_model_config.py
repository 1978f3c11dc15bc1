"""Reading a model's config.json."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.spec import ModelShape
from hsx.errors import RunError
from hsx.model_config import model_fingerprint, read_model_shape

if TYPE_CHECKING:
    from pathlib import Path

LLAMA: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "max_position_embeddings": 512}


def model(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def test_plain_model(tmp_path: Path) -> None:
    scaled = {**LLAMA, "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 64}}
    assert read_model_shape(model(tmp_path, scaled)) == ModelShape(64, 4, 100, 512)


def test_multimodal_model_nests_the_language_model(tmp_path: Path) -> None:
    nested = {"model_type": "kimi_k25", "vision_config": {"hidden_size": 1}, "text_config": LLAMA, "vocab_size": 5}
    assert read_model_shape(model(tmp_path, nested)) == ModelShape(64, 4, 100, 512)


def test_older_names(tmp_path: Path) -> None:
    gpt2 = {"n_embd": 64, "n_layer": 4, "vocab_size": 100, "n_positions": 512}
    assert read_model_shape(model(tmp_path, gpt2)) == ModelShape(64, 4, 100, 512)


@pytest.mark.parametrize("key", list(LLAMA))
@pytest.mark.parametrize("value", [None, 0, -1, "64", 1.5, True])
def test_wrong_value_is_named(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(RunError, match=key) as caught:
        read_model_shape(model(tmp_path, {**LLAMA, key: value}))
    assert caught.value.kind == "model_unreadable"
    assert "positive integer" in caught.value.message


def test_missing_key_of_a_nested_config_is_named_in_full(tmp_path: Path) -> None:
    nested = {"text_config": {key: value for key, value in LLAMA.items() if key != "vocab_size"}}
    with pytest.raises(RunError, match=r"no key text_config\.vocab_size"):
        read_model_shape(model(tmp_path, nested))


def test_unreadable_files(tmp_path: Path) -> None:
    for content, expected in (
        (None, "No such file"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("\udcff", "not JSON"),
    ):
        if content is not None:
            (tmp_path / "config.json").write_text(content, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(RunError, match=expected) as caught:
            read_model_shape(tmp_path)
        assert caught.value.kind == "model_unreadable"


def test_fingerprint_knows_config_weights_and_revision(tmp_path: Path) -> None:
    model(tmp_path, LLAMA)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"abc")
    first = model_fingerprint(tmp_path, "main")
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    assert model_fingerprint(tmp_path, "main") == first
    weights.write_bytes(b"abcd")
    assert {key for key, value in model_fingerprint(tmp_path, "v2").items() if value != first[key]} == {
        "model.revision",
        "model.weights",
    }
    model(tmp_path, {**LLAMA, "vocab_size": 101})
    assert model_fingerprint(tmp_path, "main")["model.config"] != first["model.config"]


def test_fingerprint_of_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file") as caught:
        model_fingerprint(tmp_path / "none", "")
    assert caught.value.kind == "model_unreadable"
