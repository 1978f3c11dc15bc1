"""Distances between two runs of a prompt, token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.dumps.compare import row_distances

if TYPE_CHECKING:
    from numpy.typing import NDArray

TOKENS, STATES, WIDTH = 600, 2, 8
"""More tokens than are compared at once."""


def bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """bf16 bits of values that bf16 holds exactly."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def test_each_token_has_its_own_distance_however_long_the_prompt() -> None:
    rng = np.random.default_rng(3)
    wanted = rng.integers(1, 8, (TOKENS, STATES, WIDTH)).astype(np.float32)
    found = wanted.copy()
    found[[0, 255, 256, 599], 1] *= 2.0
    distances = row_distances(bits(found), bits(wanted))
    assert distances.shape == (TOKENS, STATES)
    assert distances.dtype == np.dtype(np.float32)
    expected = np.zeros((TOKENS, STATES), np.float32)
    expected[[0, 255, 256, 599], 1] = 1.0
    assert np.allclose(distances, expected)


def test_the_distance_from_nothing_is_large_and_finite() -> None:
    nothing = np.zeros((1, STATES, WIDTH), np.float32)
    one = np.ones((1, STATES, WIDTH), np.float32)
    assert (row_distances(bits(nothing), bits(nothing)) == 0.0).all()
    distances = row_distances(bits(one), bits(nothing))
    assert np.isfinite(distances).all()
    assert (distances > 1e6).all()
