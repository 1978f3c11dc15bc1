"""The model's side of capture: setting the layers, reading them back, finding the final norm.

Works on the attributes that SGLang's models share, without importing SGLang. `h_k` is the output of layer k - 1, and
`set_dflash_layers_to_capture` takes layer numbers and adds one for every model; `set_eagle3_layers_to_capture` adds one in
some models only when the first number is 1, so it is not used. `layers_to_capture` then holds the layers whose *input* is
taken, which is k itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.spec import CaptureSpec


class CaptureRefusedError(Exception):
    """This model, or this way of serving it, cannot be captured; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The norm between h_N and the logits.

    Attributes:
        module: the norm itself.
        eps: its epsilon; 0.0 where it is no plain RMS norm.
        weight: float32 [H]; None where it is no plain RMS norm, whose output would not be weight * normalised input.
    """

    module: torch.nn.Module
    eps: float
    weight: NDArray[np.float32] | None


def set_layers(model: torch.nn.Module, spec: CaptureSpec, model_layers: int) -> tuple[torch.nn.Module, tuple[int, ...]]:
    """Makes the model hand out the layers of `spec`.

    Returns:
        The part of the model that holds the layers, and the k of each h_k, read back from it.

    Raises:
        CaptureRefusedError: the model cannot do it, or does not do what it was told.
    """
    problems = spec.problems(model_layers)
    if problems:
        raise CaptureRefusedError("; ".join(problems))
    setter: Callable[[list[int]], None] | None = getattr(model, "set_dflash_layers_to_capture", None)
    if setter is None:
        raise CaptureRefusedError(f"{type(model).__name__} has no set_dflash_layers_to_capture; its layers cannot be captured")
    setter([k - 1 for k in spec.layers])
    holders = [(part, found) for part in model.modules() if (found := _layers_of(part))]
    if not holders:
        raise CaptureRefusedError(f"{type(model).__name__} has no layers_to_capture to read back")
    for part, found in holders:
        if found != spec.layers:
            raise CaptureRefusedError(
                f"{type(part).__name__} captures h_k for k in {list(found)}; expected {list(spec.layers)}"
            )
    return holders[-1]


def find_norm(body: torch.nn.Module) -> FinalNorm | None:
    """The final norm of the part that `set_layers` returned; None where it has none under the usual name."""
    norm = getattr(body, "norm", None)
    if not isinstance(norm, torch.nn.Module):
        return None
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if type(norm).__name__ != "RMSNorm" or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return FinalNorm(norm, 0.0, None)
    return FinalNorm(norm, eps, weight.detach().float().cpu().numpy())


def norm_input(inputs: tuple[object, ...], output: object) -> torch.Tensor:
    """h_N as the final norm saw it, out of its call: the updated residual where it adds and norms in one, else its input.

    Copied, because the residual's storage may be used again before the logits.

    Raises:
        ValueError: the call was neither.
    """
    state = None
    if isinstance(output, tuple):
        state = output[1] if len(output) == 2 else None
    elif len(inputs) == 1 or inputs[1] is None:
        state = inputs[0]
    if not isinstance(state, torch.Tensor):
        raise ValueError(f"the final norm was called with {len(inputs)} arguments and gave no residual; its input is unknown")
    return state.clone()


def _layers_of(part: torch.nn.Module) -> tuple[int, ...]:
    layers = getattr(part, "layers_to_capture", None)
    return tuple(sorted(int(k) for k in layers)) if isinstance(layers, list | tuple | set | frozenset) else ()
