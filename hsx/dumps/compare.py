"""How far two runs of a prompt lie apart, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST = np.float32(1e-30)
_BLOCK = 256
"""Tokens that are compared at once: float32 copies of a whole long sample would take gigabytes."""


def row_distances(found: NDArray[np.uint16], wanted: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The relative distance of each token's state: the norm of the difference over the norm of what is wanted.

    Relative errors per token tell a shifted row or a neighbouring layer from rounding; absolute ones and cosines do not:
    trained models have single tokens of a thousand times the usual magnitude.

    Args:
        found: bf16 bits, [tokens, L, H].
        wanted: bf16 bits of the same shape.

    Returns:
        float32 [tokens, L].
    """
    distances = np.empty(found.shape[:2], dtype=np.float32)
    for at in range(0, len(found), _BLOCK):
        ours, theirs = _float32(found[at : at + _BLOCK]), _float32(wanted[at : at + _BLOCK])
        norms = np.maximum(np.linalg.norm(theirs, axis=-1), _SMALLEST)
        distances[at : at + _BLOCK] = np.linalg.norm(ours - theirs, axis=-1) / norms
    return distances


def _float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
