"""States as fp8: e4m3 values and one float32 scale for each row, a state of a token.

The formula, the rounding and the types are those of speculators (hs_connectors 0.9.0, `fp8_utils`): scale = amax / 448 in
float32, q = (x / scale) rounded to the nearest e4m3fn value, ties to even. Where speculators takes one scale for all states of
a token, here each state has its own: a residual stream grows by orders of magnitude from layer to layer, and a row that is
small beside its neighbours would lose its bits, or all of them. Its reader takes such scales as they are ([S, L, 1] broadcasts
as [S, 1, 1] does).

For a finite row the error of each element is at most max(2^-4 |x|, 2^-10 scale), within float32's rounding. A row of zeros has
scale 1e-12, as there, and comes back as zeros; the sign of -0.0 is kept. Any other row keeps its largest element as +-448, so
it never comes back as zeros.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.core.layout import SCALE_BYTES

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

LARGEST: Final = 448.0
"""The largest finite e4m3fn value."""
ZERO_SCALE: Final = 1e-12
_NORMAL: Final = 2.0**-126
_BLOCK: Final = 1 << 18
"""Elements that are converted at once: their float32 values stay in the processor's cache from one pass to the next."""
ROW_ERROR: Final = 2.0**-4
"""Largest error of a row, norm over norm, but for `sqrt(H) / 2**19` of elements too small for e4m3's exponents."""


def row_error(hidden_size: int) -> float:
    """Largest relative error of a row, |stored - x| / |x|, that conversion to fp8 may cause."""
    return ROW_ERROR + math.sqrt(hidden_size) * 2.0**-10 / LARGEST


def quantise(bits: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    """Converts rows; memory is a few times theirs, and the interpreter lock is free meanwhile.

    Args:
        bits: bf16 bits, C-contiguous [rows, L, H], finite.
        out: uint8 [rows, L, H + 4]; filled with H e4m3 values and the bytes of their scale, little endian.
    """
    for first in range(0, len(bits), step := _step(bits)):
        _quantise(bits[first : first + step], out[first : first + step])


def _quantise(bits: NDArray[np.uint16], out: NDArray[np.uint8]) -> None:
    import torch  # only stores in fp8 need it

    width = bits.shape[-1]
    # As numbers, the bits of positive values are in the order of the values, and so are those of negative ones.
    positive, any_sign = bits.view(np.int16).max(-1, keepdims=True), bits.max(-1, keepdims=True)
    largest = np.maximum(np.maximum(positive, 0).view(np.uint16), np.where(any_sign >> 15, any_sign & 0x7FFF, 0))
    scale = (largest.astype(np.uint32) << np.uint32(16)).view(np.float32) / np.float32(LARGEST)
    scale[largest == 0] = ZERO_SCALE
    values = torch.from_numpy(bits).view(torch.bfloat16).float().div_(torch.from_numpy(scale))
    if float(scale.min()) < _NORMAL:
        # A scale among float32's subnormal numbers is rounded so coarsely that the largest element may pass 448.
        values.clamp_(-LARGEST, LARGEST)
    out[..., :width] = values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    out[..., width:] = scale.astype("<f4", copy=False).view(np.uint8)


def _step(rows: NDArray[Any]) -> int:
    """How many tokens are converted at once."""
    tokens: int = _BLOCK // (rows.shape[-2] * rows.shape[-1])
    return max(1, tokens)


def dequantise(stored: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    """Converts rows back: value times scale in float32, rounded to the nearest bf16.

    Args:
        stored: uint8 [rows, L, H + 4], as `quantise` makes it.
        out: uint16 [rows, L, H]; filled with bf16 bits.
    """
    import torch  # as above

    width = out.shape[-1]
    for first in range(0, len(out), step := _step(out)):
        part = stored[first : first + step]
        values = np.take(_table(), part[..., :width])
        values *= scales(part)
        out[first : first + step] = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()


def converted(values: torch.Tensor) -> torch.Tensor:
    """Rows [rows, H] of any float type as they come back after having been stored: float32."""
    import torch  # as above

    bits = values.to(torch.bfloat16).view(torch.uint16).numpy()[:, None]
    stored = np.empty((*bits.shape[:-1], bits.shape[-1] + SCALE_BYTES), np.uint8)
    found = np.empty_like(bits)
    quantise(np.ascontiguousarray(bits), stored)
    dequantise(stored, found)
    return torch.from_numpy(found).view(torch.bfloat16).float()[:, 0]


def scales(stored: NDArray[np.uint8]) -> NDArray[np.float32]:
    """The scales of rows that are stored: float32 [rows, L, 1] out of uint8 [rows, L, H + 4]."""
    return np.ascontiguousarray(stored[..., -SCALE_BYTES:]).view("<f4")


def _table() -> NDArray[np.float32]:
    """The value of each of the 256 e4m3fn codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinities, one NaN."""
    if not _TABLE:
        codes = np.arange(128)
        exponent, mantissa = codes >> 3, codes & 7
        magnitude = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
        magnitude[127] = np.nan
        _TABLE.append(np.concatenate([magnitude, -magnitude]).astype(np.float32))
    return _TABLE[0]


_TABLE: Final[list[NDArray[np.float32]]] = []
