"""The recent past, in a ring of slices."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsx.core.history import History


def test_slices_are_filled_forgotten_and_empty_where_nothing_happened() -> None:
    history = History(10.0, 4, 100.0)
    history.add(100.0, samples=1, tokens=5)
    history.add(109.9, samples=1)
    history.add(125.0, tokens=7)
    age, series = history.series(126.0)
    assert age == 26.0
    assert (series["samples"], series["tokens"]) == ([2, 0, 0], [5, 0, 7])
    age, series = history.series(150.0)
    assert age == 30.0
    assert (series["samples"], series["tokens"]) == ([0, 0, 0, 0], [7, 0, 0, 0])
    assert history.series(1e6)[1]["tokens"] == [0] * 4


@given(st.lists(st.tuples(st.floats(0, 50), st.integers(0, 9)), max_size=50))
def test_what_is_young_enough_is_all_there(steps: list[tuple[float, int]]) -> None:
    history, now = History(7.0, 5, 3.0), 3.0
    kept: list[tuple[int, int]] = []
    for pause, amount in steps:
        now += pause
        history.add(now, tokens=amount)
        kept.append((int((now - 3.0) // 7.0), amount))
    newest = int((now - 3.0) // 7.0)
    assert sum(history.series(now)[1]["tokens"]) == sum(amount for slot, amount in kept if slot > newest - 5)
