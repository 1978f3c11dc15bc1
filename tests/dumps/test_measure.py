"""What `measure` finds in tensors made to be wrong in one way each, against plain float arithmetic."""

from __future__ import annotations

from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx.core.invariants import Content
from hsx.core.layout import CHUNK_TOKENS
from hsx.dumps.measure import measure as measure_all

IDS = np.arange(200, dtype=np.int32)
CLEAN = Content(None, False, 0, None, 0, None, (), ())


def measure(states: np.ndarray, input_ids: np.ndarray, expected_ids: np.ndarray) -> Content:
    """What was found, without the checksums."""
    return replace(measure_all(states, input_ids, expected_ids), crcs=())


def states(tokens: int = 200, layers: int = 3, width: int = 16) -> np.ndarray:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(tokens, layers, width, generator=generator).bfloat16().view(torch.uint16).numpy()


def test_clean_states_measure_clean() -> None:
    assert measure(states(), IDS, IDS) == CLEAN


def test_every_nonfinite_value_is_counted_and_the_first_is_placed() -> None:
    broken = states()
    broken[150, 2, 3] = 0x7F80
    broken[17, 1, 5] = 0xFFC0
    assert measure(broken, IDS, IDS) == replace(CLEAN, nonfinite=2, nonfinite_at=(17, 1))


def test_zero_rows_are_counted_with_either_sign_of_zero() -> None:
    broken = states()
    broken[30, 0] = 0x8000
    broken[31, 2] = 0
    assert measure(broken, IDS, IDS) == replace(CLEAN, zero_rows=2, zero_row_at=(30, 0))


def test_equal_states_and_constant_states() -> None:
    broken = states()
    broken[:, 2] = broken[:, 0]
    assert measure(broken, IDS, IDS) == replace(CLEAN, equal_states=((0, 2),))
    broken = states()
    broken[:, 1] = broken[0, 1]
    assert measure(broken, IDS, IDS) == replace(CLEAN, constant_states=(1,))


def test_a_single_token_has_no_constant_states_and_a_repeated_id_is_noted() -> None:
    assert measure(states(1), IDS[:1], IDS[:1]) == replace(CLEAN, ids_all_equal=True)
    same = np.full(200, 5, np.int32)
    assert measure(states(), same, same) == replace(CLEAN, ids_all_equal=True)


def test_the_first_differing_id_is_placed_also_where_a_length_differs() -> None:
    other = IDS.copy()
    other[123] = 0
    assert measure(states(), other, IDS).ids_differ_at == 123
    assert measure(states(), IDS[:150], IDS).ids_differ_at == 150


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 4), st.integers(1, 9))
def test_agrees_with_float_arithmetic_on_arbitrary_bits(seed: int, tokens: int, layers: int, width: int) -> None:
    # Few distinct values, so that zero rows, equal states and constants occur often.
    bits = np.random.default_rng(seed).choice(np.array([0, 0x8000, 0x3F80, 0x7F80, 0x7FC1], np.uint16), (tokens, layers, width))
    ids = IDS[:tokens]
    values = torch.from_numpy(bits).view(torch.bfloat16).float()
    found = measure(bits, ids, ids)
    assert found.nonfinite == int((~torch.isfinite(values)).sum())
    assert found.zero_rows == int((values == 0).all(-1).sum())
    expected = tuple((a, b) for a in range(layers) for b in range(a + 1, layers) if (bits[:, a] == bits[:, b]).all())
    assert found.equal_states == expected


@pytest.mark.parametrize("chunk_tokens", [8, CHUNK_TOKENS, 128])
@pytest.mark.parametrize(("tokens", "width"), [(1, 5), (64, 16), (65, 16), (150, 3000), (3, 200_000)])
def test_checksums_are_those_of_the_rows_of_each_inner_chunk(tokens: int, width: int, chunk_tokens: int) -> None:
    bits = np.random.default_rng(tokens).integers(0, 1 << 16, (tokens, 2, width), dtype=np.uint16)
    found = measure_all(bits, IDS[:tokens], IDS[:tokens], chunk_tokens).crcs
    chunks = [bits[at : at + chunk_tokens].tobytes() for at in range(0, tokens, chunk_tokens)]
    assert found == tuple(google_crc32c.value(chunk) for chunk in chunks)
