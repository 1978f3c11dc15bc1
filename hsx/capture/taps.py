"""Taps: what the model's norms normalise, seen from outside, forward by forward.

Two uses. What the model does not hand out itself is taken here (h_0, h_N, and everything of a model without a setter). And
what it does hand out is compared, once, with what is seen here: the first forward in which the norms run as modules proves
that the layers are those that were asked for, whatever numbers the model calls them by, and that the head gets the final norm's
output. A model that fails is refused.

The module hooks exist only while a forward with markers runs. So they are never compiled into a prefill graph, and cost
nothing once the proof is done. Under a replayed graph, or where norm and all-reduce are one kernel, no module runs: then there
is no proof, and what has to be taken here is missing, which fails the dump.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

from hsx.capture.model import norm_input

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hsx.capture.model import FinalNorm, Layers
    from hsx.core.spec import CaptureSpec

log = logging.getLogger(__name__)

PROOF_ROWS: Final = 64
"""Tokens that are compared."""
PROOF_ERROR: Final = 2.0**-7
"""Largest median relative error: two roundings of bf16. Neighbouring layers are further apart by an order of magnitude."""
PROOF_FORWARDS: Final = 16
"""Forwards without a norm to be seen, after which nobody looks any more."""
KNOWN_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(slots=True)
class _Seen:
    """What one forward showed.

    Attributes:
        inputs: by k, what the input norm of layer k normalised.
        before: what the final norm normalised, and
        after: what it gave.
        calls: how often each norm ran.
    """

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    calls: dict[int, int] = field(default_factory=dict)


class Taps:
    """The taps of one model.

    Args:
        spec: what is captured.
        layers: how.
        final: the final norm, or None where it is not found: then the final state must be the head's input, unproved.
        from_norm: the final state is taken at the final norm even if it is `post_norm` (the model changes it afterwards).
        convert: a residual of another dtype than bf16 is rounded to it; else it is refused.
    """

    def __init__(
        self, spec: CaptureSpec, layers: Layers, final: FinalNorm | None, *, from_norm: bool = False, convert: bool = True
    ) -> None:
        self._spec = spec
        self._layers = layers
        self._final = final
        self._from_norm = from_norm
        self._convert = convert
        self._seen = _Seen()
        self._unseen = 0
        self._proving = True

    @property
    def at_modules(self) -> tuple[str, ...]:
        """States that are taken at a module's own call, by name."""
        return (*(f"h_{k}" for k in self._layers.taken), *((self._spec.final,) if self._takes_final else ()))

    @property
    def proving(self) -> bool:
        """Whether the proof is still to come."""
        return self._proving

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Around one forward."""
        self._seen = _Seen()
        wanted = self._layers.norms if self._proving else {k: self._layers.norms[k] for k in self._layers.taken}
        handles = [norm.register_forward_hook(self._at_input(k), with_kwargs=True) for k, norm in wanted.items()]
        if self._final is not None and (self._proving or self._takes_final):
            handles.append(self._final.module.register_forward_hook(self._at_final, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def states(
        self, aux: torch.Tensor | Sequence[torch.Tensor] | None, head_input: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The layers of the spec in its order, each [R, H], and the final state [R, H], of the forward under way.

        Args:
            aux: what the model handed out: a sequence of [R, H], one packed [R, n * H], or None.
            head_input: what the logits processor was given.

        Raises:
            ValueError: something is missing, or has a dtype that is refused.
        """
        handed = dict(zip(self._layers.handed_out, self._unpacked(aux, head_input.shape[-1]), strict=True))
        parts = []
        for k in self._spec.layers:
            part = handed[k] if k in handed else self._seen.inputs.get(k)
            if part is None or self._seen.calls.get(k, 0) > 1:
                raise ValueError(
                    f"the input norm of layer {k} ran {self._seen.calls.get(k, 0)} times as a module; expected once, to take "
                    f"h_{k} there (a prefill graph, or norm and all-reduce in one kernel)"
                )
            parts.append(part)
        final: torch.Tensor | None = head_input
        if self._takes_final:
            final = self._seen.before if self._spec.final == "pre_norm" else self._seen.after
        if final is None:
            raise ValueError("the final norm did not run as a module; its input is unknown (a prefill graph?)")
        for name, part in zip(self._spec.names, [*parts, final], strict=True):
            if part.dtype not in KNOWN_DTYPES or (part.dtype != torch.bfloat16 and not self._convert):
                raise ValueError(
                    f"{name} is {part.dtype}; expected torch.bfloat16 (capture.convert rounds float16 and float32)"
                )
        return parts, final

    def problem(self, aux: torch.Tensor | Sequence[torch.Tensor] | None, head_input: torch.Tensor, rows: int) -> str | None:
        """Compares what the model handed out with what the norms saw. One sentence where they are different states.

        Called once for each forward while `proving`; after a comparison, or too many forwards without one, it is not any more.
        """
        count = min(rows, PROOF_ROWS)
        pairs = [
            (f"h_{k}", part, self._seen.inputs.get(k) if self._seen.calls.get(k) == 1 else None)
            for k, part in zip(self._layers.handed_out, self._unpacked(aux, head_input.shape[-1]), strict=True)
        ]
        if self._spec.final == "post_norm" and not self._from_norm:
            pairs.append(("post_norm", head_input, self._seen.after))
        found = {name: _error(part, seen, count) for name, part, seen in pairs if seen is not None and len(seen) >= count}
        if len(found) < len(pairs):
            self._unseen += 1
            if self._unseen < PROOF_FORWARDS:
                return None
            lacking = [name for name, _, _ in pairs if name not in found]
            log.warning("capture.layers_unproved states=%s reason=their norms do not run as modules", lacking)
        self._proving = False
        wrong = {name: error for name, error in found.items() if not error <= PROOF_ERROR}
        if wrong:
            name, error = next(iter(wrong.items()))
            place = "the final norm gave" if name == "post_norm" else f"the input norm of layer {name[2:]} was given"
            return (
                f"the model hands out something else for {name} than {place}: median relative error {error:.2g}, expected at "
                f"most {PROOF_ERROR:.2g}"
            )
        log.info("capture.layers_proved states=%s worst=%.2g", list(found), max(found.values(), default=0.0))
        return None

    @property
    def _takes_final(self) -> bool:
        return self._spec.final == "pre_norm" or self._from_norm

    def _unpacked(self, aux: torch.Tensor | Sequence[torch.Tensor] | None, width: int) -> list[torch.Tensor]:
        count = len(self._layers.handed_out)
        if count == 0:
            return []
        if isinstance(aux, torch.Tensor):
            if aux.dim() != 2 or aux.shape[1] != count * width:
                raise ValueError(f"packed aux states are {tuple(aux.shape)}; expected [rows, {count} * {width}]")
            return [aux[:, i * width : (i + 1) * width] for i in range(count)]
        parts = list(aux or ())
        if len(parts) != count:
            raise ValueError(f"the model gave {len(parts)} layers; expected {count}")
        return parts

    def _at_input(self, k: int) -> Callable[..., None]:
        # What is only compared needs its first rows alone.
        rows = None if k in self._layers.taken else PROOF_ROWS

        def seen(_module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, Any], output: object) -> None:
            if not torch.compiler.is_compiling():
                self._seen.calls[k] = self._seen.calls.get(k, 0) + 1
                with contextlib.suppress(ValueError):  # then it is missing, and whoever needs it says so
                    self._seen.inputs[k] = norm_input(_operands(inputs, named), output)[:rows].clone()

        return seen

    def _at_final(self, _module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, Any], output: object) -> None:
        if torch.compiler.is_compiling():
            return
        rows = None if self._takes_final else PROOF_ROWS
        with contextlib.suppress(ValueError):
            self._seen.before = norm_input(_operands(inputs, named), output)[:rows].clone()
        given = output[0] if isinstance(output, tuple) else output
        if isinstance(given, torch.Tensor):
            self._seen.after = given[:rows].clone()


def _operands(inputs: tuple[object, ...], named: dict[str, Any]) -> tuple[object, ...]:
    """Input and residual of a norm's call; other arguments (`quant_linear`, in 0.5.18) are no states."""
    return (*inputs, named["residual"]) if "residual" in named else inputs


def _error(found: torch.Tensor, wanted: torch.Tensor, rows: int) -> float:
    """Median over the first `rows` tokens of the relative error."""
    a, b = found[:rows].float(), wanted[:rows].float()
    if a.shape != b.shape:
        return float("inf")
    error = torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)
    return float(error.median())
