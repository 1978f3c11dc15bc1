"""An event loop on a clock of its own: hours of waiting pass in no time, and a real wait is never cut short.

Whenever nothing can run before the next timer, time jumps to it. While a thread works for the loop, in whatever executor, time
stands still and the wait is real; so a program with threads behaves as if its threads took no time at all, and nothing depends
on the machine being fast.
"""

from __future__ import annotations

import asyncio
import selectors
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class StandstillError(RuntimeError):
    """Nothing is left that could ever happen: no timer, no thread at work, no file that is ready."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time` is virtual, for programs that wait for files, threads and timers, and not for the network.

    Where it would wait for ever it raises StandstillError instead, out of `run_until_complete`.

    Args:
        on_step: called before each turn of the loop, when no callback is running. It may call `stand_still`, and it may end the
            process, which makes that turn the moment of a crash.
    """

    def __init__(self, on_step: Callable[[], None] | None = None) -> None:
        self._now = 0.0
        self._at_work = 0
        self._on_step = on_step
        self.steps = 0
        """Turns of the loop so far."""
        super().__init__(_JumpingSelector(self))
        self._threads = ThreadPoolExecutor(thread_name_prefix="virtual-time")
        self.set_default_executor(self._threads)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def stand_still(self, seconds: float) -> None:
        """Lets `seconds` pass in which nothing runs here, as while a process is stopped by SIGSTOP: what fell due is late."""
        if seconds < 0:
            raise ValueError(f"seconds is {seconds}; expected at least 0")
        self._now += seconds

    @property
    def at_work(self) -> int:
        """Calls given to executors that have not come back, those that nobody awaits any more included."""
        return self._at_work

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """As usual; until the call has come back, time stands still."""
        call = (executor or self._threads).submit(func, *args)
        self._at_work += 1
        future = asyncio.wrap_future(call, loop=self)
        # Behind wrap_future's own callback: the result is on the loop before the call stops counting.
        call.add_done_callback(self._came_back)
        return future

    def _came_back(self, _call: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody counts any more
            self.call_soon_threadsafe(self._count, -1)

    def _count(self, change: int) -> None:
        self._at_work += change

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """As usual, whatever the timeout: the threads are waited for."""
        self._at_work += 1  # a thread of asyncio's own, which comes back without an executor
        try:
            await super().shutdown_default_executor()
        finally:
            self._at_work -= 1

    def before_step(self) -> None:
        """Called by the selector before each turn."""
        self.steps += 1
        if self._on_step is not None:
            self._on_step()


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would sleep, this looks at what it sleeps for."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.before_step()
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self._loop.at_work:
            return super().select(None)  # a call that comes back wakes the loop
        if timeout is None:
            raise StandstillError("nothing is left to wait for: no timer, no thread at work, no file that is ready")
        self._loop.stand_still(timeout)
        return []


class VirtualClock:
    """The loop's time as a `hsx.ports.Clock`.

    Args:
        loop: default: the running loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Sleeps in virtual time."""
        await asyncio.sleep(seconds)


def run_in_virtual_time(steps: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine on a loop of its own whose time is virtual, and ends the threads that it used."""
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(steps)
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
