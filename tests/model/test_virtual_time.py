"""The loop that simulations run on: time jumps, but never past a thread or a file."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from hsx.testing.virtual_time import StandstillError, VirtualClock, VirtualTimeLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


def run(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, Any]], **options: Any) -> Any:
    """Runs `main` on a loop of its own."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(**options)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(loop))


def test_hours_pass_at_once_and_in_order() -> None:
    async def main(loop: VirtualTimeLoop) -> list[tuple[float, str]]:
        seen = []

        async def after(seconds: float, name: str) -> None:
            await VirtualClock().sleep(seconds)
            seen.append((loop.time(), name))

        await asyncio.gather(after(7200.0, "later"), after(3600.0, "sooner"), after(90_000.0, "a day and more"))
        return seen

    before = time.monotonic()
    assert run(main) == [(3600.0, "sooner"), (7200.0, "later"), (90_000.0, "a day and more")]
    assert time.monotonic() - before < 3600.0


@pytest.mark.parametrize("own", [False, True])
def test_a_thread_takes_no_virtual_time_in_whatever_executor(own: bool) -> None:
    release = threading.Event()

    async def main(loop: VirtualTimeLoop) -> None:
        executor = ThreadPoolExecutor(1) if own else None
        threading.Timer(0.05, release.set).start()
        # The timeout would pass at once, were the thread not waited for.
        async with asyncio.timeout(1.0):
            assert await loop.run_in_executor(executor, release.wait, 300.0)
        assert loop.time() == 0.0
        await asyncio.sleep(5.0)
        assert loop.time() == 5.0
        if executor is not None:
            executor.shutdown()

    run(main)


def test_a_thread_whose_caller_has_gone_is_waited_for_all_the_same() -> None:
    release, done = threading.Event(), list[str]()

    def work() -> None:
        release.wait(300.0)
        done.append("thread")

    async def main(loop: VirtualTimeLoop) -> None:
        caller = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.sleep(0)
        caller.cancel()
        threading.Timer(0.05, release.set).start()
        assert loop.at_work == 1
        await asyncio.sleep(1.0)
        assert done == ["thread"]
        assert loop.at_work == 0

    run(main)


def test_a_failure_in_a_thread_comes_back_and_stops_counting() -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        await asyncio.sleep(1.0)
        assert loop.at_work == 0

    run(main)


def test_what_can_be_read_comes_before_any_jump() -> None:
    async def main(loop: VirtualTimeLoop) -> None:
        reading, writing = os.pipe()
        readable = asyncio.Event()
        loop.add_reader(reading, readable.set)
        os.write(writing, b"x")
        async with asyncio.timeout(1.0):
            await readable.wait()
        assert loop.time() == 0.0
        loop.remove_reader(reading)
        os.close(reading)
        os.close(writing)

    run(main)


def test_waiting_for_nothing_is_an_error() -> None:
    async def main(_loop: VirtualTimeLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandstillError, match="no timer, no thread"):
        run(main)


def test_a_pause_makes_everything_late_at_once() -> None:
    fired = list[str]()

    async def main(loop: VirtualTimeLoop) -> None:
        clock = VirtualClock(loop)
        loop.call_later(10.0, fired.append, "inside the pause")
        loop.call_later(100.0, fired.append, "after it")
        loop.stand_still(60.0)
        assert (clock.monotonic(), fired) == (60.0, [])
        await clock.sleep(1.0)
        assert (clock.monotonic(), fired) == (61.0, ["inside the pause"])
        with pytest.raises(ValueError, match="expected at least 0"):
            loop.stand_still(-1.0)

    run(main)


def test_each_turn_can_be_the_moment_of_something() -> None:
    loops = list[VirtualTimeLoop]()

    def on_step() -> None:
        if loops and loops[0].steps == 5:
            loops[0].stand_still(1000.0)

    async def main(loop: VirtualTimeLoop) -> float:
        loops.append(loop)
        for _ in range(10):
            await asyncio.sleep(0)
        return loop.time()

    assert run(main, on_step=on_step) == 1000.0
