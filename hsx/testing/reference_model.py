"""A small Llama-like transformer in torch, and the same mathematics once more in numpy to compare with.

`ReferenceModel` computes in float32, chunk by chunk with a KV cache, as a serving engine does. `reference_states` computes a
whole prompt at once in float64 with no code in common but the weights: what a test holds against the states in a store.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn import functional

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import CaptureSpec

VOCAB_PADDING: Final = 64
"""Servers pad the embedding table to a multiple of this: ids up to there are looked up, and give garbage."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of the model, under the names of `config.json`.

    Attributes:
        hidden_size: H.
        num_hidden_layers: N.
        vocab_size: ids are valid in [0, vocab_size).
        max_position_embeddings: context length.
        intermediate_size: width of the MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides the query heads.
        head_dim: width of a head; even.
        rms_norm_eps: epsilon of every norm.
        rope_theta: base of the rotary embedding.
        seed: of the random weights, where the folder has none.
    """

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    seed: int


def read_config(folder: Path) -> ModelConfig:
    """Reads `config.json`; heads, widths and constants that it leaves out have Llama's defaults.

    Raises RunError `model_unreadable` where the file or one of the four sizes is missing, or the model is not Llama-like.
    """
    path = folder / "config.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        hidden, layers, vocab, context = (
            int(document[key]) for key in ("hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings")
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunError("model_unreadable", f"{path}: {type(error).__name__}: {error}; expected a model's config") from error
    kind = document.get("model_type", "llama")
    rope = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if kind != "llama" or rope.get("rope_type", "default") != "default":
        raise RunError(
            "model_unreadable", f"{path}: model_type {kind!r}, rope {rope}; the reference engine computes plain Llama only"
        )
    heads = int(document.get("num_attention_heads", max(1, hidden // 16)))
    return ModelConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        vocab_size=vocab,
        max_position_embeddings=context,
        intermediate_size=int(document.get("intermediate_size", 2 * hidden)),
        num_attention_heads=heads,
        num_key_value_heads=int(document.get("num_key_value_heads", heads)),
        head_dim=int(document.get("head_dim") or hidden // heads),
        rms_norm_eps=float(document.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", document.get("rope_theta", 10000.0))),
        seed=int(document.get("seed", 0)),
    )


@dataclass(frozen=True, slots=True)
class Layer:
    """Float32 weights of one decoder layer; matrices are [out, in]."""

    input_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor


_NAMES: Final = {
    "input_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class Cache:
    """Keys and values of one prompt: float32 [layers, 2, tokens, kv heads, head_dim], filled up to `length`."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self.data = torch.empty(config.num_hidden_layers, 2, tokens, config.num_key_value_heads, config.head_dim)
        self.length = 0


class ReferenceModel:
    """The model of one folder: weights from its `*.safetensors` where there are any, else random by the config's seed.

    Raises RunError `model_unreadable`.
    """

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder)
        files = sorted(folder.glob("*.safetensors"))
        self.embedding, self.layers, self.norm = _loaded(self.config, files) if files else _random(self.config)
        padded = -(-self.config.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        table = torch.zeros(padded, self.config.hidden_size)
        table[: len(self.embedding)] = self.embedding
        self.embedding = table
        half = torch.arange(0, self.config.head_dim, 2, dtype=torch.float64) / self.config.head_dim
        angles = torch.outer(
            torch.arange(self.config.max_position_embeddings, dtype=torch.float64), self.config.rope_theta**-half
        )
        self._cos = torch.cat((angles.cos(), angles.cos()), -1).float()[:, None]
        self._sin = torch.cat((angles.sin(), angles.sin()), -1).float()[:, None]

    @torch.inference_mode()
    def forward(self, batch: Sequence[tuple[NDArray[np.int32], Cache]], spec: CaptureSpec) -> list[torch.Tensor]:
        """Prefills the next chunk of each prompt of a batch, all in one pass.

        Args:
            batch: per prompt its next n ids, int32 [n], below the padded vocabulary, and its cache, which is filled further.
            spec: which states to return.

        Returns:
            float32 [n, L, H] per prompt.
        """
        config = self.config
        counts = [len(ids) for ids, _ in batch]
        spans = [(cache, cache.length, cache.length + len(ids)) for ids, cache in batch]
        position = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        cos, sin = self._cos[position], self._sin[position]
        mask = _mask(spans)
        taken = []
        hidden = self.embedding[torch.from_numpy(np.concatenate([ids for ids, _ in batch]).astype(np.int64))]
        if 0 in spec.layers:
            taken.append(hidden)
        for number, layer in enumerate(self.layers, start=1):
            normed = self._rms(hidden, layer.input_norm)
            query, key, value = (
                (normed @ matrix.T).view(len(normed), -1, config.head_dim) for matrix in (layer.query, layer.key, layer.value)
            )
            fresh = torch.stack((_rotate(key, cos, sin), value))
            past = []
            for (cache, start, stop), chunk in zip(spans, torch.split(fresh, counts, dim=1), strict=True):
                cache.data[number - 1, :, start:stop] = chunk
                past.append(cache.data[number - 1, :, :stop])
            keys, values = (torch.cat(past, dim=1) if len(past) > 1 else past[0]).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                _rotate(query, cos, sin).transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=len(keys) != query.shape[1]
            )
            hidden = hidden + mixed.transpose(0, 1).reshape(len(normed), -1) @ layer.output.T
            normed = self._rms(hidden, layer.post_norm)
            hidden = hidden + (functional.silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
            if number in spec.layers:
                taken.append(hidden)
        for cache, _, stop in spans:
            cache.length = stop
        taken.append(self._rms(hidden, self.norm) if spec.final == "post_norm" else hidden)
        return list(torch.split(torch.stack(taken, dim=1), counts))

    def _rms(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.config.rms_norm_eps) * weight


def reference_states(model: ReferenceModel, ids: Sequence[int] | NDArray[np.int32], spec: CaptureSpec) -> NDArray[np.float32]:
    """The states of a whole prompt, float32 [tokens, L, H]: no chunks, no cache, no torch, float64 inside."""
    config = model.config
    tokens, group = len(ids), config.num_attention_heads // config.num_key_value_heads
    positions = np.arange(tokens, dtype=np.float64)[:, None]
    angles = positions * config.rope_theta ** -(np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    turn = np.exp(1j * angles)
    future = np.triu(np.full((tokens, tokens), -np.inf), 1)

    def weight(tensor: torch.Tensor) -> NDArray[np.float64]:
        return tensor.numpy().astype(np.float64)

    def rms(states: NDArray[np.float64], scale: torch.Tensor) -> NDArray[np.float64]:
        return np.asarray(states / np.sqrt((states**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weight(scale))

    def rotated(states: NDArray[np.float64]) -> NDArray[np.float64]:
        half = config.head_dim // 2
        turned = (states[:, :half] + 1j * states[:, half:]) * turn
        return np.concatenate((turned.real, turned.imag), axis=1)

    hidden = weight(model.embedding)[np.asarray(ids)]
    taken = [hidden] if 0 in spec.layers else []
    for number, layer in enumerate(model.layers, start=1):
        normed = rms(hidden, layer.input_norm)
        query, key, value = (normed @ weight(matrix).T for matrix in (layer.query, layer.key, layer.value))
        mixed = []
        for head in range(config.num_attention_heads):
            mine = slice(head * config.head_dim, (head + 1) * config.head_dim)
            shared = slice(head // group * config.head_dim, (head // group + 1) * config.head_dim)
            scores = rotated(query[:, mine]) @ rotated(key[:, shared]).T / np.sqrt(config.head_dim) + future
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(scores / scores.sum(-1, keepdims=True) @ value[:, shared])
        hidden = hidden + np.concatenate(mixed, axis=1) @ weight(layer.output).T
        normed = rms(hidden, layer.post_norm)
        gate = normed @ weight(layer.gate).T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (normed @ weight(layer.up).T)) @ weight(layer.down).T
        if number in spec.layers:
            taken.append(hidden)
    taken.append(rms(hidden, model.norm) if spec.final == "post_norm" else hidden)
    return np.stack(taken, axis=1).astype(np.float32)


def _mask(spans: Sequence[tuple[Cache, int, int]]) -> torch.Tensor:
    """bool [tokens of the batch, keys of the batch]: each token sees its own prompt up to itself, and no other prompt."""
    tokens, keys = sum(stop - start for _, start, stop in spans), sum(stop for _, _, stop in spans)
    mask = torch.zeros(tokens, keys, dtype=torch.bool)
    row = column = 0
    for _, start, stop in spans:
        count = stop - start
        mask[row : row + count, column : column + stop] = torch.ones(count, stop, dtype=torch.bool).tril(start)
        row, column = row + count, column + stop
    return mask


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, wide = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "input_norm": (width,),
        "query": (queries, width),
        "key": (keys, width),
        "value": (keys, width),
        "output": (width, queries),
        "post_norm": (width,),
        "gate": (wide, width),
        "up": (wide, width),
        "down": (width, wide),
    }


def _random(config: ModelConfig) -> tuple[torch.Tensor, list[Layer], torch.Tensor]:
    source = torch.Generator().manual_seed(config.seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        values = torch.randn(shape, generator=source)
        # Matrices keep the scale of what they are given, so that every layer changes the stream; norms lie around 1.
        return 1 + 0.1 * values if len(shape) == 1 else values / shape[1] ** 0.5

    embedding = torch.randn(config.vocab_size, config.hidden_size, generator=source)
    shapes = _shapes(config)
    layers = [Layer(**{name: draw(shape) for name, shape in shapes.items()}) for _ in range(config.num_hidden_layers)]
    return embedding, layers, draw((config.hidden_size,))


def _loaded(config: ModelConfig, files: list[Path]) -> tuple[torch.Tensor, list[Layer], torch.Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise RunError(
            "dependency_missing", f"{files[0]}: reading weights needs the package safetensors (extra 'hf')"
        ) from error
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        weights |= {name: tensor.float() for name, tensor in load_file(file).items()}

    def take(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = weights.pop(f"model.{name}.weight", None)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "missing" if tensor is None else f"of shape {tuple(tensor.shape)}"
            raise RunError("model_unreadable", f"{files[0].parent}: weight model.{name} is {found}; expected {shape}")
        return tensor

    embedding = take("embed_tokens", (config.vocab_size, config.hidden_size))
    shapes = _shapes(config)
    layers = [
        Layer(**{name: take(f"layers.{number}.{_NAMES[name]}", shape) for name, shape in shapes.items()})
        for number in range(config.num_hidden_layers)
    ]
    return embedding, layers, take("norm", (config.hidden_size,))
