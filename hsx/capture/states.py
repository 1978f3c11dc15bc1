"""From the tensors of one forward to the [tokens, L, H] block that is stored. Torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def stack_states(
    aux: torch.Tensor | Sequence[torch.Tensor] | None, final: torch.Tensor, rows: int, layers: int, dtype: torch.dtype
) -> torch.Tensor:
    """Puts the captured layers and the final state side by side for each token.

    Args:
        aux: the layers' states: a sequence of [R, H] in layer order, or one packed [R, layers * H].
        final: the final state, [R, H]; R is at least `rows`, what lies beyond is padding of the batch.
        rows: real tokens in the batch.
        layers: how many layers there must be.
        dtype: what the block is rounded to (nearest, ties to even, where it is narrower than the model's).

    Returns:
        A new tensor [rows, layers + 1, H] on the device of the arguments; it shares no memory with them.

    Raises:
        ValueError: the shapes are not these.
    """
    width = final.shape[-1]
    if aux is None:
        parts: list[torch.Tensor] = []
    elif isinstance(aux, torch.Tensor):
        if aux.dim() != 2 or aux.shape[1] != layers * width:
            raise ValueError(f"packed aux states are {tuple(aux.shape)}; expected [rows, {layers} * {width}]")
        parts = [aux[:, i * width : (i + 1) * width] for i in range(layers)]
    else:
        parts = list(aux)
    if len(parts) != layers:
        raise ValueError(f"the model gave {len(parts)} layers; expected {layers}")
    parts.append(final)
    for part in parts:
        if part.dim() != 2 or part.shape[0] < rows or part.shape[1] != width:
            raise ValueError(f"states are {tuple(part.shape)}; expected at least {rows} rows of {width}")
    return torch.stack([part[:rows].to(dtype) for part in parts], dim=1)
