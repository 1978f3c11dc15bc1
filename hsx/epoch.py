"""One epoch while it lives: what is started inside it ends with it, and what it leaves is known when it ended."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from hsx.core.counter import NEW_SERVER, Counter
from hsx.core.epoch import stream_name
from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Mapping

    from hsx.core.epoch import CaptureState, EpochRecord
    from hsx.core.invariants import Violation

T = TypeVar("T")


class LiveEpoch:
    """A server from the boot gate on, until it is declared void.

    Args:
        record: its epoch record.
        states: the capture side's accounts when hsx came, by DP rank; none where it keeps none.

    Attributes:
        record: see above.
        writers: (pid, start time) of the process that captures, by DP rank; none where that is not known.
        counter: accounts for the numbers of its dumps.
        vouched: by DP rank, the capture number up to which a sound canary vouches for its dumps.
        suspects: samples that were at the server when it died or stalled.
        reported: whether the verdict is on record already, as a violation of some sample.
        doubt: whether what was committed since the last sound canary has to be extracted again.
        requeued: samples whose attempts were given up because of its end.
    """

    def __init__(self, record: EpochRecord, states: Mapping[int, CaptureState] = MappingProxyType({})) -> None:
        self.record = record
        self.writers = {rank: (state.pid, state.start_ticks) for rank, state in states.items()}
        self.counter = Counter({rank: state.sequence for rank, state in states.items()} or NEW_SERVER)
        self.vouched: dict[int, int] = {}
        self.suspects: frozenset[int] = frozenset()
        self.reported = False
        self.doubt = False
        self.requeued: list[int] = []
        self._at_server: set[int] = set()
        self._attempts = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._inside: set[asyncio.Task[Any]] = set()
        self._verdict: asyncio.Future[Violation] = asyncio.get_running_loop().create_future()

    @property
    def id(self) -> str:
        """The epoch's uuid."""
        return self.record.epoch

    @property
    def ranks(self) -> list[int]:
        """The DP ranks whose dumps are accounted for; [0] without data parallelism."""
        return sorted(self.counter.reached)

    def stream(self, rank: int) -> str:
        """How the ledger and the shards name what DP rank `rank` captures."""
        return stream_name(self.id, rank)

    def void(self, violation: Violation, *, suspect: bool = False, doubt: bool = False, reported: bool = False) -> None:
        """Ends the epoch: everything inside it is cancelled and raises EngineError `epoch_void`. The first verdict stands.

        Args:
            violation: the verdict.
            suspect: the server died or stalled: one of the samples at it may have caused that.
            doubt: its states are not to be trusted, from the last sound canary on.
            reported: the violation is on record already.
        """
        self.doubt = self.doubt or doubt
        if self._verdict.done():
            return
        self._verdict.set_result(violation)
        self.reported = reported
        self.suspects = frozenset(self._at_server) if suspect else frozenset()
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

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Encloses one attempt, from before its request to its commit or failure."""
        self._attempts += 1
        self._settled.clear()
        try:
            yield
        finally:
            self._attempts -= 1
            if not self._attempts:
                self._settled.set()

    async def settled(self) -> None:
        """Returns once no attempt is under way in it: nothing of it will be committed any more, if it is void."""
        await self._settled.wait()

    def asked(self, index: int) -> None:
        """The request of sample `index` is about to be sent."""
        self._at_server.add(index)

    def answered(self, index: int) -> None:
        """The server is not at work on sample `index` any more."""
        self._at_server.discard(index)
