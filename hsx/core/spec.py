"""What is captured: the layers in `h_k` terms, the final state, and the shape of the model they come from.

`h_k` is the residual stream after k layers: HF's `hidden_states[k]` for k < N. `h_0` are the embeddings. The final state is
`post_norm` (after the final norm; HF's last entry) or `pre_norm` (`h_N`, before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

FinalState = Literal["post_norm", "pre_norm"]
FINAL_STATES: Final[tuple[str, ...]] = get_args(FinalState)
BF16_BYTES: Final = 2


def final_state(text: str) -> FinalState:
    """`text` as the name of a final state. Raises ValueError with what was expected and found."""
    for state in get_args(FinalState):
        if text == state:
            found: FinalState = state
            return found
    raise ValueError(f"final state is {text!r}; expected one of {', '.join(FINAL_STATES)}")


@dataclass(frozen=True, slots=True)
class CaptureSpec:
    """Which hidden states are taken, in the order in which they are stored.

    Attributes:
        layers: the k of each `h_k`, strictly rising.
        final: how the final state, always stored last, is declared.
    """

    layers: tuple[int, ...]
    final: FinalState

    @property
    def states(self) -> int:
        """L, the number of vectors stored per token: the layers and the final state."""
        return len(self.layers) + 1

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the L vectors in stored order, such as `("h_2", "h_15", "post_norm")`."""
        return (*(f"h_{k}" for k in self.layers), self.final)

    def problems(self, model_layers: int) -> list[str]:
        """Sentences that say why this spec cannot be captured from a model of `model_layers` layers; empty when it can."""
        found = []
        if not self.layers:
            found.append("capture.layers is empty; expected at least one k of h_k")
        if any(b <= a for a, b in zip(self.layers, self.layers[1:], strict=False)):
            found.append(f"capture.layers is {list(self.layers)}; expected strictly rising values")
        found += [
            f"capture.layers has {k}; expected 0 to {model_layers - 1} for a model of {model_layers} layers "
            f"(h_{model_layers} is the final state: set capture.final = 'pre_norm')"
            for k in self.layers
            if not 0 <= k < model_layers
        ]
        if self.final not in FINAL_STATES:
            found.append(f"capture.final is {self.final!r}; expected one of {', '.join(FINAL_STATES)}")
        return found


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The facts of a model that hsx plans and checks with.

    Attributes:
        hidden_size: H, width of the residual stream.
        layers: N, number of decoder layers.
        vocab_size: ids are valid in [0, vocab_size).
        context_length: positions of the model; the server accepts somewhat fewer.
    """

    hidden_size: int
    layers: int
    vocab_size: int
    context_length: int


def bytes_per_token(spec: CaptureSpec, hidden_size: int) -> int:
    """Bytes of bf16 payload that one token takes: L * H * 2."""
    return spec.states * hidden_size * BF16_BYTES
