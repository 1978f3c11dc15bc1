"""The model's side of capture: choosing how the layers are taken, setting them, reading them back, finding the norms.

Works on the attributes that SGLang's models share, without importing SGLang. One rule names a layer, whatever the model calls
it: h_k is what the input norm of decoder layer k normalises (its residual included), and h_N what the final norm does.

Most models hand layers out themselves, through `set_dflash_layers_to_capture` or `set_eagle3_layers_to_capture`. Both take
numbers whose meaning differs between models: nearly all add one to a layer's number and then take a layer's *input*; some add
one only when the first number is 1 (DeepSeek's eagle3), some add none (Muse Glimmer), some take the *output* of the number
that they hold (Beam). So no setter is believed: each is tried with k - 1 and with k, and what the model then holds is read back
and compared, in the meaning that its own forward gives it. What was read back is checked once more by `hsx.capture.taps`, on
the states themselves. A model without a setter, and h_0, are taken at the input norms: method `norms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from hsx.core.spec import CaptureSpec

SETTERS: Final = ("set_dflash_layers_to_capture", "set_eagle3_layers_to_capture")
"""In the order in which they are tried. Both raise or do nothing off the last pipeline stage, which is refused anyway."""
_HELD_AS: Final = ("layers_to_capture", "dspark_layers_to_capture", "_dflash_layers_to_capture")
"""Attributes in which a part of the model holds what it will hand out."""
_OUTPUTS: Final = frozenset({"dspark_layers_to_capture", "_dflash_layers_to_capture", "BeamModel", "MuseSpark1xModel"})
"""Attributes, or classes of the part that holds `layers_to_capture`, that mean a layer's output: k - 1 stands for h_k."""
_FLAG: Final = "_is_layer_to_capture"
"""Some models look at this attribute of each layer, and hold the list only beside it."""
_LAYERS: Final = ("layers", "h", "blocks")
_INPUT_NORMS: Final = ("input_layernorm", "operator_norm", "attention_norm", "input_norm", "ln_1", "norm")
_FINAL_NORMS: Final = ("norm", "final_layernorm", "ln_f", "norm_f", "embedding_norm")
_PLAIN_NORMS: Final = {"RMSNorm": 0.0, "GemmaRMSNorm": 1.0, "Gemma3RMSNorm": 1.0}
"""Classes that compute (weight + this) * x / rms(x)."""

_SEVERAL_STREAMS: Final = ("DeepseekV4", "Gemma3n", "Glm5Next", "HYV4", "KimiK3", "Qwen4Exp")
"""How class names of models with more than one residual stream, or a bank of them, begin: an input norm is given a mixture
of these, which is no h_k."""

Method = Literal["model", "norms"]


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


@dataclass(frozen=True, slots=True)
class Layers:
    """How the layers of a spec are taken from one model.

    Attributes:
        body: the part of the model that holds the decoder layers and the final norm.
        method: who hands out the layers above h_0.
        handed_out: the k of each h_k that the model hands out, as read back from it; () with the method `norms`.
        norms: input norms by k: those of the layers handed out, where they are found, and of all that are taken there.
    """

    body: torch.nn.Module
    method: Method
    handed_out: tuple[int, ...]
    norms: dict[int, torch.nn.Module]

    @property
    def taken(self) -> tuple[int, ...]:
        """The k of each h_k that is taken at its norm."""
        return tuple(k for k in self.norms if k not in self.handed_out)


def choose_layers(model: torch.nn.Module, spec: CaptureSpec, model_layers: int) -> Layers:
    """Makes the model hand out the layers of `spec`, and finds the norms of those that it does not.

    Raises:
        CaptureRefusedError: neither the model nor its norms can give them, or the model does not do what it was told.
    """
    problems = spec.problems(model_layers)
    if problems:
        raise CaptureRefusedError("; ".join(problems))
    wanted = tuple(k for k in spec.layers if k > 0)
    setters = [setter for name in SETTERS if (setter := getattr(model, name, None)) is not None]
    stack = _layer_stack(model, model_layers)
    mixed = any(type(part).__name__.startswith(_SEVERAL_STREAMS) for part in (model, *model.children()))
    norms = {} if stack is None or mixed else {k: norm for k in spec.layers if (norm := _input_norm(stack[1][k])) is not None}
    handed_out, refused = _hand_out(model, setters, wanted) if wanted and setters else ((), "")
    lacking = [k for k in spec.layers if k not in handed_out and k not in norms]
    if lacking:
        name = type(model).__name__
        if wanted and not setters:
            refused = f"{name} has no {' or '.join(SETTERS)}"
        reason = refused or f"{name} hands out layers above h_0 only"
        if mixed:
            raise CaptureRefusedError(f"{reason}, and it has several residual streams, which its input norms mix")
        raise CaptureRefusedError(f"{reason}, and no input norms of {model_layers} decoder layers are found in it")
    body = stack[0] if stack is not None else _holders(model)[-1][0]
    return Layers(body, "model" if handed_out else "norms", handed_out, norms)


def find_norm(body: torch.nn.Module) -> FinalNorm | None:
    """The final norm of the part that holds the layers; None where it has none under the usual names."""
    norm = next((found for name in _FINAL_NORMS if isinstance(found := getattr(body, name, None), torch.nn.Module)), None)
    if norm is None:
        return None
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    added = _PLAIN_NORMS.get(type(norm).__name__)
    if added is None or not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return FinalNorm(norm, 0.0, None)
    return FinalNorm(norm, eps, (weight.detach().float() + added).cpu().numpy())


def norm_input(inputs: tuple[object, ...], output: object) -> torch.Tensor:
    """What a norm normalised, out of its call: the updated residual where it adds and norms in one, else its input.

    Not copied; the residual's storage may be used again by the next layer.

    Raises:
        ValueError: the call was neither.
    """
    state = None
    if isinstance(output, tuple):
        state = output[1] if len(output) == 2 else None
    elif len(inputs) == 1 or inputs[1] is None:
        state = inputs[0]
    if not isinstance(state, torch.Tensor):
        raise ValueError(f"a norm was called with {len(inputs)} arguments and gave no residual; its input is unknown")
    return state


def divides_final(model: torch.nn.Module) -> float:
    """By what the model divides the final norm's output before the head; 1.0 for nearly all.

    MiniCPM does so outside of the logits processor, which then gets something else than the norm's output.
    """
    found = getattr(model, "scale_width", 1.0)
    return float(found) if isinstance(found, int | float) and found else 1.0


def head_multiplier(model: torch.nn.Module) -> float:
    """What logits are multiplied by after the head (Cohere, Granite, Falcon-H1, MiniCPM and others); 1.0 where by nothing.

    Raises CaptureRefusedError where parts of the model disagree.
    """
    scales = (getattr(part, "logit_scale", None) for part in model.modules() if type(part).__name__.endswith("LogitsProcessor"))
    found = sorted({float(scale) for scale in scales if scale is not None}) or [1.0]
    if len(found) > 1 or not math.isfinite(found[0]):
        raise CaptureRefusedError(f"{type(model).__name__} multiplies its logits by {found}; expected one finite number")
    return found[0] / divides_final(model)


def _hand_out(
    model: torch.nn.Module, setters: list[Callable[[list[int]], None]], wanted: tuple[int, ...]
) -> tuple[tuple[int, ...], str]:
    """The layers read back, once they are those wanted; else () and what the first attempt came to."""
    refused = ""
    for setter in setters:
        for numbers in ([k - 1 for k in wanted], list(wanted)):
            _forget(model)
            try:
                setter(numbers)
                found = _read_back(model)
            except Exception as error:  # noqa: BLE001 - each model raises its own kind; the next way is tried
                refused = refused or f"{type(model).__name__}.{setter.__name__}: {type(error).__name__}: {error}"
                continue
            if found == wanted:
                return found, ""
            refused = refused or f"{type(model).__name__} captures h_k for k in {list(found)}; expected {list(wanted)}"
    _forget(model)
    return (), refused


def _read_back(model: torch.nn.Module) -> tuple[int, ...]:
    holders = _holders(model)
    if not holders:
        raise CaptureRefusedError(f"{type(model).__name__} has no {_HELD_AS[0]} to read back")
    answers = {found for _, found in holders}
    for part, found in holders:
        layers = next((each for name in _LAYERS if isinstance(each := getattr(part, name, None), torch.nn.ModuleList)), None)
        flagged = tuple(k for k, layer in enumerate(layers or ()) if getattr(layer, _FLAG, False))
        if flagged and flagged != tuple(k for k in found if k < len(layers or ())):
            answers.add(flagged)
    if len(answers) > 1:
        raise CaptureRefusedError(f"its parts hold {sorted(list(found) for found in answers)}")
    return answers.pop()


def _holders(model: torch.nn.Module) -> list[tuple[torch.nn.Module, tuple[int, ...]]]:
    """Parts that hold layers to hand out, and the k of each h_k that these mean."""
    found = []
    for part in model.modules():
        for name in _HELD_AS:
            held = getattr(part, name, None)
            if isinstance(held, list | tuple | set | frozenset) and held:
                outputs = name in _OUTPUTS or type(part).__name__ in _OUTPUTS
                found.append((part, tuple(sorted(int(k) + outputs for k in held))))
    return found


def _forget(model: torch.nn.Module) -> None:
    """Undoes an attempt: a list left behind, or a flag, would hand out more than was asked for."""
    for part in model.modules():
        for name in _HELD_AS:
            held = part.__dict__.get(name)
            if isinstance(held, list | tuple | set | frozenset) and held:
                setattr(part, name, type(held)())
        if part.__dict__.get(_FLAG):
            setattr(part, _FLAG, False)
        if part.__dict__.get("capture_aux_hidden_states"):
            setattr(part, "capture_aux_hidden_states", False)  # noqa: B010 - a module's type says nothing of its attributes


def _layer_stack(model: torch.nn.Module, count: int) -> tuple[torch.nn.Module, torch.nn.ModuleList] | None:
    """The part with `count` decoder layers, and these. Towers for pictures and sound are passed over."""

    def candidates() -> Iterator[tuple[torch.nn.Module, torch.nn.ModuleList]]:
        for path, part in model.named_modules():
            for name in _LAYERS:
                layers = getattr(part, name, None)
                if isinstance(layers, torch.nn.ModuleList) and len(layers) == count:
                    tower = any(word in path.lower() for word in ("vision", "visual", "audio", "encoder"))
                    if not tower:
                        yield part, layers

    found = list(candidates())
    return found[0] if found and len({id(layers) for _, layers in found}) == 1 else None


def _input_norm(layer: torch.nn.Module) -> torch.nn.Module | None:
    return next((norm for name in _INPUT_NORMS if isinstance(norm := getattr(layer, name, None), torch.nn.Module)), None)
