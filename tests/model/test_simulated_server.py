"""The simulated server writes the dumps that a real one would, breaks as planned, and outlives those who ask it."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.dump import ERROR_SUFFIX, SUFFIX
from hsx.core.epoch import STATE_NAME, record_from_json, report_from_json, state_from_json
from hsx.core.invariants import Answer, Evidence, judge_answer, judge_dump
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec, ModelShape
from hsx.dumps.measure import measure
from hsx.dumps.reader import MappedDump
from hsx.errors import EngineError, SampleError
from hsx.testing.simulated_faults import FAULTS, Planned
from hsx.testing.simulated_server import SimulatedServer
from hsx.testing.simulated_states import simulated_states

if TYPE_CHECKING:
    from pathlib import Path

RUN = "0a1b2c3d"
SPEC = CaptureSpec((1, 3), "post_norm")
SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=500, context_length=1024)
prompts = st.lists(st.integers(0, 499), min_size=1, max_size=40)


def server_in(folder: Path, seed: int = 0) -> SimulatedServer:
    return SimulatedServer(folder, SPEC, SHAPE, 30000, seed)


def ids_of(index: int, tokens: int = 20) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(index).integers(0, 500, tokens, dtype=np.int32)


def send(server: SimulatedServer, index: int, attempt: int = 1) -> Marker:
    marker = Marker(RUN, index, attempt, 20)
    server.submit(marker, ids_of(index))
    return marker


def verdict(server: SimulatedServer, marker: Marker) -> str | None:
    """The name of the invariant that the dump violates, or the kind of the error that its reading raises."""
    assert server.record is not None
    try:
        dump = MappedDump(server.folder / f"{marker}{SUFFIX}")
    except SampleError as error:
        return error.kind
    content = measure(dump.states, dump.input_ids, ids_of(marker.index))
    violation = judge_dump(Evidence(marker, server.record.epoch, SPEC, SHAPE.hidden_size, dump.header, content))
    dump.close()
    return violation.invariant if violation else None


# --- states


@given(prompts, prompts, prompts)
def test_states_depend_on_the_ids_so_far_and_on_nothing_else(shared: list[int], one: list[int], other: list[int]) -> None:
    a, b = simulated_states([*shared, *one], SPEC, 8), simulated_states([*shared, *other], SPEC, 8)
    assert a.shape == (len(shared) + len(one), 3, 8)
    assert np.array_equal(a[: len(shared)], b[: len(shared)])
    parting = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
    if parting is not None:
        assert (a[len(shared) + parting] != b[len(shared) + parting]).any(axis=-1).all()


@given(prompts)
def test_states_are_what_the_content_invariants_accept(ids: list[int]) -> None:
    array = np.array(ids, np.int32)
    content = measure(simulated_states(ids, SPEC, 8), array, array)
    assert (content.nonfinite, content.zero_rows, content.equal_states, content.constant_states) == (0, 0, (), ())


# --- the server


def test_a_life_is_recorded_and_its_dumps_are_counted(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    record = server.boot()
    assert record_from_json((server.folder / "server.json").read_text()) == record
    assert report_from_json((server.folder / "capture.json").read_text()).spec == SPEC
    sent = [send(server, index) for index in range(9)]
    server.advance(60.0)
    assert sorted(m.index for m, _ in server.outcomes) == list(range(9))
    assert [m.index for m, _ in server.outcomes] != list(range(9)), "prompts end in the order in which they came"
    for marker, outcome in server.outcomes:
        assert isinstance(outcome, Answer)
        assert judge_answer(marker, outcome) is None
    assert [verdict(server, marker) for marker in sent] == [None] * 9
    state = state_from_json((server.folder / STATE_NAME).read_text())
    assert (state.sequence, state.published, state.failed) == (9, 9, 0)


def test_a_dump_is_published_before_its_answer(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    server.boot()
    marker = send(server, 0)
    while not server.outcomes:
        due = server.next_due()
        assert due is not None
        server.advance(due)
    assert (server.folder / f"{marker}{SUFFIX}").exists()


SOUND = {"slow", "late", "gap", "twice", "reset", "reset_after", "cached", "miscounted"}
NO_DUMP = {"refused", "failed", "reset_before", "lost", "never", "no_space", "die", "hang", "full"}


@pytest.mark.parametrize("kind", sorted(set(FAULTS) - NO_DUMP - SOUND - {"swapped"}))
def test_a_spoiled_dump_is_spoiled_as_its_row_says(tmp_path: Path, kind: str) -> None:
    server = server_in(tmp_path)
    server.boot()
    server.plan.faults.append(Planned(kind, 3))
    spoiled, sound, again = send(server, 3), send(server, 4), send(server, 3, attempt=2)
    server.advance(60.0)
    assert [verdict(server, spoiled)] == list(FAULTS[kind])
    assert (verdict(server, sound), verdict(server, again)) == (None, None)
    assert server.strikes == [(kind, 3)]


@pytest.mark.parametrize("kind", sorted(SOUND))
def test_a_dump_may_be_sound_and_the_rest_odd(tmp_path: Path, kind: str) -> None:
    server = server_in(tmp_path)
    server.boot()
    first = send(server, 1)
    server.advance(60.0)
    server.plan.faults.append(Planned(kind, 3, value=300.0))
    marker = send(server, 3)
    server.advance(61.0)
    assert (server.folder / f"{marker}{SUFFIX}").exists() == (kind not in ("late", "slow"))
    server.advance(1000.0)
    assert (verdict(server, first), verdict(server, marker)) == (None, None)
    dump = MappedDump(server.folder / f"{marker}{SUFFIX}")
    assert dump.header.sequence == {"gap": 3, "twice": 3, "reset": 1}.get(kind, 2)
    dump.close()
    _, outcome = server.outcomes[-1]
    if isinstance(outcome, Answer):
        violation = judge_answer(marker, outcome)
        assert (violation.invariant if violation else None) == {"cached": "uncached", "miscounted": "prompt_tokens"}.get(kind)
    else:
        assert (kind, outcome.kind) == ("reset_after", "request_failed")


@pytest.mark.parametrize("kind", sorted(NO_DUMP - {"full", "hang", "die"}))
def test_there_may_be_no_dump(tmp_path: Path, kind: str) -> None:
    server = server_in(tmp_path)
    server.boot()
    server.plan.faults.append(Planned(kind, 3))
    marker = send(server, 3)
    server.advance(60.0)
    assert not (server.folder / f"{marker}{SUFFIX}").exists()
    assert (server.folder / f"{marker}{ERROR_SUFFIX}").exists() == (kind == "no_space")
    ((_, outcome),) = server.outcomes
    assert (outcome.kind if isinstance(outcome, SampleError) else None) == next(iter(FAULTS[kind] - {"published"}), None)


def test_rows_are_swapped_with_a_prompt_in_the_same_batch(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    server.boot()
    server.plan.faults.append(Planned("swapped", 3))
    other, struck = send(server, 5), send(server, 3)
    server.advance(60.0)
    swapped = ("swapped", 5) in server.strikes
    assert verdict(server, other) == ("tokens_equal" if swapped else None)
    assert verdict(server, struck) == ("tokens_equal" if swapped else None)


def test_a_death_takes_all_that_is_in_flight_and_the_next_life_is_another(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    first = server.boot()
    server.plan.poison.add(3)
    for index in range(6):
        send(server, index)
    server.advance(60.0)
    assert not server.alive
    assert "killed" in server.death
    lost = [m.index for m, outcome in server.outcomes if isinstance(outcome, SampleError)]
    assert 3 in lost
    with pytest.raises(EngineError) as error:
        send(server, 7)
    assert error.value.kind == "server_gone"
    server.plan.boot_deaths = 1
    with pytest.raises(EngineError) as error:
        server.boot()
    assert error.value.kind == "server_start_failed"
    assert server.boot().epoch != first.epoch


def test_a_server_that_hangs_says_nothing_any_more_and_lives(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    server.boot()
    server.plan.faults += [Planned("hang", 3), Planned("full", 4)]
    with pytest.raises(EngineError) as error:
        send(server, 4)
    assert error.value.kind == "server_full"
    send(server, 3)
    server.advance(1000.0)
    send(server, 5)
    server.advance(2000.0)
    assert (server.alive, server.outcomes, server.next_due()) == (True, [], None)


def test_a_corrupt_server_breaks_no_invariant_of_a_sample(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    epoch = server.boot().epoch
    server.plan.corrupt_after = 1
    sound = send(server, 0)
    server.advance(60.0)
    shifted = send(server, 1)
    server.advance(120.0)
    assert server.corrupt == [epoch]
    assert (verdict(server, sound), verdict(server, shifted)) == (None, None)
    truth = simulated_states(ids_of(1), SPEC, SHAPE.hidden_size)
    dump = MappedDump(server.folder / f"{shifted}{SUFFIX}")
    assert np.array_equal(np.array(dump.states), np.roll(truth, 1, axis=0))
    dump.close()
    server.kill("was stopped")
    server.boot()
    again = send(server, 1, attempt=2)
    server.advance(180.0)
    dump = MappedDump(server.folder / f"{again}{SUFFIX}")
    assert np.array_equal(np.array(dump.states), truth)
    dump.close()


def test_a_server_outlives_its_clients_in_the_middle_of_prompts(tmp_path: Path) -> None:
    server = server_in(tmp_path)
    server.boot()
    sent = [send(server, index) for index in range(12)]
    server.advance(0.06)
    copy: SimulatedServer = pickle.loads(pickle.dumps(server))
    copy.hang_up()
    copy.advance(60.0)
    assert copy.outcomes == []
    there = [marker for marker in sent if (copy.folder / f"{marker}{SUFFIX}").exists()]
    assert 0 < len(there) < 12, "some prompts are dropped with their clients, others are not"
    assert {verdict(copy, marker) for marker in there} == {None}
    later = send(copy, 20)
    copy.advance(120.0)
    dump = MappedDump(copy.folder / f"{later}{SUFFIX}")
    assert dump.header.sequence == state_from_json((copy.folder / STATE_NAME).read_text()).sequence
    dump.close()


def test_an_unknown_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="kind is 'boredom'; expected one of refused"):
        Planned("boredom", 1)
