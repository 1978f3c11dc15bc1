"""Disks in memory: a root with a size and a dump directory with a size, for tests of who gets which room."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hsx.errors import RunError
from hsx.records import Receipt

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hsx.records import Payload


class MemoryRoot:
    """A root that keeps sizes and nothing else; implements `hsx.ports.Root`.

    Args:
        name: its name.
        size: bytes of the whole disk.

    Attributes:
        used: bytes that its shards, or anybody, take.
        failure: raised by every method from now on.
        answers: while it is not set, `free` hangs.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self.size = size
        self.used = 0
        self.failure: RunError | None = None
        self.answers = threading.Event()
        self.answers.set()

    def _pass(self) -> None:
        if self.failure is not None:
            raise self.failure

    @property
    def name(self) -> str:
        """See the port."""
        return self._name

    def free(self) -> int:
        """See the port."""
        self.answers.wait()
        self._pass()
        return self.size - self.used

    def take(self, nbytes: int) -> None:
        """Takes room, as a shard does. Raises RunError `roots_full`."""
        self._pass()
        if nbytes > self.size - self.used:
            raise RunError("roots_full", f"root {self._name}: no space for {nbytes} bytes (ENOSPC)")
        self.used += nbytes

    def write(self, payload: Payload) -> Receipt:
        """See the port; only the size of the states is kept."""
        self.take(payload.states.nbytes)
        return Receipt(self._name, payload.states.nbytes, 0)

    def link(self, index: int, others: Sequence[int]) -> list[int]:
        """See the port; takes no room."""
        self._pass()
        return list(others)

    def read(self, index: int, tokens: int, captured_as: int | None = None) -> NDArray[np.uint16]:
        """See the port; there is nothing to read."""
        raise RunError("store_invalid", f"root {self._name} keeps no states: sample {index} of {tokens} tokens is not there")

    def checksum(self, index: int, tokens: int, captured_as: int | None = None) -> int:
        """See the port; there is nothing to read."""
        raise RunError("store_invalid", f"root {self._name} keeps no states: sample {index} of {tokens} tokens is not there")

    def sync(self) -> None:
        """See the port."""
        self._pass()

    def flush(self) -> None:
        """See the port."""
        self._pass()

    def discard(self, index: int) -> None:
        """See the port."""
        self._pass()

    def sweep(self) -> int:
        """See the port."""
        return 0


class HandClock:
    """A clock that moves when somebody sleeps, at once; implements `hsx.ports.Clock`.

    Attributes:
        now: seconds.
        slept: how long each sleep was, in order.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        """See the port."""
        return self.now

    async def sleep(self, seconds: float) -> None:
        """See the port."""
        self.now += seconds
        self.slept.append(seconds)
