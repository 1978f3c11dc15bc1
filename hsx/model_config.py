"""What a model folder says of the model: its shape, and a fingerprint that tells it from any other."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Final

from hsx.core.json_words import kind_of
from hsx.core.spec import ModelShape
from hsx.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

# The names that model families use, the common one first.
_KEYS: Final = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "vocab_size": ("vocab_size",),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
# Multimodal models nest the language model's configuration.
_NESTED: Final = ("text_config", "llm_config", "language_config")
_WEIGHTS: Final = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def read_model_shape(path: Path) -> ModelShape:
    """The model's shape out of `config.json`, or out of its `text_config` for a multimodal model.

    `max_position_embeddings` is taken as it is: configurations with rope scaling give the extended length there.

    Raises:
        RunError: `model_unreadable`, naming the file and the key.
    """
    if not path.is_dir():
        state = "is not a folder" if path.exists() else "does not exist"
        raise RunError("model_unreadable", f"{path} {state}; expected a local folder; hub names are not downloaded")
    file = path / "config.json"
    config = _load(file)
    where = ""
    if not any(key in config for key in _KEYS["hidden_size"]):
        where = next((name for name in _NESTED if isinstance(config.get(name), dict)), "")
        config = config[where] if where else config
    found = {field: _positive(file, where, config, keys) for field, keys in _KEYS.items()}
    return ModelShape(**found)


def model_fingerprint(path: Path, revision: str) -> dict[str, str]:
    """Fields that tell this model from any other: the revision as declared, and hashes of `config.json` and of the names and
    sizes of the weight files (not of their content: a terabyte is not read for a start).

    Raises:
        RunError: `model_unreadable`.
    """
    file = path / "config.json"
    try:
        config = file.read_bytes()
        weights = sorted((entry.name, entry.stat().st_size) for entry in path.iterdir() if entry.suffix in _WEIGHTS)
    except OSError as error:
        raise RunError("model_unreadable", f"{file}: {error.strerror or error}") from error
    listed = "".join(f"{name} {size}\n" for name, size in weights)
    return {
        "model.revision": revision,
        "model.config": hashlib.sha256(config).hexdigest(),
        "model.weights": hashlib.sha256(listed.encode()).hexdigest(),
    }


def _load(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError("model_unreadable", f"{file}: {error.strerror or error}; expected the model's configuration") from error
    except ValueError as error:
        raise RunError("model_unreadable", f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise RunError("model_unreadable", f"{file} holds {kind_of(config)}; expected a JSON object")
    return config


def _positive(file: Path, where: str, config: dict[str, Any], keys: tuple[str, ...]) -> int:
    prefix = f"{where}." if where else ""
    key = next((key for key in keys if config.get(key) is not None), None)
    if key is None:
        raise RunError("model_unreadable", f"{file} has no key {prefix}{keys[0]}; expected a positive integer")
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RunError("model_unreadable", f"{file}: key {prefix}{key} is {value!r}; expected a positive integer")
    return value
