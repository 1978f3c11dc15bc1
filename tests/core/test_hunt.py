"""The hunt finds every sample that kills the server, accuses no other, and ends."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from hsx.core.hunt import Hunt


def work_off(poison: set[int], samples: int, concurrency: int) -> tuple[set[int], int, int]:
    """Works off samples 0 to n in rounds of `concurrency`; a round with poison in it is a death.

    Returns the convicted, the deaths, and the deaths that did not narrow the suspects.
    """
    hunt, convicted, done, deaths, wide = Hunt(), set[int](), set[int](), 0, 0
    while len(done) + len(convicted) < samples:
        batch = [i for i in range(samples) if i not in done and i not in convicted and hunt.admits(i)][:concurrency]
        assert batch, "nobody is let in, and the job is not done"
        if poison & set(batch):
            deaths += 1
            found, narrowed = hunt.died(batch)
            wide += not narrowed
            convicted |= {found} if found is not None else set()
            continue
        for index in batch:
            hunt.clear(index)
        done |= set(batch)
    assert hunt.suspects == ()
    return convicted, deaths, wide


@given(st.sets(st.integers(0, 39), max_size=4), st.integers(1, 16))
def test_exactly_the_poison_is_convicted(poison: set[int], concurrency: int) -> None:
    convicted, deaths, _ = work_off(poison, 40, concurrency)
    assert convicted == poison
    assert (deaths == 0) == (not poison)


@given(st.integers(0, 63), st.integers(1, 64))
def test_one_poison_sample_costs_one_death_of_the_budget_and_a_logarithm_of_others(poison: int, concurrency: int) -> None:
    convicted, deaths, wide = work_off({poison}, 64, concurrency)
    assert convicted == {poison}
    assert wide == 1
    assert 3 <= deaths <= math.ceil(math.log2(concurrency)) + 3


def test_two_deaths_convict_nobody_even_alone() -> None:
    hunt = Hunt()
    assert hunt.died([7]) == (None, False)
    assert hunt.died([7]) == (None, True)
    assert list(hunt.suspects) == [7]
    assert [hunt.admits(7), hunt.admits(8)] == [True, False]
    assert hunt.died([7]) == (7, True)
    assert not hunt.suspects
    assert [hunt.admits(7), hunt.admits(8)] == [True, True]


def test_half_of_the_suspects_wait_until_the_others_are_cleared() -> None:
    hunt = Hunt()
    hunt.died([1, 2, 3, 4])
    assert sorted(hunt.trial) == [1, 2]
    assert [hunt.admits(3), hunt.admits(99)] == [False, False]
    assert not hunt.clear(1)
    assert hunt.clear(2)
    assert sorted(hunt.trial) == [3]
    assert hunt.clear(3)
    assert sorted(hunt.trial) == [4]
    assert hunt.clear(4)
    assert not hunt.suspects
    assert hunt.admits(99)


def test_a_death_outside_a_trial_has_suspects_of_its_own() -> None:
    hunt = Hunt()
    hunt.died([1, 2])
    assert hunt.died([5, 6]) == (None, False)
    assert hunt.suspects == (5, 6)


def test_a_death_with_nobody_at_the_server_accuses_nobody() -> None:
    hunt = Hunt([3, 4])
    assert hunt.died([]) == (None, False)
    assert hunt.suspects == (3, 4)
