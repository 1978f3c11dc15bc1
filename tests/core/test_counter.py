"""The counter accounts for every number: what goes back, repeats or is missing is told apart, and nothing sound is accused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from hsx.core.counter import REMEMBERED, Counter
from hsx.core.invariants import Violation
from hsx.core.marker import Marker

if TYPE_CHECKING:
    from random import Random


def marker(index: int) -> Marker:
    return Marker("0a1b2c3d", index, 1, 7)


def named(violation: Violation | None) -> str | None:
    return violation.invariant if violation else None


@given(st.permutations(list(range(1, 40))), st.integers(0, 1000))
def test_any_order_of_arrival_is_sound(order: list[int], baseline: int) -> None:
    counter = Counter({0: baseline})
    for number in order:
        assert counter.note(0, baseline + number, marker(number)) is None
    assert counter.reached == {0: baseline + 39}
    assert counter.gap({0: baseline + 39}, 0) is None


@given(st.sets(st.integers(1, 60), min_size=1), st.integers(0, 100))
def test_every_missing_number_is_reported_once(seen: set[int], baseline: int) -> None:
    counter = Counter({0: baseline})
    for number in sorted(seen):
        counter.note(0, baseline + number, marker(number))
    missing = 60 - len(seen)
    violation = counter.gap({0: baseline + 60}, 0)
    assert (violation is not None) == (missing > 0)
    if violation is not None:
        assert violation.invariant == "sequence"
        assert violation.evidence.startswith(f"{missing} of the numbers up to {baseline + 60} ")
    assert counter.gap({0: baseline + 60}, 0) is None


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 30))
def test_a_number_may_be_carried_by_a_dump_that_was_not_looked_at_yet(given_: int, unseen: int, unreadable: int) -> None:
    counter = Counter()
    for _ in range(unreadable):
        counter.excuse()
    violation = counter.gap({0: given_}, unseen)
    gone = given_ - unseen - unreadable
    assert named(violation) == ("sequence" if gone > 0 else None)
    if violation is not None:
        assert violation.evidence.startswith(f"{gone} of the numbers")


def test_a_gap_that_is_reported_while_others_are_unseen_is_not_reported_again() -> None:
    counter = Counter()
    assert counter.note(0, 3, marker(3)) is None
    assert named(counter.gap({0: 3}, 1)) == "sequence"
    assert counter.gap({0: 3}, 1) is None
    assert counter.note(0, 1, marker(1)) is None
    assert counter.gap({0: 3}, 0) is None


def test_a_number_that_goes_back_is_told() -> None:
    counter = Counter()
    assert counter.note(0, 5, marker(0)) is None
    violation = counter.note(0, 2, marker(1), floor={0: 5})
    assert violation == Violation(
        "sequence", "the counter went back: hsx1-0a1b2c3d-1-1-7 has number 2; expected more than 5, reached before"
    )


def test_a_number_that_is_given_twice_names_both_dumps() -> None:
    counter = Counter()
    assert counter.note(0, 1, marker(0)) is None
    violation = counter.note(0, 1, marker(1))
    assert violation == Violation("sequence", f"number 1 was given twice: to {marker(1)} and to {marker(0)}")


def test_two_dumps_of_one_marker_are_told_and_the_same_dump_seen_twice_is_fine() -> None:
    counter = Counter()
    assert counter.note(0, 1, marker(0)) is None
    assert counter.note(0, 1, marker(0)) is None
    violation = counter.note(0, 2, marker(0))
    assert violation == Violation("expected", f"{marker(0)} has two dumps, numbers 1 and 2; expected one")
    assert counter.gap({0: 2}, 0) is None


def test_what_was_given_before_hsx_came_is_not_missing_and_not_known() -> None:
    counter = Counter({0: 10})
    assert counter.gap({0: 10}, 0) is None
    assert not counter.knows(marker(0))
    assert counter.note(0, 4, marker(0)) is None
    assert named(counter.note(0, 4, marker(1))) == "sequence"
    assert named(counter.note(0, 9, marker(2), floor={0: 10})) == "sequence"


def test_memory_is_bounded_whatever_is_missing() -> None:
    counter = Counter()
    for number in range(2, REMEMBERED + 100):  # number 1 never comes
        assert counter.note(0, number, marker(number)) is None
    assert not counter.knows(marker(2))
    assert counter.knows(marker(REMEMBERED + 99))
    assert named(counter.note(0, 5, marker(0))) == "sequence"


RANKS = st.integers(1, 4)


@given(RANKS, st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60), st.randoms(use_true_random=False))
def test_each_rank_counts_by_itself(ranks: int, drawn: list[tuple[int, int]], random: Random) -> None:
    """Every rank gives the same numbers, in whatever order they arrive; each missing one is told once, whoever gave it."""
    given_ = dict.fromkeys(range(ranks), 0)
    seen: list[tuple[int, int]] = []
    lost = 0
    for rank, luck in drawn:
        if rank < ranks:
            given_[rank] += 1
            lost += luck == 0
            if luck:
                seen.append((rank, given_[rank]))
    random.shuffle(seen)
    counter = Counter(dict.fromkeys(range(ranks), 0))
    for index, (rank, number) in enumerate(seen):
        floor = counter.reached
        assert counter.note(rank, number, marker(index), {**floor, rank: 0}) is None
        assert counter.reached == {**floor, rank: max(floor[rank], number)}
    violation = counter.gap(given_, 0)
    assert named(violation) == ("sequence" if lost else None)
    if violation is not None:
        assert violation.evidence.startswith(f"{lost} of the numbers up to ")
    assert counter.gap(given_, 0) is None


def test_a_dump_that_was_not_looked_at_explains_a_gap_of_any_rank() -> None:
    counter = Counter({0: 0, 1: 0})
    assert counter.gap({0: 1, 1: 1}, 2) is None
    violation = counter.gap({0: 2, 1: 1}, 2)
    assert violation is not None
    assert violation.evidence == (
        "1 of the numbers up to 2 of rank 0 and up to 1 of rank 1 were given, and their dumps were never seen"
    )


def test_a_floor_is_its_ranks_own() -> None:
    counter = Counter({0: 0, 1: 0})
    assert counter.note(0, 9, marker(0)) is None
    assert counter.note(1, 1, marker(1), counter.reached) is None
    violation = counter.note(1, 1, marker(2), counter.reached)
    assert violation == Violation(
        "sequence", f"the counter went back: {marker(2)} has number 1 of rank 1; expected more than 1, reached before"
    )


def test_one_marker_has_one_dump_whatever_its_rank() -> None:
    counter = Counter({0: 0, 1: 0})
    assert counter.note(0, 1, marker(0)) is None
    violation = counter.note(1, 1, marker(0))
    assert violation == Violation("expected", f"{marker(0)} has two dumps, numbers 1 of rank 0 and 1 of rank 1; expected one")


def test_a_rank_that_the_server_does_not_have_is_told() -> None:
    counter = Counter({0: 0, 1: 0})
    violation = counter.note(2, 1, marker(0))
    assert violation == Violation("sequence", f"{marker(0)} has a dump of rank 2; expected one of ranks [0, 1]")
    assert not counter.knows(marker(0))
