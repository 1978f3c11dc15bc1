"""Attempts that die: each in a fork of a process that has imported what they need, for importing torch takes seconds.

The forking process must not have used torch's threads, nor any other.
"""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def begin(attempt: Callable[[], object]) -> int:
    """Begins an attempt; returns the pid of its process."""
    pid = os.fork()
    if pid:
        return pid
    try:
        attempt()
    except BaseException:  # noqa: BLE001 - whatever it is, the fork must not go on as its parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended(pid: int) -> int:
    """How the attempt ended, once it has: 0 when it came to its end, -9 when it was killed, 1 when it raised."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
