"""Rates over sliding windows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.rates import Eta, Meter, Rates, Window, eta


def test_a_young_window_divides_by_its_age() -> None:
    window = Window(60.0, 60, start=1000.5)
    window.add(1001.0, 30)
    assert window.rate(1003.5) == pytest.approx(10.0)


def test_no_time_has_passed_means_no_rate() -> None:
    window = Window(60.0, 60, start=5.0)
    window.add(5.0, 10)
    assert window.rate(5.0) == 0.0


def test_what_left_the_window_no_longer_counts() -> None:
    window = Window(60.0, 60, start=0.0)
    window.add(1.0, 1000)
    window.add(100.0, 60)
    assert window.rate(120.0) == pytest.approx(60 / 59.0)
    assert window.rate(1000.0) == 0.0


@given(rate=st.integers(1, 50), seconds=st.integers(1, 2000), start=st.floats(0, 1e6))
def test_a_steady_stream_shows_its_rate_in_every_window(rate: int, seconds: int, start: float) -> None:
    meter = Meter(start)
    for second in range(seconds):
        meter.add(start + second + 0.5, rate)
    rates = meter.rates(start + seconds)
    assert meter.total == rate * seconds
    assert rates.run == pytest.approx(rate)
    # A window's oldest slice is cut where it began, so up to one slice's worth of events may fall on either side.
    assert rates.minute == pytest.approx(rate, abs=rate / min(seconds, 59) + 1e-6)
    assert rates.ten_minutes == pytest.approx(rate, abs=rate / min(seconds, 590) + 1e-6)


def test_the_clock_may_stand_still_or_jump_far() -> None:
    window = Window(600.0, 60, start=0.0)
    for now in (1.0, 1.0, 1e9, 1e9 + 1):
        window.add(now, 1)
    assert window.rate(1e9 + 2) > 0


@pytest.mark.parametrize(
    ("remaining", "age", "expected"),
    [
        (0, 10, Eta(0.0, "nothing is left")),
        (-5, 10, Eta(0.0, "nothing is left")),
        (300, 599, Eta(100.0, "tokens/s of this run")),
        (300, 600, Eta(150.0, "tokens/s of the last 10 minutes")),
    ],
)
def test_the_time_left_and_its_basis(remaining: int, age: float, expected: Eta) -> None:
    assert eta(remaining, Rates(minute=1.0, ten_minutes=2.0, run=3.0), age) == expected


def test_without_a_rate_the_time_left_is_unknown() -> None:
    assert eta(5, Rates(0.0, 0.0, 0.0), 5) == Eta(None, "no sample has been committed yet")
