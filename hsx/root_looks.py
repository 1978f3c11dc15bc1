"""Looks at roots, each in a thread of its own and for so long at most: a mount that hangs holds up nobody but itself."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


class Looker(Executor):
    """One thread, which neither `shutdown` nor the end of the interpreter waits for: it may hang in the kernel.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True).start()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As of any executor."""
        future: Future[T] = Future()

        def call() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = fn(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - carried to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Lets the thread end after what was submitted; never waits."""
        self._calls.put(None)


def _work(calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    """What a looker's thread does; it does not hold the looker."""
    while (call := calls.get()) is not None:
        call()


class RootLooks(Generic[R]):
    """Asks roots something that may hang. Not for several tasks at once.

    Args:
        names: the roots.
        look: asks one. Blocks.
        patience_s: a root that has not answered for so long is silent. It is asked again once it has answered after all, and
            is not waited for until then.
    """

    def __init__(self, names: Iterable[str], look: Callable[[str], R], patience_s: float) -> None:
        self._look = look
        self._patience_s = patience_s
        self._threads = {name: Looker(f"hsx-space-{name}") for name in names}
        self._asked: dict[str, asyncio.Future[R]] = {}
        self.silent: set[str] = set()
        """Roots that did not answer when they were asked last."""

    async def ask(self, names: Iterable[str]) -> dict[str, R]:
        """What each answers to a question that is put now; without those that are silent. Raises what `look` raises."""
        wanted = list(names)
        answers = await asyncio.gather(*(self._ask(name) for name in wanted))
        return {name: future.result() for name, future in zip(wanted, answers, strict=True) if future is not None}

    def shutdown(self) -> None:
        """Lets the threads end; does not wait for them."""
        for thread in self._threads.values():
            thread.shutdown()

    async def _ask(self, name: str) -> asyncio.Future[Any] | None:
        before = self._asked.get(name)
        # One of whoever was cancelled while asking: what it answers may be older than what is asked for now.
        if before is not None and not before.done() and (name in self.silent or not await self._answers(name, before)):
            return None
        future = self._asked[name] = asyncio.get_running_loop().run_in_executor(self._threads[name], self._look, name)
        return future if await self._answers(name, future) else None

    async def _answers(self, name: str, future: asyncio.Future[R]) -> bool:
        done, _ = await asyncio.wait([future], timeout=self._patience_s)
        (self.silent.discard if done else self.silent.add)(name)
        return bool(done)
