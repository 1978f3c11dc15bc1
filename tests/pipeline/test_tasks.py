"""Steps at once: the result or error that counts, and no task left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hsx.tasks import first, together


async def ended(value: int) -> int:
    return value


async def broken(words: str) -> Any:
    raise ValueError(words)


class Endless:
    """A step that never ends by itself, and tells that it was ended."""

    def __init__(self) -> None:
        self.cancelled = False

    async def run(self) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it takes a turn to end: whoever cancels it has to wait for it
            self.cancelled = True
            raise


async def test_the_first_result_counts_and_the_others_are_ended() -> None:
    endless = Endless()
    assert await first(endless.run(), ended(3)) == 3
    assert endless.cancelled


@pytest.mark.parametrize("alone", [True, False])
async def test_the_first_error_is_raised_by_itself(alone: bool) -> None:
    endless = Endless()
    steps = [broken("this one"), endless.run()]
    with pytest.raises(ValueError, match="this one"):
        await (first(*steps) if alone else together(steps))
    assert endless.cancelled


async def test_together_waits_for_all() -> None:
    done: list[int] = []

    async def step(number: int) -> None:
        await asyncio.sleep(0)
        done.append(number)

    await together(step(number) for number in range(3))
    assert sorted(done) == [0, 1, 2]


async def test_a_cancelled_caller_leaves_nothing_behind() -> None:
    endless = Endless()
    caller = asyncio.create_task(together([endless.run()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert endless.cancelled
