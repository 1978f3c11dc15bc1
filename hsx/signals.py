"""Signals for the time of a block."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def handled_hangups(callback: Callable[[], None]) -> Iterator[None]:
    """Calls `callback`, on the event loop, for each SIGHUP within the block; but where somebody sits at a terminal, whose
    hanging up ends the program as ever."""
    if any(map(os.isatty, (0, 1, 2))):
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, callback)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@contextmanager
def handled_signals(callback: Callable[[str], None]) -> Iterator[None]:
    """Calls `callback` with the signal's name, on the event loop, for each SIGINT and SIGTERM within the block."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, callback, number.name)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
