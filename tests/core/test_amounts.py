"""How much something is, in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.config_load import parse_size
from hsx.core.amounts import in_words, in_words_and_bytes


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (-1, "-1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1500, "1.5 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1 << 30, "1.07 GB"),
        (-(1 << 30), "-1.07 GB"),
        (5_034_800_000_000, "5.03 TB"),
        (1_234_567 * 10**9, "1235 TB"),
    ],
)
def test_amounts(nbytes: int, words: str) -> None:
    assert in_words(nbytes) == words


@given(st.integers(0, 10**15))
def test_words_are_within_half_a_percent(nbytes: int) -> None:
    """And what stands in a message can be written into a job file."""
    words = in_words(nbytes).replace(" bytes", " B").replace(" byte", " B")
    assert abs(parse_size(words) - nbytes) <= 0.005 * nbytes + 1


def test_the_very_number_is_told_once() -> None:
    assert in_words_and_bytes(512) == "512 bytes"
    assert in_words_and_bytes(1_234_567) == "1.23 MB (1234567 bytes)"
