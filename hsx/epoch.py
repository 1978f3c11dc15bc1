"""One epoch while it lives: what is started inside it ends with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from hsx.core.epoch import EpochRecord
    from hsx.core.invariants import Violation

T = TypeVar("T")


class LiveEpoch:
    """A server that passed the boot gate, until it is declared void.

    Args:
        record: its epoch record.
    """

    def __init__(self, record: EpochRecord) -> None:
        self.record = record
        self.interrupted = 0
        """Steps of samples that were under way inside it when it was voided."""
        self._inside: set[asyncio.Task[Any]] = set()
        self._verdict: asyncio.Future[Violation] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """The epoch's uuid."""
        return self.record.epoch

    def void(self, violation: Violation) -> None:
        """Ends the epoch: everything inside it is cancelled and raises EngineError `epoch_void`. The first verdict stands."""
        if self._verdict.done():
            return
        self._verdict.set_result(violation)
        self.interrupted = len(self._inside)
        for task in self._inside:
            task.cancel()

    async def voided(self) -> Violation:
        """Returns the verdict once there is one."""
        return await asyncio.shield(self._verdict)

    @property
    def is_void(self) -> bool:
        """Whether there is a verdict."""
        return self._verdict.done()

    def check(self) -> None:
        """Raises EngineError `epoch_void` once the epoch is void."""
        if self._verdict.done():
            violation = self._verdict.result()
            raise EngineError("epoch_void", f"epoch {self.id} is void: {violation.invariant}: {violation.evidence}")

    async def run(self, step: Coroutine[Any, Any, T]) -> T:
        """Awaits `step` as part of the epoch. Raises EngineError `epoch_void` when the epoch ends first."""
        try:
            self.check()
        except EngineError:
            step.close()
            raise
        task = asyncio.ensure_future(step)
        self._inside.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            # Ours alone: when the caller itself is being cancelled, that must pass.
            current = asyncio.current_task()
            if current is not None and not current.cancelling():
                self.check()
            raise
        finally:
            self._inside.discard(task)
