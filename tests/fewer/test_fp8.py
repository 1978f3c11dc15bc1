"""Conversion to fp8 and back, against a reference in float64 and against what ml_dtypes calls e4m3fn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsx.stores.fp8 import converted, dequantise, quantise, row_error, scales

if TYPE_CHECKING:
    from numpy.typing import NDArray

FINITE = st.integers(0, 0xFFFF).filter(lambda bits: bits & 0x7F80 != 0x7F80)


def floats(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return np.asarray(bits.view(ml_dtypes.bfloat16), np.float64)


def stored(bits: NDArray[np.uint16]) -> NDArray[np.uint8]:
    out = np.empty((*bits.shape[:-1], bits.shape[-1] + 4), np.uint8)
    quantise(bits, out)
    return out


def back(raw: NDArray[np.uint8]) -> NDArray[np.uint16]:
    out = np.empty((*raw.shape[:-1], raw.shape[-1] - 4), np.uint16)
    dequantise(raw, out)
    return out


@given(st.lists(FINITE, min_size=4, max_size=48).map(lambda row: row[: len(row) // 2 * 2]))
def test_any_finite_row_comes_back_within_the_bound(row: list[int]) -> None:
    bits = np.array(row, np.uint16)[None, None]
    raw = stored(bits)
    values, found = floats(bits)[0, 0], floats(back(raw))[0, 0]
    largest = np.abs(values).max()
    scale = float(scales(raw)[0, 0, 0])
    assert scale == (float(np.float32(1e-12)) if largest == 0 else float(np.float32(largest) / np.float32(448)))
    # The value itself in fp8, and then the rounding of value times scale to bf16, whose subnormal numbers are 2^-133 apart.
    bound = np.maximum(2.0**-4 * np.abs(values), 2.0**-10 * scale) * (1 + 2.0**-6) + 2.0**-8 * np.abs(values) + 2.0**-133
    assert bool((np.abs(found - values) <= bound).all())
    assert bool(np.isfinite(found).all())
    assert bool(found.any()) == bool(values.any())
    assert np.array_equal(np.signbit(found), np.signbit(values))


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1.0, 3.0, 8.0]))
def test_values_and_scales_are_those_of_the_reference(seed: int, spread: float) -> None:
    """Bit for bit what speculators' formula gives for each row, here with another library's e4m3fn."""
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((5, 3, 16)) * 10.0 ** (spread * rng.standard_normal((5, 3, 16)))).astype(ml_dtypes.bfloat16)
    wide = values.astype(np.float32)
    scale = np.abs(wide).max(axis=-1, keepdims=True) / np.float32(448)
    wanted = (wide / scale).astype(ml_dtypes.float8_e4m3fn)
    raw = stored(values.view(np.uint16))
    assert np.array_equal(raw[..., :16], wanted.view(np.uint8))
    assert np.array_equal(scales(raw), scale)
    restored = (wanted.astype(np.float32) * scale).astype(ml_dtypes.bfloat16)
    assert np.array_equal(back(raw), restored.view(np.uint16))


def test_every_code_is_read_as_what_it_stands_for() -> None:
    raw = np.zeros((1, 1, 260), np.uint8)
    raw[0, 0, :256] = np.arange(256)
    raw[0, 0, 256:] = np.array([1.0], "<f4").view(np.uint8)
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    found = back(raw)[0, 0].view(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(found, wanted, equal_nan=True)
    torch_says = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(found, torch_says, equal_nan=True)


def test_zeros_stay_zeros_and_an_outlier_costs_the_small_ones_alone() -> None:
    row = np.zeros((1, 3, 64), np.float32)
    row[0, 1] = 1.0
    row[0, 1, 7] = 1e6  # the others are below 2^-10 of its scale
    row[0, 2] = 1.0
    bits = row.astype(ml_dtypes.bfloat16).view(np.uint16)
    bits[0, 0, 5] = 0x8000  # -0.0
    raw = stored(bits)
    found = back(raw)
    assert found[0, 0].tolist() == bits[0, 0].tolist()
    assert float(scales(raw)[0, 0, 0]) == np.float32(1e-12)
    assert floats(found)[0, 1].tolist() == [0.0] * 7 + [float(floats(bits)[0, 1, 7])] + [0.0] * 56
    assert floats(found)[0, 2].tolist() == [1.0] * 64  # its own state's scale: that of its neighbour does it no harm


@pytest.mark.parametrize("width", [2, 64, 7168])
def test_rows_stay_within_the_error_that_tolerances_are_widened_by(width: int) -> None:
    rng = np.random.default_rng(width)
    values = (
        torch.from_numpy(rng.standard_normal((50, width)) * np.exp(rng.standard_normal((50, width)) * 3)).bfloat16().float()
    )
    error = (converted(values) - values).norm(dim=-1) / values.norm(dim=-1)
    assert 0 < float(error.max()) <= row_error(width) + 2.0**-8
