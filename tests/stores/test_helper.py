"""The second thread of a reader: that it works, whose error is raised, and that it never outlives the call."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hsx
from hsx.errors import RunError
from hsx.stores.helper import for_each, worth_while
from hsx.testing.stores import BuiltStore, build_store, random_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WAIT_S = 300.0


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """One sample of five inner chunks."""
    return build_store(tmp_path, [random_bits(np.random.default_rng(0), 300, 3, 64)], roots=["a"])


def test_two_threads_share_the_pieces() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)
    done: list[tuple[int, bool]] = []

    def task(piece: int, helping: bool) -> None:
        meeting.wait()
        done.append((piece, helping))

    for_each(range(4), task)
    assert sorted(piece for piece, _ in done) == [0, 1, 2, 3]
    assert sorted(helping for _, helping in done) == [False, False, True, True]


def test_the_first_failure_in_order_is_raised() -> None:
    """The second piece fails before the first one does."""
    failed = threading.Event()
    begun = []

    def task(piece: int, helping: bool) -> None:
        begun.append(piece)
        if piece == 0:
            assert failed.wait(WAIT_S)
        else:
            failed.set()
        raise ValueError(str(piece))

    with pytest.raises(ValueError, match="0"):
        for_each(range(9), task)
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_helper_is_waited_for_when_the_caller_fails(error: type[BaseException]) -> None:
    begun, done = threading.Event(), []

    def task(piece: int, helping: bool) -> None:
        if not helping:
            assert begun.wait(WAIT_S)
            raise error
        begun.set()
        threading.Event().wait(0.1)
        done.append(piece)

    with pytest.raises(error):
        for_each(range(9), task)
    assert len(done) == 1


def test_what_ends_the_helper_is_not_lost() -> None:
    meeting = threading.Barrier(2, timeout=WAIT_S)

    def task(piece: int, helping: bool) -> None:
        meeting.wait()
        if helping:
            raise SystemExit(7)

    with pytest.raises(SystemExit):
        for_each(range(2), task)


def test_an_interruption_while_waiting_comes_after_the_helper() -> None:
    begun, done = threading.Event(), []

    def task(piece: int, helping: bool) -> None:
        if not helping:
            assert begun.wait(WAIT_S)
            return
        begun.set()
        threading.Event().wait(0.1)  # the caller has nothing left, and waits
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.1)
        done.append(piece)

    with pytest.raises(KeyboardInterrupt):
        for_each(range(2), task)
    assert len(done) == 1


def test_help_that_comes_too_late_is_called_off() -> None:
    """The helper is somebody else's all the time."""
    busy, over = threading.Event(), threading.Event()

    def hold(_: int, helping: bool) -> None:
        (busy.set if helping else busy.wait)()
        assert over.wait(WAIT_S)

    other = threading.Thread(target=for_each, args=(range(2), hold))
    other.start()
    assert busy.wait(WAIT_S)
    done = []
    for_each(range(3), lambda piece, helping: done.append((piece, helping)))
    over.set()
    other.join()
    assert done == [(0, False), (1, False), (2, False)]


@pytest.mark.parametrize("helper", [False, True])
def test_damage_in_several_chunks_is_told_as_by_one_thread(built: BuiltStore, helper: bool) -> None:
    content = bytearray(built.shard(0).read_bytes())
    for chunk in (1, 2, 3):
        content[chunk * built.info.layout.block_bytes + 5] ^= 1
    built.shard(0).write_bytes(content)
    store = hsx.open(built.info.path, helper=helper)
    for _ in range(20):
        with pytest.raises(RunError, match=r"chunk 1 has crc32c [0-9a-f]{8}; expected [0-9a-f]{8}") as error:
            store.hidden_states_numpy(0)
        assert error.value.kind == "store_invalid"
    assert np.array_equal(store.hidden_states_numpy(0, 256, 300), built.states[0][256:])


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("check", [True, False])
def test_samples_are_the_same_with_help(tmp_path: Path, codec: str, check: bool) -> None:
    built = build_store(tmp_path, [random_bits(np.random.default_rng(0), 300, 3, 64)], roots=["a"], codec=codec)
    store = hsx.open(built.info.path, check=check, helper=True)
    for start, stop in ((0, 300), (0, 64), (63, 65), (1, 299), (128, 256), (5, 5)):
        assert np.array_equal(store.hidden_states_numpy(0, start, stop), built.states[0][start:stop])


def in_a_child(what: Callable[[], bool], method: str) -> int | None:
    """Exit code of a process that multiprocessing starts: 0 where `what` is true there."""
    child = multiprocessing.get_context(method).Process(target=_ask, args=(what,))  # type: ignore[attr-defined]
    child.start()
    child.join(WAIT_S)
    code: int | None = child.exitcode
    return code


def _ask(what: Callable[[], bool]) -> None:
    os._exit(0 if what() else 3)


def test_a_fork_has_a_helper_of_its_own(built: BuiltStore) -> None:
    store = hsx.open(built.info.path, helper=True)

    def together() -> None:
        meeting = threading.Barrier(2, timeout=WAIT_S)

        def task(piece: int, helping: bool) -> None:
            meeting.wait()

        for_each(range(2), task)

    def again() -> bool:
        together()
        return np.array_equal(store.hidden_states_numpy(0), built.states[0])

    together()  # the parent has one by now
    assert in_a_child(again, "fork") == 0


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_no_help_in_processes_that_come_in_numbers(method: str) -> None:
    assert worth_while() == (len(os.sched_getaffinity(0)) > 1)
    assert in_a_child(worth_while, method) == 3
