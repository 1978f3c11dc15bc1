"""Pairing, lifecycle, restart and placement over whole histories: what must hold after any sequence of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hsx.core.lifecycle import TRANSITIONS, Event, IllegalTransitionError, State, step
from hsx.core.marker import Marker, parse
from hsx.core.pairing import Outstanding, Standing
from hsx.core.placement import RootSpace, Shares, Speed
from hsx.core.restart import RestartLimits, RestartPolicy

# --- pairing

RUN, OTHER = "0a1b2c3d", "ffffffff"
markers = st.builds(
    Marker,
    run=st.sampled_from([RUN, RUN, RUN, OTHER]),
    index=st.integers(0, 3),
    attempt=st.integers(1, 2),
    tokens=st.integers(1, 2),
    canary=st.booleans(),
)


class Pairing(RuleBasedStateMachine):
    """`Outstanding` against a plain list of what is open."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = Outstanding(RUN)
        self.open: list[Marker] = []

    @rule(marker=markers)
    def send(self, marker: Marker) -> None:
        """A marker is opened once, and in its own run; a refusal changes nothing."""
        if marker.run != RUN or marker in self.open:
            with pytest.raises(ValueError, match="cannot be opened"):
                self.outstanding.add(marker)
        else:
            self.outstanding.add(marker)
            self.open.append(marker)

    @rule(marker=markers)
    def settle(self, marker: Marker) -> None:
        """Settling what is not open is harmless."""
        self.outstanding.settle(marker)
        if marker in self.open:
            self.open.remove(marker)

    @rule(marker=markers)
    def dump(self, marker: Marker) -> None:
        """A dump is an attempt's own if and only if it carries that attempt's marker, to the letter."""
        standing, found = self.outstanding.standing(str(marker))
        assert found == marker
        expected = Standing.OUTSTANDING if marker in self.open else Standing.SETTLED
        assert standing is (expected if marker.run == RUN else Standing.FOREIGN)

    @rule(name=st.text(max_size=20) | markers.map(lambda m: f"{m} ") | markers.map(lambda m: str(m).upper()))
    def anything(self, name: str) -> None:
        """What is no marker is foreign, however much it looks like one."""
        if parse(name) is None:
            assert self.outstanding.standing(name) == (Standing.FOREIGN, None)

    @invariant()
    def counts(self) -> None:
        """As many are open as were opened and not settled."""
        assert len(self.outstanding) == len(self.open)


TestPairing = Pairing.TestCase


@given(markers, markers)
def test_two_attempts_never_share_a_name(one: Marker, other: Marker) -> None:
    assert (str(one) == str(other)) == (one == other)
    assert parse(str(one)) == one


# --- lifecycle


@given(st.lists(st.sampled_from(Event), max_size=60))
def test_whatever_happens_the_engine_can_be_drained_to_a_stop(events: list[Event]) -> None:
    state = State.STOPPED
    for event in events:
        before = state
        if (before, event) in TRANSITIONS:
            state = step(before, event)
        else:
            with pytest.raises(IllegalTransitionError, match=before.value):
                step(before, event)
        # Samples are sent in READY only, and the gate is the only way there.
        assert state is not State.READY or before is State.READY or event is Event.GATE_PASSED
        # A void epoch is left: no event but a new start through the gate leads back.
        assert event is not Event.VOIDED or before is not State.READY or state is State.BACKOFF
        # What has failed for good starts nothing again by itself.
        assert before is not State.FAILED or state in (State.FAILED, State.DRAINING)
    for event in (Event.DRAIN, Event.STOPPED):
        if (state, event) in TRANSITIONS:
            state = step(state, event)
    assert state is State.STOPPED


def test_every_state_is_reached_and_a_drain_ends_in_a_stop_alone() -> None:
    reached, found = {State.STOPPED}, set[State]()
    while reached != found:
        found = set(reached)
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in found}
    assert reached == set(State)
    assert {after for (before, _), after in TRANSITIONS.items() if before is State.DRAINING} == {State.DRAINING, State.STOPPED}


# --- restart

steps = st.lists(st.tuples(st.floats(0, 40), st.booleans(), st.floats(0, 0.999)), min_size=1, max_size=40)


@given(steps, st.integers(0, 4))
def test_the_budget_counts_what_counts_and_delays_stay_in_bounds(history: list[tuple[float, bool, float]], budget: int) -> None:
    limits = RestartLimits(first_s=1.0, factor=2.0, longest_s=8.0, jitter=0.25, budget=budget, window_s=100.0)
    policy = RestartPolicy(limits)
    now, granted = 0.0, list[float]()
    for gap, counted, uniform in history:
        now += gap
        recent = sum(t > now - limits.window_s for t in granted)
        delay = policy.next_delay(now, uniform, counted=counted)
        if counted:
            assert (delay is None) == (recent >= budget)
        else:
            assert delay is not None
        if delay is not None:
            assert 0.75 <= delay <= 10.0
            if counted:
                granted.append(now)
        assert policy.used <= budget


# --- placement

shards = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(0, 2)), max_size=80)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), min_size=1, max_size=4), shards)
def test_no_reserve_is_ever_touched_however_shards_are_written(
    disks: list[tuple[int, int]], writes: list[tuple[int, bool, int]]
) -> None:
    """Shards are promised, and written later; a disk may break meanwhile."""
    roots = {str(i): RootSpace(str(i), free, reserve, 0) for i, (free, reserve) in enumerate(disks)}
    promised, taken = list[tuple[str, int]](), Counter[str]()
    shares = Shares()
    for size, finish, broken in writes:
        if finish and promised:
            name, done = promised.pop(0)
            roots[name] = replace(roots[name], free=roots[name].free - done, pending=roots[name].pending - done)
        if broken == 2 and len(roots) > 1 and str(broken) in roots:
            roots[str(broken)] = replace(roots[str(broken)], usable=False)
        chosen = shares.choose(roots.values(), size)
        if chosen is None:
            assert all(not root.usable or root.free - root.pending - root.reserve < size for root in roots.values())
            continue
        assert roots[chosen].usable
        roots[chosen] = replace(roots[chosen], pending=roots[chosen].pending + size)
        promised.append((chosen, size))
        taken[chosen] += size
    for name, size in taken.items():
        free, reserve = disks[int(name)]
        assert free - size >= reserve


@given(st.integers(2, 4), st.integers(1, 10), st.integers(10, 60))
def test_equal_disks_fill_evenly(count: int, size: int, writes: int) -> None:
    roots = {str(i): RootSpace(str(i), 10_000, 0, 0) for i in range(count)}
    shares = Shares()
    for _ in range(writes):
        name = shares.choose(roots.values(), size)
        assert name is not None
        roots[name] = replace(roots[name], free=roots[name].free - size)
    rooms = [root.room for root in roots.values()]
    assert max(rooms) - min(rooms) <= size


@given(
    st.lists(st.tuples(st.integers(10_000, 1_000_000), st.sampled_from([None, 1.0, 2.0, 5.0])), min_size=2, max_size=4),
    st.lists(st.integers(1, 40), min_size=50, max_size=150),
)
def test_each_root_gets_its_share_whatever_the_order_of_sizes(disks: list[tuple[int, float | None]], sizes: list[int]) -> None:
    """Room times speed; no root is ever ahead or behind by more than a few shards."""
    roots = [RootSpace(str(i), free, 0, 0, speed=speed) for i, (free, speed) in enumerate(disks)]
    fastest = max((speed for _, speed in disks if speed is not None), default=1.0)
    weights = {str(i): free * (speed or fastest) for i, (free, speed) in enumerate(disks)}
    whole = sum(weights.values())
    shares, taken = Shares(), Counter[str]()
    for number, size in enumerate(sizes, 1):
        chosen = shares.choose(roots, size)
        assert chosen is not None
        taken[chosen] += size
        total = sum(sizes[:number])
        for name, weight in weights.items():
            assert abs(taken[name] - total * weight / whole) <= len(disks) * max(sizes)


@given(st.lists(st.integers(60, 4000), min_size=2, max_size=4), st.lists(st.integers(1, 20), min_size=200, max_size=400))
def test_unequal_disks_run_full_together(disks: list[int], sizes: list[int]) -> None:
    """Whenever something still fits, no disk was filled while another was left empty: their filled parts are alike."""
    roots = {str(i): RootSpace(str(i), free, 0, 0) for i, free in enumerate(disks)}
    shares = Shares()
    for size in sizes:
        chosen = shares.choose(roots.values(), size)
        if chosen is None or min(root.room for root in roots.values()) < 40:
            break
        roots[chosen] = replace(roots[chosen], free=roots[chosen].free - size)
        # In bytes, a disk is off its share by a few shards at most, which is much of a small disk and little of a large one.
        used = {name: disks[int(name)] - root.free for name, root in roots.items()}
        filled = sum(used.values()) / sum(disks)
        assert all(abs(used[name] - filled * disks[int(name)]) <= 20 * len(disks) for name in roots)


@given(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 100)), max_size=30))
def test_a_speed_lies_between_the_slowest_and_the_fastest_that_was_seen(writes: list[tuple[int, float]]) -> None:
    speed = Speed()
    for nbytes, seconds in writes:
        speed.wrote(nbytes, seconds)
    rates = [nbytes / seconds for nbytes, seconds in writes if seconds > 0]
    if speed.bytes_per_s is None:
        assert not rates
    elif all(seconds > 0 for _, seconds in writes):
        assert min(rates) * 0.999 <= speed.bytes_per_s <= max(rates) * 1.001


def test_a_speed_forgets() -> None:
    speed = Speed()
    speed.wrote(1000, 100.0)
    for _ in range(100):
        speed.wrote(1000, 1.0)
    assert speed.bytes_per_s == pytest.approx(1000, rel=0.1)
