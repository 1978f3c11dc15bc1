"""Exports held against what the trainers' own generators take from a model: by hooks on its modules, and not by hsx's code.

The layers are those that an export names in the trainer's own count; the final state has to give the model's logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hsx.core.spec import CaptureSpec
from hsx.export import load_format
from hsx.export.manifest import read_manifest
from hsx.export_run import export
from hsx.exporting import Request, plan
from hsx.integrations.specforge import Eagle3Dataset
from hsx.stores.group import record_final_norm
from hsx.stores.reader import Store
from hsx.testing import tiny_models
from hsx.testing.stores import build_store

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.spec import FinalState

pytest.importorskip("transformers", reason="needs the extra hf")
LENGTHS = (2, 17, 70)
STORED = (0, 2, 4, 5)


@dataclass
class Model:
    """A model, and what hooks on its modules saw of each prompt.

    Attributes:
        model: transformers' model, in float32.
        prompts: int64 [S] each.
        layers: output of each decoder layer by its number, -1 being the embeddings: float32 [S, H] each.
        before: what the final norm was given; `after` what it gave.
        logits: of the whole model, [S, vocabulary].
    """

    model: Any
    prompts: list[torch.Tensor]
    layers: list[dict[int, torch.Tensor]]
    before: list[torch.Tensor]
    after: list[torch.Tensor]
    logits: list[torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Runs all prompts once, with hooks."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = tiny_models.make("llama", tmp_path_factory.mktemp("model"))
    found: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = Model(found, [], [], [], [], [])
    seen: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Any:
        return lambda _, __, out: seen.__setitem__(
            number, (out if isinstance(out, torch.Tensor) else out[0]).squeeze(0).clone()
        )

    found.model.embed_tokens.register_forward_hook(keep(-1))
    for number, layer in enumerate(found.model.layers):
        layer.register_forward_hook(keep(number))
    found.model.norm.register_forward_pre_hook(lambda _, given: made.before.append(given[0].squeeze(0).clone()))
    found.model.norm.register_forward_hook(lambda _, __, out: made.after.append(out.squeeze(0).clone()))
    for tokens in LENGTHS:
        made.prompts.append(
            torch.randint(0, tiny_models.VOCAB_SIZE, (tokens,), generator=torch.Generator().manual_seed(tokens))
        )
        seen.clear()
        with torch.no_grad():
            made.logits.append(found(made.prompts[-1][None]).logits[0])
        made.layers.append(dict(seen))
    return made


@pytest.fixture(scope="module")
def stores(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store of each kind of final state, of HF's `hidden_states`: h_k is entry k."""
    made: dict[str, Path] = {}
    kinds: tuple[FinalState, ...] = ("pre_norm", "post_norm")
    for final in kinds:
        states = []
        for row, prompt in enumerate(model.prompts):
            with torch.no_grad():
                every = model.model.model(prompt[None], output_hidden_states=True).hidden_states
            last = model.before[row] if final == "pre_norm" else every[-1][0]
            stack = torch.stack([*(every[k][0] for k in STORED), last], dim=1).bfloat16()
            states.append(stack.view(torch.uint16).numpy())
        built = build_store(
            tmp_path_factory.mktemp(final),
            states,
            input_ids=[prompt.numpy().astype(np.int32) for prompt in model.prompts],
            spec=CaptureSpec(STORED, final),
            masks=[np.ones(tokens, np.uint8) for tokens in LENGTHS],
        )
        norm = model.model.model.norm
        record_final_norm(built.info.path, norm.weight.detach().numpy(), norm.variance_epsilon)
        made[final] = built.info.path
    return made


FILES = {
    "specforge": ("rows_0-2000/data_{}.ckpt", "aux_hidden_state", "hidden_state"),
    "specforge-dflash": ("rows_0-2000/data_{}.ckpt", "hidden_states", "target_last_hidden_states"),
    "speculators": ("hidden_states/hs_{}.safetensors", "hidden_states", "hidden_states"),
    "modelopt": ("sample_{:08d}.pt", "aux_hidden_states", "hidden_states"),
    "angelslim": ("rank_0/rows_0-2000/data_{}.ckpt", "hidden_states", "target_hiddens"),
    "eagle": ("samples/rows_0-2000/data_{}.ckpt", "", "hidden_state"),
    "safetensors": ("rows_0-2000/sample_{}.safetensors", "hidden_states", "hidden_states"),
}
"""Of each format: the files, and the keys of the layers and of the final state."""


def read(path: Path, layers_key: str, final_key: str, width: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """The layers, [S, H] each, the final state, [S, H], and the ids, [S], of a file of any format."""
    raw = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    ids = raw["token_ids" if "token_ids" in raw else "input_ids"].reshape(-1)
    if layers_key == final_key:  # [S, K + 1, H]
        states = raw[layers_key]
        return [states[:, at] for at in range(states.shape[1] - 1)], states[:, -1], ids
    layers = raw[layers_key].reshape(len(ids), -1).split(width, dim=-1) if layers_key else ()
    return list(layers), raw[final_key].reshape(len(ids), width), ids


def assert_last_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal as bf16, but for a last bit here and there."""
    off = (found.view(torch.int16).int() - wanted.bfloat16().view(torch.int16).int()).abs()
    assert int(off.max()) <= 1
    assert float((off > 0).float().mean()) < 0.02


@pytest.mark.parametrize(
    ("to", "stored"),
    [(to, stored) for to in FILES for stored in ("pre_norm", "post_norm") if (to, stored) != ("speculators", "post_norm")],
)
def test_a_file_has_what_the_model_gave(
    model: Model, stores: dict[str, Path], tmp_path: Path, to: str, stored: FinalState
) -> None:
    layers = None if to == "eagle" else (0, 2, 5)
    export(plan(Store(stores[stored]), load_format(to), tmp_path, Request(layers=layers)))
    said = read_manifest(tmp_path)["mapping"]
    name, layers_key, final_key = FILES[to]
    norm, head = model.model.model.norm, model.model.lm_head
    shift = 1 if to in ("speculators", "safetensors") else 0  # these count states: entry L is the output of layer L - 1
    for row in range(len(LENGTHS)):
        found, final, ids = read(tmp_path / name.format(row), layers_key, final_key, tiny_models.HIDDEN_SIZE)
        assert torch.equal(ids, model.prompts[row])
        assert len(found) == len(said["trainer_layers"])
        for layer, states in zip(said["trainer_layers"], found, strict=True):
            assert torch.equal(states, model.layers[row][layer - shift].bfloat16()), (row, layer)
        if said["final_computed"]:
            with torch.no_grad():
                assert_last_bits(final, norm(model.before[row].bfloat16().float()))
        else:
            assert torch.equal(final, (model.before if said["final"] == "pre_norm" else model.after)[row].bfloat16())
        with torch.no_grad():
            logits = head(norm(final.float()) if said["final"] == "pre_norm" else final.float())
        assert float((logits - model.logits[row]).norm() / model.logits[row].norm()) < 0.01


def test_specforges_batches_without_an_export_are_the_models(model: Model, stores: dict[str, Path]) -> None:
    for stored, path in stores.items():
        dataset = Eagle3Dataset(path, 64, layers=(2, 4, 5))
        for row in range(len(LENGTHS)):
            item, kept = dataset[row], min(LENGTHS[row], 64)
            aux = torch.cat([model.layers[row][layer][:kept] for layer in (1, 3, 4)], dim=-1).bfloat16()
            assert torch.equal(item["hidden_state"], aux[None])
            assert torch.equal(item["input_ids"][0], model.prompts[row][:kept])
            if stored == "post_norm":
                assert torch.equal(item["target"][0], model.after[row][:kept].bfloat16())
            else:
                with torch.no_grad():
                    assert_last_bits(
                        item["target"][0].contiguous(), model.model.model.norm(model.before[row][:kept].bfloat16().float())
                    )
