"""Policy, lifecycle, restart, placement, progress, admission, pairing and fingerprint: each rule by its property."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.admission import InFlight, Limits, blocked_by
from hsx.core.fingerprint import changes
from hsx.core.lifecycle import TRANSITIONS, Event, IllegalTransitionError, State, step
from hsx.core.marker import Marker
from hsx.core.pairing import Outstanding, Standing
from hsx.core.placement import RootSpace, Shares
from hsx.core.policy import Action, ViolationWindow, WindowLimit, on_failure
from hsx.core.progress import ProgressLimits, Snapshot, advancing
from hsx.core.restart import RestartLimits, RestartPolicy
from hsx.core.spec import FINAL_STATES, CaptureSpec, final_state

# --- policy


@given(st.integers(0, 5))
def test_a_sample_has_one_attempt_more_than_retries(retries: int) -> None:
    actions = [on_failure("finite", failures, retries) for failures in range(1, retries + 2)]
    assert actions == [Action.RETRY] * retries + [Action.QUARANTINE]


def test_a_refused_prompt_is_not_tried_again() -> None:
    assert on_failure("request_refused", 1, 5) is Action.QUARANTINE


def test_violations_count_only_within_the_window() -> None:
    window = ViolationWindow(WindowLimit(3, 10.0))
    assert [window.add(t) for t in (0.0, 1.0, 11.5, 12.0, 13.0)] == [False, False, False, False, True]
    window.clear()
    assert not window.add(13.1)


# --- lifecycle


@given(st.sampled_from(State), st.sampled_from(Event))
def test_the_table_decides_and_a_missing_entry_is_an_error(state: State, event: Event) -> None:
    if (state, event) in TRANSITIONS:
        assert step(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransitionError, match=event.value):
            step(state, event)


def test_every_state_can_be_left_for_a_stop() -> None:
    for state in set(State) - {State.STOPPED, State.DRAINING}:
        assert step(step(state, Event.DRAIN), Event.STOPPED) is State.STOPPED


# --- restart


@given(st.lists(st.floats(0, 50), min_size=1, max_size=30), st.floats(0, 0.999))
def test_never_more_restarts_in_a_window_than_the_budget(gaps: list[float], uniform: float) -> None:
    policy = RestartPolicy(RestartLimits(1.0, 2.0, 8.0, 0.2, budget=3, window_s=100.0))
    granted: list[float] = []
    now = 0.0
    for gap in gaps:
        now += gap
        recent = sum(t > now - 100.0 for t in granted)
        assert policy.left(now) == 3 - recent
        delay = policy.next_delay(now, uniform)
        if delay is not None:
            assert 0.8 <= delay <= 9.6
            granted.append(now)
        assert (delay is None) == (recent == 3)


def test_delays_grow_and_are_capped() -> None:
    policy = RestartPolicy(RestartLimits(1.0, 2.0, 5.0, 0.0, budget=9, window_s=1000.0))
    assert [policy.next_delay(float(t), 0.5) for t in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


# --- placement

spaces = st.builds(
    RootSpace,
    name=st.uuids().map(str),
    free=st.integers(0, 10**13),
    reserve=st.integers(0, 10**12),
    pending=st.integers(0, 10**12),
    usable=st.booleans(),
)


@given(st.lists(spaces, max_size=6), st.integers(1, 10**12))
def test_placement_never_overruns_a_reserve_and_takes_the_roomiest_first(roots: list[RootSpace], size: int) -> None:
    name = Shares().choose(roots, size)
    rooms = {root.name: root.room for root in roots}
    if name is None:
        assert all(room < size for room in rooms.values())
    else:
        root = next(r for r in roots if r.name == name)
        assert root.usable
        assert root.free - root.pending - size >= root.reserve
        assert rooms[name] == max(rooms.values())


# --- progress

LIMITS = ProgressLimits(grace_s=60.0, slowest_tokens_per_s=50.0)


@given(st.floats(0, 10**6), st.integers(0, 64), st.integers(0, 10**6))
def test_silence_is_judged_by_what_is_in_flight(silence: float, requests: int, tokens: int) -> None:
    violation = advancing(LIMITS, Snapshot(silence, 0.0, requests, tokens))
    assert (violation is not None) == (requests > 0 and silence > 60.0 + tokens / 50.0)


# --- admission


@given(st.lists(st.tuples(st.integers(1, 4000), st.booleans()), max_size=60))
def test_budgets_are_never_overrun_and_no_prompt_is_shut_out(steps: list[tuple[int, bool]]) -> None:
    limits = Limits(requests=4, tokens=2000, staging_bytes=40_000, samples=10)
    now = InFlight()
    inside: list[int] = []
    for tokens, leave in steps:
        if leave and inside:
            gone = inside.pop()
            now.requests, now.tokens = now.requests - 1, now.tokens - gone
            now.staging_bytes, now.samples = now.staging_bytes - gone * 10, now.samples - 1
        reason = blocked_by(limits, now, tokens, tokens * 10)
        if not inside:
            assert reason is None  # alone, whatever its length
        if reason is None:
            inside.append(tokens)
            now.requests, now.tokens = now.requests + 1, now.tokens + tokens
            now.staging_bytes, now.samples = now.staging_bytes + tokens * 10, now.samples + 1
        assert now.requests <= 4
        assert now.tokens <= 2000 or len(inside) == 1
        assert now.staging_bytes <= 40_000


# --- pairing


def test_standing_of_a_dump_is_told_by_its_name_alone() -> None:
    outstanding = Outstanding("0a1b2c3d")
    marker = Marker("0a1b2c3d", 1, 1, 10)
    outstanding.add(marker)
    assert outstanding.standing(str(marker)) == (Standing.OUTSTANDING, marker)
    older = Marker("0a1b2c3d", 1, 0, 10)
    assert outstanding.standing(str(older)) == (Standing.SETTLED, older)
    other = Marker("ffffffff", 1, 1, 10)
    assert outstanding.standing(str(other)) == (Standing.FOREIGN, other)
    assert outstanding.standing("HEALTH_CHECK_1") == (Standing.FOREIGN, None)
    outstanding.settle(marker)
    outstanding.settle(marker)
    assert outstanding.standing(str(marker)) == (Standing.SETTLED, marker)
    assert len(outstanding) == 0


def test_a_marker_is_opened_once_and_only_in_its_run() -> None:
    outstanding = Outstanding("0a1b2c3d")
    outstanding.add(Marker("0a1b2c3d", 1, 1, 10))
    with pytest.raises(ValueError, match="cannot be opened"):
        outstanding.add(Marker("0a1b2c3d", 1, 1, 10))
    with pytest.raises(ValueError, match="cannot be opened"):
        outstanding.add(Marker("ffffffff", 1, 1, 10))


# --- fingerprint and spec

fields = st.dictionaries(st.sampled_from("abcdef"), st.text(max_size=3))


@given(fields, fields)
def test_changes_name_exactly_the_fields_that_differ(a: dict[str, str], b: dict[str, str]) -> None:
    found = changes(a, b)
    assert {c.field for c in found} == {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)}
    assert all(c.field in str(c) for c in found)


@pytest.mark.parametrize(
    ("layers", "words"),
    [((), "empty"), ((2, 2), "rising"), ((-1, 2), "0 to 7"), ((8,), "final state"), ((3, 9), "0 to 7")],
)
def test_a_spec_that_the_model_cannot_give_is_explained(layers: tuple[int, ...], words: str) -> None:
    assert words in " ".join(CaptureSpec(layers, "post_norm").problems(8))


def test_a_final_state_is_one_of_two_names() -> None:
    assert tuple(final_state(name) for name in FINAL_STATES) == ("post_norm", "pre_norm")
    with pytest.raises(ValueError, match="'norm'; expected one of post_norm, pre_norm"):
        final_state("norm")


def test_a_fit_spec_has_no_problems() -> None:
    spec = CaptureSpec((1, 4, 7), "pre_norm")
    assert spec.problems(8) == []
    assert spec.names == ("h_1", "h_4", "h_7", "pre_norm")
    assert CaptureSpec((0, 7), "post_norm").problems(8) == []
