"""The final norm, as models of this kind apply it: root mean square, times a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TOKENS: Final = 1024
"""Tokens at a time: in float32 they take twice the memory of what is stored."""


def apply_final_norm(states: torch.Tensor, weight: NDArray[np.float32], eps: float) -> torch.Tensor:
    """post_norm of pre_norm: `x / sqrt(mean(x^2) + eps) * weight` in float32, rounded once to bfloat16.

    Args:
        states: bfloat16 [S, H], h_N.
        weight: float32 [H], as the store has recorded it.
        eps: of the norm.

    Returns:
        bfloat16 [S, H], in memory of its own.
    """
    scale = torch.from_numpy(weight.copy())
    out = torch.empty_like(states, memory_format=torch.contiguous_format)
    for at in range(0, len(states), _TOKENS):
        x = states[at : at + _TOKENS].float()
        out[at : at + _TOKENS] = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * scale
    return out
