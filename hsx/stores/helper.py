"""A second thread that helps to read one sample, where there is a core for it.

There is one for the whole process, made when it is first wanted: however many threads read at once, no more than one is added.
Whoever has work for it does that work himself as well, so that help which has not begun by the end is called off.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def worth_while() -> bool:
    """Whether there is a core for a helper: not on a machine of one, nor in a process that `multiprocessing` has started.

    Those, the workers of a DataLoader for one, are so many that they use the cores by themselves.
    """
    return multiprocessing.parent_process() is None and len(os.sched_getaffinity(0)) > 1


def for_each(pieces: Iterable[int], task: Callable[[int, bool], None]) -> None:
    """Calls `task` for each piece, in this thread and at the same time in the helper; its second argument is true there.

    Pieces are taken in order, and none any more after one has failed. Raises what the first of those that failed has raised,
    which is what one thread alone would have met. Whatever happens, an interruption too, neither thread is at work any more
    when this returns or raises: what `task` writes to belongs to the caller alone again.
    """
    left = deque(pieces)
    failed: dict[int, Exception] = {}

    def work(*, helping: bool) -> None:
        try:
            while True:
                try:
                    piece = left.popleft()
                except IndexError:
                    return
                try:
                    task(piece, helping)
                except Exception as error:  # noqa: BLE001 - raised below
                    failed[piece] = error
                    return
        finally:
            left.clear()

    try:
        help_: Future[None] | None = _threads().submit(work, helping=True)
    except RuntimeError:  # no more threads to be had, or the interpreter is about to end
        help_ = None
    try:
        work(helping=False)
    finally:
        if help_ is not None:
            _end(help_)
    if failed:
        raise failed[min(failed)]


def _end(help_: Future[None]) -> None:
    """Calls the helper off or waits for it, and raises what has ended it; what interrupts the waiting is raised afterwards."""
    interrupt: BaseException | None = None
    while not help_.cancel() and not help_.done():
        try:
            wait([help_])
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if interrupt is not None:
        raise interrupt
    if not help_.cancelled():
        help_.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="hsx-help")


os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of its parent's threads
