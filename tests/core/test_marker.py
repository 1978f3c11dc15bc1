"""The marker: spelled and read back without loss; nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.marker import MAX_LENGTH, Marker, parse, prefix

markers = st.builds(
    Marker,
    run=st.text("0123456789abcdef", min_size=8, max_size=8),
    index=st.integers(0, 10**12),
    attempt=st.integers(0, 10**6),
    tokens=st.integers(1, 10**9),
    canary=st.booleans(),
)


@given(markers)
def test_round_trip(marker: Marker) -> None:
    text = str(marker)
    assert parse(text) == marker
    assert len(text) <= MAX_LENGTH
    assert text.isascii()
    assert "/" not in text


@given(markers, st.integers(0, 63), st.characters(codec="utf-8"))
def test_one_changed_character_is_another_marker_or_none(marker: Marker, at: int, character: str) -> None:
    text = str(marker)
    changed = text[: at % len(text)] + character + text[at % len(text) + 1 :]
    if changed != text:
        assert parse(changed) != marker


@pytest.mark.parametrize(
    "rid",
    [
        "",
        "HEALTH_CHECK_1a2b",
        "0123456789abcdef0123456789abcdef",
        "hsx1-0123456-0-1-5",
        "hsx1-01234567-00-1-5",
        "hsx1-01234567-0-1-0",
        "hsx1-01234567-0-1-5\n",
        " hsx1-01234567-0-1-5",
        "hsx2-01234567-0-1-5",
        "hsx1-01234567-0-1-5-",
        "hsx1-01234567-0-1-٣",
        "hsx1-01234567-" + "9" * 60 + "-1-5",
    ],
)
def test_foreign_rids(rid: str) -> None:
    assert parse(rid) is None


def test_markers_of_a_run_share_a_prefix_that_no_other_run_has() -> None:
    for marker in (Marker("01234567", 0, 1, 1), Marker("01234567", 3, 2, 1, canary=True)):
        assert str(marker).startswith(prefix("01234567"))
        assert not str(marker).startswith(prefix("01234568"))


def test_a_marker_that_cannot_be_spelled_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid marker"):
        Marker("0123456G", 0, 1, 1)
    with pytest.raises(ValueError, match="not a valid marker"):
        Marker("01234567", 0, 1, 0)
