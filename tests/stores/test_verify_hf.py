"""Recomputing with transformers accepts what is right and finds what is shifted, swapped or another sample's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import transformers

from hsx.core.spec import CaptureSpec, FinalState
from hsx.errors import RunError
from hsx.testing.stores import BuiltStore, build_store
from hsx.testing.tiny_models import LAYERS, make
from hsx.verify.against_hf import TOLERANCE, HfModel, HfReport, against_hf, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.slow
LAYER_IDS = (2, 4, 7)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return make("llama", tmp_path_factory.mktemp("llama"))


def states_of(model_path: Path, ids: torch.Tensor, layers: Sequence[int], final: FinalState) -> torch.Tensor:
    """What should be stored, the way transformers itself gives it: bfloat16 [tokens, L, H]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    before_norm: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _module, args: before_norm.append(args[0]))
    with torch.no_grad():
        hidden = model(input_ids=ids[None], output_hidden_states=True).hidden_states
    chosen = [hidden[k][0] for k in layers] + [hidden[-1][0] if final == "post_norm" else before_norm[0][0]]
    return torch.stack(chosen, dim=1).bfloat16()


def stored(folder: Path, model_path: Path, layers: Sequence[int], final: FinalState, claimed: CaptureSpec) -> BuiltStore:
    """A store that claims one spec and holds the states of perhaps another."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 1000, (tokens,), generator=generator) for tokens in (1, 70, 33)]
    states = [states_of(model_path, sample, layers, final).view(torch.uint16).numpy() for sample in ids]
    return build_store(folder, states, spec=claimed, input_ids=[sample.numpy().astype(np.int32) for sample in ids])


def wrong(report: HfReport) -> set[str]:
    return {state.name for sample in report.samples for state in sample.states if not state.ok}


@pytest.mark.parametrize("final", ["post_norm", "pre_norm"])
def test_right_states_are_within_rounding(tmp_path: Path, model_path: Path, final: FinalState) -> None:
    built = stored(tmp_path, model_path, LAYER_IDS, final, CaptureSpec(LAYER_IDS, final))
    seen: list[tuple[int, int]] = []
    report = against_hf(built.info.path, model_path, samples=9, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.worst <= 2.0**-8 < TOLERANCE
    assert [sample.tokens for sample in report.samples] == [1, 70, 33]
    assert min(state.neighbour_median for sample in report.samples for state in sample.states) > 10 * 2.0**-8
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True


@pytest.mark.parametrize(
    ("layers", "final", "claimed", "expected"),
    [
        ((1, 3, 6), "post_norm", CaptureSpec(LAYER_IDS, "post_norm"), {"h_2", "h_4", "h_7"}),
        ((3, 5, 7), "post_norm", CaptureSpec(LAYER_IDS, "post_norm"), {"h_2", "h_4"}),
        ((4, 2, 7), "post_norm", CaptureSpec(LAYER_IDS, "post_norm"), {"h_2", "h_4"}),
        (LAYER_IDS, "pre_norm", CaptureSpec(LAYER_IDS, "post_norm"), {"post_norm"}),
        (LAYER_IDS, "post_norm", CaptureSpec(LAYER_IDS, "pre_norm"), {"pre_norm"}),
    ],
)
def test_wrong_layers_are_found(
    tmp_path: Path, model_path: Path, layers: Sequence[int], final: FinalState, claimed: CaptureSpec, expected: set[str]
) -> None:
    built = stored(tmp_path, model_path, layers, final, claimed)
    report = against_hf(built.info.path, model_path)
    assert wrong(report) == expected
    assert not report.ok
    # However loose the tolerance, a neighbour that fits better is found.
    if layers == (3, 5, 7):
        assert wrong(against_hf(built.info.path, model_path, tolerance=100.0)) == expected


def test_states_of_shifted_tokens_are_found(tmp_path: Path, model_path: Path) -> None:
    built = stored(tmp_path, model_path, LAYER_IDS, "post_norm", CaptureSpec(LAYER_IDS, "post_norm"))
    shifted = np.roll(built.states[1], 1, axis=0)
    (tmp_path / "again").mkdir()
    again = build_store(
        tmp_path / "again",
        [built.states[0], shifted, built.states[2]],
        spec=built.info.spec,
        input_ids=built.input_ids,
    )
    report = against_hf(again.info.path, model_path)
    assert [sample.index for sample in report.samples if not all(state.ok for state in sample.states)] == [1]


def test_seed_chooses_the_samples() -> None:
    committed = list(range(0, 200, 2))
    assert choose(committed, 5, 1) == choose(committed, 5, 1) != choose(committed, 5, 2)
    assert choose(committed, 500, 1) == committed
    assert choose([], 5, 1) == []
    twins = choose(committed, 500, 1, lambda index: index // 4)
    assert len(twins) == len({index // 4 for index in twins}) == 50


def test_store_without_samples_proves_nothing(tmp_path: Path, model_path: Path) -> None:
    built = stored(tmp_path, model_path, LAYER_IDS, "post_norm", CaptureSpec(LAYER_IDS, "post_norm"))
    for index in range(3):
        built.view.path(index).unlink()
    report = against_hf(built.info.path, model_path)
    assert not report.ok
    assert report.samples == []


def narrow_model(folder: Path) -> None:
    """Makes a model of half the width."""
    config = transformers.AutoConfig.from_pretrained(make("llama", folder))
    config.hidden_size = 128
    config.head_dim = 16
    transformers.AutoModel.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("make_folder", "words"),
    [
        (Path.mkdir, "has no config.json"),
        (narrow_model, "has width 128"),
    ],
)
def test_unfit_model_is_refused(tmp_path: Path, model_path: Path, make_folder: Callable[[Path], object], words: str) -> None:
    built = stored(tmp_path, model_path, LAYER_IDS, "post_norm", CaptureSpec(LAYER_IDS, "post_norm"))
    make_folder(tmp_path / "model")
    with pytest.raises(RunError, match=words) as error:
        against_hf(built.info.path, tmp_path / "model")
    assert error.value.kind == "model_unreadable"


def test_hooks_give_what_transformers_calls_hidden_states(model_path: Path) -> None:
    model = HfModel(model_path)
    ids = torch.arange(5, 25)
    found = model.states(ids, set(range(LAYERS + 1)) | {-1})
    reference = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = reference(input_ids=ids[None], output_hidden_states=True).hidden_states
    assert len(hidden) == LAYERS + 1
    for k in range(LAYERS):
        torch.testing.assert_close(found[k], hidden[k][0])
    torch.testing.assert_close(found[-1], hidden[-1][0])
    torch.testing.assert_close(model.normed(found[LAYERS]), found[-1])


@pytest.mark.parametrize(("kept", "dtype"), [("loss", "bf16"), ("loss", "fp8_e4m3")])
def test_a_store_that_keeps_less_is_held_against_what_it_keeps(tmp_path: Path, model_path: Path, kept: str, dtype: str) -> None:
    """Right states pass, and those of neighbouring layers do not, with the tolerance that fp8 needs."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(5, 1000, (tokens,), generator=generator) for tokens in (4, 70, 33)]
    given = [sample.numpy().astype(np.int32) for sample in ids]
    (tmp_path / "right").mkdir()
    (tmp_path / "wrong").mkdir()
    spec = CaptureSpec(LAYER_IDS, "post_norm")

    def built(name: str, layers: Sequence[int]) -> BuiltStore:
        states = [states_of(model_path, sample, layers, "post_norm").view(torch.uint16).numpy() for sample in ids]
        return build_store(tmp_path / name, states, spec=spec, input_ids=given, kept=kept, dtype=dtype)

    right = against_hf(built("right", LAYER_IDS).info.path, model_path)
    assert right.ok
    assert all(state.worst_token % 2 for sample in right.samples for state in sample.states)
    if dtype != "bf16":
        assert 2.0**-8 < right.worst <= 2.0**-4
    assert wrong(against_hf(built("wrong", (1, 3, 6)).info.path, model_path)) == {"h_2", "h_4", "h_7"}
