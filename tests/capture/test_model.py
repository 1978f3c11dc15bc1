"""Setting the layers and finding h_N, on small torch modules that have the attributes SGLang's models have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hsx.capture.model import CaptureRefusedError, find_norm, norm_input, set_layers
from hsx.core.spec import CaptureSpec

SPEC = CaptureSpec((2, 5), "post_norm")


class RMSNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([0.5, 2.0], dtype=torch.bfloat16))
        self.variance_epsilon = 1e-5


class Body(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers_to_capture: list[int] = []
        self.norm: torch.nn.Module = RMSNorm()


class CausalLM(torch.nn.Module):
    """As SGLang's models: layer numbers in, one added."""

    def __init__(self, added: int = 1) -> None:
        super().__init__()
        self.model = Body()
        self.added = added

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.model.layers_to_capture = [layer + self.added for layer in layers]


class Wrapper(torch.nn.Module):
    """As a vision model around a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = CausalLM()

    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        self.language_model.set_dflash_layers_to_capture(layers)


class Deaf(torch.nn.Module):
    def set_dflash_layers_to_capture(self, layers: list[int]) -> None:
        """Takes them and forgets them."""


@pytest.mark.parametrize("model", [CausalLM(), Wrapper()])
def test_layers_are_set_and_read_back(model: torch.nn.Module) -> None:
    body, layers = set_layers(model, SPEC, 8)
    assert layers == (2, 5)
    assert isinstance(body, Body)
    assert body.layers_to_capture == [2, 5]


@pytest.mark.parametrize(
    ("model", "spec", "message"),
    [
        (CausalLM(added=0), SPEC, r"Body captures h_k for k in \[1, 4\]; expected \[2, 5\]"),
        (Deaf(), SPEC, "Deaf has no layers_to_capture to read back"),
        (torch.nn.Linear(1, 1), SPEC, "Linear has no set_dflash_layers_to_capture"),
        (CausalLM(), CaptureSpec((2, 8), "post_norm"), "capture.layers has 8; expected 1 to 7"),
    ],
)
def test_refusals(model: torch.nn.Module, spec: CaptureSpec, message: str) -> None:
    with pytest.raises(CaptureRefusedError, match=message):
        set_layers(model, spec, 8)


def test_plain_norm_is_described() -> None:
    norm = find_norm(Body())
    assert norm is not None
    assert norm.eps == 1e-5
    assert norm.weight is not None
    assert norm.weight.dtype == np.float32
    assert norm.weight.tolist() == [0.5, 2.0]


def test_other_norms_have_no_weight_to_convert_with() -> None:
    body = Body()
    body.norm = torch.nn.LayerNorm(2)
    norm = find_norm(body)
    assert norm is not None
    assert (norm.module, norm.weight, norm.eps) == (body.norm, None, 0.0)
    assert find_norm(torch.nn.Linear(1, 1)) is None


def test_norm_input_is_the_updated_residual_or_the_input() -> None:
    x, residual, out = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    found = norm_input((x, residual), (out, residual))
    assert torch.equal(found, residual)
    residual += 1
    assert found.tolist() == [2.0, 2.0]
    assert torch.equal(norm_input((x,), out), x)
    assert torch.equal(norm_input((x, None), out), x)


@pytest.mark.parametrize("call", [((torch.ones(1), torch.ones(1)), torch.ones(1)), ((torch.ones(1),), (1, 2, 3)), ((1,), 1)])
def test_other_calls_of_the_norm_are_refused(call: tuple[tuple[object, ...], object]) -> None:
    with pytest.raises(ValueError, match="its input is unknown"):
        norm_input(*call)
