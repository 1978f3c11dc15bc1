"""The reference model is right: chunks, batches and the whole prompt agree, with each other and with transformers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hsx.core.spec import CaptureSpec
from hsx.errors import RunError
from hsx.testing.reference_model import Cache, ReferenceModel, read_config, reference_states
from hsx.testing.servers import tiny_config

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SPEC = CaptureSpec((1, 2, 3), "post_norm")


def relative(found: NDArray[np.float32], truth: NDArray[np.float32]) -> float:
    """The largest relative error of any token and state."""
    return float((np.linalg.norm(found - truth, axis=-1) / np.linalg.norm(truth, axis=-1)).max())


def prompt(tokens: int, vocab: int = 500, seed: int = 0) -> NDArray[np.int32]:
    """Random ids, int32 [tokens]."""
    return np.random.default_rng(seed).integers(0, vocab, tokens).astype(np.int32)


@pytest.mark.parametrize("heads", [{}, {"num_attention_heads": 4, "num_key_value_heads": 2}])
@pytest.mark.parametrize("final", ["post_norm", "pre_norm"])
def test_chunks_agree_with_the_whole(tmp_path: Path, heads: dict[str, int], final: str) -> None:
    """Uneven chunks over a cache, float32, against one pass in float64."""
    model, ids = ReferenceModel(tiny_config(tmp_path, **heads)), prompt(120)
    spec = CaptureSpec((1, 2, 3), "pre_norm" if final == "pre_norm" else "post_norm")
    cache = Cache(model.config, len(ids))
    parts = [model.forward([(ids[a:b], cache)], spec)[0] for a, b in ((0, 53), (53, 118), (118, 119), (119, 120))]
    assert relative(torch.cat(parts).numpy(), reference_states(model, ids, spec)) < 1e-5


def test_prompts_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    """Three prompts at different places of theirs in one batch, two of them prefixes of one another."""
    model = ReferenceModel(tiny_config(tmp_path))
    prompts = [prompt(60), prompt(30), prompt(45, seed=1)]
    caches = [Cache(model.config, len(ids)) for ids in prompts]
    first = model.forward([(prompts[0][:20], caches[0])], SPEC)
    second = model.forward([(prompts[0][20:40], caches[0]), (prompts[1], caches[1]), (prompts[2][:7], caches[2])], SPEC)
    third = model.forward([(prompts[2][7:], caches[2]), (prompts[0][40:], caches[0])], SPEC)
    found = [torch.cat((first[0], second[0], third[1])), second[1], torch.cat((second[2], third[0]))]
    for ids, states in zip(prompts, found, strict=True):
        assert relative(states.numpy(), reference_states(model, ids, SPEC)) < 1e-5


def test_states_differ_from_layer_to_layer(tmp_path: Path) -> None:
    """Random weights make neighbouring layers, and other seeds, so different that a mix-up is seen."""
    ids = prompt(20)
    states = reference_states(ReferenceModel(tiny_config(tmp_path / "a")), ids, SPEC)
    other = reference_states(ReferenceModel(tiny_config(tmp_path / "b", seed=1)), ids, SPEC)
    for first, second in ((states[:, 0], states[:, 1]), (states[:, 1], states[:, 2]), (states, other)):
        assert (np.linalg.norm(first - second, axis=-1) / np.linalg.norm(first, axis=-1)).min() > 0.1


@pytest.mark.slow
def test_weights_of_a_folder_agree_with_transformers(tmp_path: Path) -> None:
    """A Llama checkpoint is loaded and computed as transformers does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 500, "max_position_embeddings": 256}
    config = LlamaConfig(**shape, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2)
    torch.manual_seed(0)
    hf = LlamaForCausalLM(config).eval()
    hf.save_pretrained(tmp_path)
    ids = prompt(50)
    with torch.no_grad():
        states = hf(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
    truth = torch.stack([states[k][0] for k in (1, 2, 3, 4)], dim=1).numpy()
    assert relative(reference_states(ReferenceModel(tmp_path), ids, SPEC), truth) < 1e-5


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (None, "No such file"),
        ("{", "expected a model's config"),
        ("[]", "expected a model's config"),
        ({"hidden_size": 32}, "num_hidden_layers"),
        ({"model_type": "qwen3"}, "qwen3"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
    ],
)
def test_unusable_config(tmp_path: Path, document: object, says: str) -> None:
    """What cannot be computed is refused by name."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 500, "max_position_embeddings": 256}
    if isinstance(document, dict):
        document = document if "hidden_size" in document else {**sizes, **document}
    if document is not None:
        (tmp_path / "config.json").write_text(document if isinstance(document, str) else json.dumps(document))
    with pytest.raises(RunError, match=says) as caught:
        read_config(tmp_path)
    assert caught.value.kind == "model_unreadable"


def test_missing_weight(tmp_path: Path) -> None:
    """A checkpoint without all weights names the first one missing."""
    from safetensors.torch import save_file

    save_file({"model.norm.weight": torch.ones(32)}, tiny_config(tmp_path) / "model.safetensors")
    with pytest.raises(RunError, match=r"model\.embed_tokens is missing") as caught:
        ReferenceModel(tmp_path)
    assert caught.value.kind == "model_unreadable"
