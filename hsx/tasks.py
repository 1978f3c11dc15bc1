"""Two ways to run steps at once. Neither leaves a task behind: what is not wanted any more is cancelled, and awaited."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterable

T = TypeVar("T")


async def first(*steps: Coroutine[Any, Any, T]) -> T:
    """The result of the step that ends first, or its error; the others are cancelled."""
    async with _running(steps) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task in done).result()


async def together(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Runs the steps to their end; the first error ends the others and is raised by itself."""
    async with _running(steps) as tasks:
        await asyncio.gather(*tasks)


@asynccontextmanager
async def _running(steps: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
