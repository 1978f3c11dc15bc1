"""How far two runs of a prompt lie apart, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SMALLEST = np.float32(1e-30)


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
    ours, theirs = _float32(found), _float32(wanted)
    norms = np.maximum(np.linalg.norm(theirs, axis=-1), _SMALLEST)
    return np.asarray(np.linalg.norm(ours - theirs, axis=-1) / norms, dtype=np.float32)


def _float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)
