"""The counter accounts for every number: what goes back, repeats or is missing is told apart, and nothing sound is accused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hsx.core.counter import REMEMBERED, Counter
from hsx.core.invariants import Violation
from hsx.core.marker import Marker


def marker(index: int) -> Marker:
    return Marker("0a1b2c3d", index, 1, 7)


def named(violation: Violation | None) -> str | None:
    return violation.invariant if violation else None


@given(st.permutations(list(range(1, 40))), st.integers(0, 1000))
def test_any_order_of_arrival_is_sound(order: list[int], baseline: int) -> None:
    counter = Counter(baseline)
    for number in order:
        assert counter.note(baseline + number, marker(number)) is None
    assert counter.highest == baseline + 39
    assert counter.gap(baseline + 39, 0) is None


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(0, 100))
def test_every_missing_number_is_reported_once(seen: set[int], baseline: int) -> None:
    counter = Counter(baseline)
    for number in sorted(seen):
        counter.note(baseline + number, marker(number))
    missing = 60 - len(seen)
    violation = counter.gap(baseline + 60, 0)
    assert (violation is not None) == (missing > 0)
    if violation is not None:
        assert violation.invariant == "sequence"
        assert violation.evidence.startswith(f"{missing} of the numbers up to {baseline + 60} ")
    assert counter.gap(baseline + 60, 0) is None


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_number_may_be_carried_by_a_dump_that_was_not_looked_at_yet(given_: int, unseen: int, unreadable: int) -> None:
    counter = Counter()
    for _ in range(unreadable):
        counter.excuse()
    violation = counter.gap(given_, unseen)
    gone = given_ - unseen - unreadable
    assert named(violation) == ("sequence" if gone > 0 else None)
    if violation is not None:
        assert violation.evidence.startswith(f"{gone} of the numbers")


def test_a_gap_that_is_reported_while_others_are_unseen_is_not_reported_again() -> None:
    counter = Counter()
    assert counter.note(3, marker(3)) is None
    assert named(counter.gap(3, 1)) == "sequence"
    assert counter.gap(3, 1) is None
    assert counter.note(1, marker(1)) is None
    assert counter.gap(3, 0) is None


def test_a_number_that_goes_back_is_told() -> None:
    counter = Counter()
    assert counter.note(5, marker(0)) is None
    violation = counter.note(2, marker(1), floor=5)
    assert violation == Violation(
        "sequence", "the counter went back: hsx1-0a1b2c3d-1-1-7 has number 2; expected more than 5, reached before"
    )


def test_a_number_that_is_given_twice_names_both_dumps() -> None:
    counter = Counter()
    assert counter.note(1, marker(0)) is None
    violation = counter.note(1, marker(1))
    assert violation == Violation("sequence", f"number 1 was given twice: to {marker(1)} and to {marker(0)}")
    assert counter.gap(2, 0) is None, "the number that the second one should have had is no gap besides"


def test_two_dumps_of_one_marker_are_told_and_the_same_dump_seen_twice_is_fine() -> None:
    counter = Counter()
    assert counter.note(1, marker(0)) is None
    assert counter.note(1, marker(0)) is None
    violation = counter.note(2, marker(0))
    assert violation == Violation("expected", f"{marker(0)} has two dumps, numbers 1 and 2; expected one")
    assert counter.gap(2, 0) is None


def test_what_was_given_before_hsx_came_is_not_missing_and_not_known() -> None:
    counter = Counter(baseline=10)
    assert counter.gap(10, 0) is None
    assert not counter.knows(marker(0))
    assert counter.note(4, marker(0)) is None
    assert named(counter.note(4, marker(1))) == "sequence"
    assert named(counter.note(9, marker(2), floor=10)) == "sequence"


def test_memory_is_bounded_whatever_is_missing() -> None:
    counter = Counter()
    for number in range(2, REMEMBERED + 100):  # number 1 never comes
        assert counter.note(number, marker(number)) is None
    assert not counter.knows(marker(2))
    assert counter.knows(marker(REMEMBERED + 99))
    assert named(counter.note(5, marker(0))) == "sequence"
