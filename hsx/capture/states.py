"""From the tensors of one forward to rows of [L, H] in a host buffer. Torch only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


def split_states(
    aux: torch.Tensor | Sequence[torch.Tensor] | None, final: torch.Tensor, rows: int, layers: int
) -> list[torch.Tensor]:
    """The captured layers and the final state, one [rows, H] each: views, without the batch's padding.

    Args:
        aux: the layers' states: a sequence of [R, H] in layer order, or one packed [R, layers * H].
        final: the final state, [R, H]; R is at least `rows`, what lies beyond is padding of the batch.
        rows: real tokens in the batch.
        layers: how many layers there must be.

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
    return [part[:rows] for part in parts]


def copy_rows(parts: Sequence[torch.Tensor], first: int, out: torch.Tensor) -> None:
    """Copies rows into a host buffer, the states of each token side by side, rounded to the buffer's dtype.

    On a CPU each state goes straight to its place: the copy is done on return, and the model may use its memory again. On a
    CUDA device the block is put together there, and copied without waiting, on the current stream: that is the one on which
    the model computed the rows, and on which whatever uses their memory next will run (SGLang's scheduler runs a batch inside
    `forward_stream_ctx`, `managers/scheduler.py`, and replays graphs on the same stream). The block's own memory comes from
    PyTorch's allocator, which hands it out again in the order of that stream.

    Args:
        parts: L tensors [R, H] on one device.
        first: the first row to take.
        out: [n, L, H] on the CPU: how many rows to take, and where to put them. Pinned for CUDA.
    """
    rows = slice(first, first + len(out))
    if parts[0].device.type == "cpu":
        for place, part in enumerate(parts):
            out[:, place].copy_(part[rows])
    else:
        block = torch.stack([part[rows].to(out.dtype) for part in parts], dim=1)
        out.copy_(block, non_blocking=block.is_cuda)


def bf16_bits(states: torch.Tensor) -> NDArray[np.uint16]:
    """The bits of bf16 states as a contiguous uint16 array, without a copy where the tensor is contiguous and on the CPU.

    Raises ValueError for any other dtype: rounding is the caller's decision, never a side effect of this.
    """
    if states.dtype != torch.bfloat16:
        raise ValueError(f"states have dtype {states.dtype}; expected torch.bfloat16")
    return states.detach().cpu().contiguous().view(torch.uint16).numpy()


def rounded_in_place(states: torch.Tensor) -> NDArray[np.uint16]:
    """The bits of float32 states [n, L, H], rounded to bf16, in the first half of their own memory: uint16 [n, L, H].

    Args:
        states: contiguous, on the CPU; undone by this.
    """
    bits = states.view(torch.uint16).numpy().reshape(-1)[: states.numel()].reshape(states.shape)
    bits[...] = bf16_bits(states.to(torch.bfloat16))
    return bits
