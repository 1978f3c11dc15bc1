"""Choosing the layers and finding the norms, on small torch modules that have the attributes SGLang's models have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hsx.capture.model import CaptureRefusedError, choose_layers, divides_final, find_norm, head_multiplier, norm_input
from hsx.core.spec import CaptureSpec

SPEC = CaptureSpec((2, 5), "post_norm")
N = 8


class RMSNorm(torch.nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.bfloat16))
        self.variance_epsilon = eps


class Gemma3RMSNorm(RMSNorm):
    """Stores its weight less one."""


class DecoderLayer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()


class Body(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.layers = torch.nn.ModuleList(layer() for _ in range(N))
        self.norm: torch.nn.Module = RMSNorm()


class BeamModel(Body):
    """Holds the numbers of the layers whose output it hands out."""


class CausalLM(torch.nn.Module):
    """As most of SGLang's models: layer numbers in, one added, a layer's input handed out."""

    added = 1
    body: type[Body] = Body

    def __init__(self, layer: type[torch.nn.Module] = DecoderLayer) -> None:
        super().__init__()
        self.model = self.body(layer)
        self.capture_aux_hidden_states = False

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.capture_aux_hidden_states = True
        self.model.layers_to_capture = [layer + self.added for layer in layers]


class AddsNone(CausalLM):
    """As Muse Glimmer: takes k for h_k."""

    added = 0


class AddsTwo(CausalLM):
    """As nobody, so far."""

    added = 2


class Outputs(CausalLM):
    """As Beam."""

    added = 0
    body = BeamModel


class EagleOnly(torch.nn.Module):
    """As DeepSeek's other setter: adds one if the first number is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Body()

    def set_eagle3_layers_to_capture(self, layers: list[int]) -> None:
        self.model.layers_to_capture = [k + 1 for k in layers] if layers[0] == 1 else list(layers)


class Deaf(CausalLM):
    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        """Takes them and forgets them."""


class Gemma3nForCausalLM(CausalLM):
    """Has four residual streams; this name, and a setter that the real one has not."""


class DeepseekV4ForCausalLM(Deaf):
    """Has no setter, and input norms that are given a mixture of its residual streams."""


class Flags(CausalLM):
    """As Qwen3-MoE: the layers themselves are told."""

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        super().set_dflash_layers_to_capture(layers)
        for k in self.model.layers_to_capture:
            self.model.layers[k]._is_layer_to_capture = True  # type: ignore[assignment]  # a flag on a module, as SGLang does it


class FlagsWithoutAddition(Flags):
    added = 0


class Wrapper(torch.nn.Module):
    """As a vision model around a language model; its tower has as many layers."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = CausalLM()
        self.visual = Body()

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.language_model.set_dflash_layers_to_capture(layers)


@pytest.mark.parametrize(
    ("model", "spec", "held"),
    [
        (CausalLM(), SPEC, [2, 5]),
        (Wrapper(), SPEC, [2, 5]),
        (AddsNone(), SPEC, [2, 5]),
        (Outputs(), SPEC, [1, 4]),
        (EagleOnly(), SPEC, [2, 5]),
        (EagleOnly(), CaptureSpec((3, 5), "post_norm"), [3, 5]),
        (Flags(), SPEC, [2, 5]),
        (FlagsWithoutAddition(), SPEC, [2, 5]),
        (CausalLM(), CaptureSpec((0, 2, 5), "post_norm"), [2, 5]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_are_set_and_read_back_whatever_the_model_adds(
    model: torch.nn.Module, spec: CaptureSpec, held: list[int]
) -> None:
    found = choose_layers(model, spec, N)
    assert (found.method, found.handed_out) == ("model", tuple(k for k in spec.layers if k))
    assert found.taken == ((0,) if 0 in spec.layers else ())
    assert isinstance(found.body, Body)
    assert found.body.layers_to_capture == held
    flagged = [k for k, layer in enumerate(found.body.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert flagged == (held if isinstance(model, Flags) else [])
    assert set(found.norms) == set(spec.layers)


def test_the_norms_of_several_streams_prove_nothing() -> None:
    found = choose_layers(Gemma3nForCausalLM(), SPEC, N)
    assert (found.method, found.handed_out, found.norms) == ("model", (2, 5), {})


@pytest.mark.parametrize("model", [Deaf(), AddsTwo(), Body()], ids=lambda value: type(value).__name__)
def test_a_model_that_hands_nothing_out_is_captured_at_its_norms(model: torch.nn.Module) -> None:
    found = choose_layers(model, SPEC, N)
    assert (found.method, found.handed_out, found.taken) == ("norms", (), (2, 5))
    assert isinstance(found.body, Body)
    assert found.norms[5] is found.body.layers[5].input_layernorm
    # What the attempts left behind would hand out more than is expected.
    assert found.body.layers_to_capture == []
    assert not getattr(model, "capture_aux_hidden_states", False)


@pytest.mark.parametrize(
    ("model", "spec", "message"),
    [
        (
            AddsTwo(torch.nn.Identity),
            SPEC,
            r"AddsTwo captures h_k for k in \[3, 6\]; expected \[2, 5\], and no input norms of 8",
        ),
        (Deaf(torch.nn.Identity), SPEC, "Deaf has no layers_to_capture to read back, and no input norms"),
        (
            torch.nn.Linear(1, 1),
            SPEC,
            "Linear has no set_dflash_layers_to_capture or set_eagle3_layers_to_capture, and no input",
        ),
        (CausalLM(torch.nn.Identity), CaptureSpec((0, 2), "post_norm"), "hands out layers above h_0 only, and no input norms"),
        (CausalLM(), CaptureSpec((2, 8), "post_norm"), "capture.layers has 8; expected 0 to 7"),
        (DeepseekV4ForCausalLM(), SPEC, "to read back, and it has several residual streams, which its input norms mix"),
        (Gemma3nForCausalLM(), CaptureSpec((0, 2), "post_norm"), "above h_0 only, and it has several residual streams"),
    ],
)
def test_refusals(model: torch.nn.Module, spec: CaptureSpec, message: str) -> None:
    with pytest.raises(CaptureRefusedError, match=message):
        choose_layers(model, spec, N)


def test_plain_norm_is_described() -> None:
    norm = find_norm(Body())
    assert norm is not None
    assert norm.eps == 1e-5
    assert norm.weight is not None
    assert norm.weight.dtype == np.float32
    assert norm.weight.tolist() == [0.5, 2.0]


def test_the_weight_of_a_gemma_norm_is_what_it_multiplies_by() -> None:
    body = Body()
    body.norm = Gemma3RMSNorm()
    norm = find_norm(body)
    assert norm is not None
    assert norm.weight is not None
    assert norm.weight.tolist() == [1.5, 3.0]


def test_other_norms_have_no_weight_to_convert_with() -> None:
    body = Body()
    body.norm = torch.nn.LayerNorm(2)
    norm = find_norm(body)
    assert norm is not None
    assert (norm.module, norm.weight, norm.eps) == (body.norm, None, 0.0)
    assert find_norm(torch.nn.Linear(1, 1)) is None


def test_norm_input_is_the_updated_residual_or_the_input() -> None:
    x, residual, out = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    assert norm_input((x, residual), (out, residual)) is residual
    assert norm_input((x,), out) is x
    assert norm_input((x, None), out) is x


@pytest.mark.parametrize("call", [((torch.ones(1), torch.ones(1)), torch.ones(1)), ((torch.ones(1),), (1, 2, 3)), ((1,), 1)])
def test_other_calls_of_the_norm_are_refused(call: tuple[tuple[object, ...], object]) -> None:
    with pytest.raises(ValueError, match="its input is unknown"):
        norm_input(*call)


class LogitsProcessor(torch.nn.Module):
    def __init__(self, logit_scale: float | None) -> None:
        super().__init__()
        self.logit_scale = logit_scale


def test_what_logits_are_multiplied_by() -> None:
    model = CausalLM()
    assert (head_multiplier(model), divides_final(model)) == (1.0, 1.0)
    model.logits_processor = LogitsProcessor(None)
    assert head_multiplier(model) == 1.0
    model.logits_processor = LogitsProcessor(0.25)
    assert head_multiplier(model) == 0.25
    model.scale_width = 2.0  # type: ignore[assignment]  # a plain attribute of MiniCPM's models
    assert (head_multiplier(model), divides_final(model)) == (0.125, 2.0)
    model.model.logits_processor = LogitsProcessor(3.0)
    with pytest.raises(CaptureRefusedError, match="multiplies its logits by"):
        head_multiplier(model)
