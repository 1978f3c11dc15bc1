"""The simulated server behind the ports: what `hsx.app.run_job` is given in place of HTTP and processes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

import hsx
from hsx.errors import EngineError, SampleError
from hsx.records import ServerFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from hsx.core.epoch import EpochRecord
    from hsx.core.invariants import Answer
    from hsx.core.marker import Marker
    from hsx.core.spec import ModelShape
    from hsx.testing.simulated_server import SimulatedServer

BOOT_S = 20.0
"""How long a start takes, and how long it takes until somebody starts a server that hsx does not own."""


class Wire:
    """Keeps a server's time in step with the running loop, and brings what it says to who waits for it.

    Args:
        server: its time goes on from where it is.
    """

    def __init__(self, server: SimulatedServer) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._offset = server.now - self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._answers: dict[Marker, asyncio.Future[Answer]] = {}
        self._deaths: list[asyncio.Future[str]] = []

    async def ask(self, marker: Marker, ids: NDArray[np.int32]) -> Answer:
        """Sends a prompt and waits for what becomes of it. Cancelling hangs up."""
        self.keep_up()
        self.server.submit(marker, ids)
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._answers[marker] = answer
        self.keep_up()
        try:
            return await answer
        finally:
            del self._answers[marker]
            if answer.cancelled():
                self.server.drop(marker)

    async def death(self) -> str:
        """Returns how the server ended once it has."""
        self.keep_up()
        if not self.server.alive:
            return self.server.death
        end: asyncio.Future[str] = self._loop.create_future()
        self._deaths.append(end)
        try:
            return await end
        finally:
            self._deaths.remove(end)

    def keep_up(self, due: float = 0.0) -> None:
        """Lets the server do what is due by now, delivers it, and comes back when more is due.

        Args:
            due: server time that has come, whatever rounding makes of the loop's.
        """
        server = self.server
        server.advance(max(due, self._loop.time() + self._offset))
        for marker, outcome in server.outcomes:
            answer = self._answers.get(marker)
            if answer is not None and not answer.done():
                if isinstance(outcome, SampleError):
                    answer.set_exception(outcome)
                else:
                    answer.set_result(outcome)
        server.outcomes.clear()
        if not server.alive:
            for end in self._deaths:
                if not end.done():
                    end.set_result(server.death)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        coming = server.next_due()
        if coming is not None:
            self._timer = self._loop.call_at(coming - self._offset, self.keep_up, coming)


class SimulatedClient:
    """Asks a simulated server; implements `hsx.ports.EngineClient`.

    Args:
        wire: to the server.
        shape: of the model that it serves.
        longest: longest prompt that it takes.
    """

    def __init__(self, wire: Wire, shape: ModelShape, longest: int) -> None:
        self._wire = wire
        self._shape = shape
        self._longest = longest

    async def answers(self) -> bool:
        """See the port."""
        self._wire.keep_up()
        return self._wire.server.alive

    async def facts(self) -> ServerFacts:
        """See the port."""
        if not await self.answers():
            raise EngineError("server_gone", f"nobody listens: {self._wire.server.death}")
        return ServerFacts(hsx.__version__, "simulated", self._longest, self._shape.vocab_size, ())

    async def prefill(
        self, marker: Marker, input_ids: Sequence[int] | NDArray[np.int32], timeout_s: float, rank: int | None = None
    ) -> Answer:
        """See the port."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._wire.ask(marker, np.asarray(input_ids, np.int32))
        except TimeoutError:
            raise SampleError("request_timeout", f"{marker}: no answer within {timeout_s:g} s") from None

    async def abort(self, marker: Marker) -> None:
        """See the port."""
        self._wire.keep_up()
        if not self._wire.server.alive:
            raise EngineError("server_gone", f"nobody listens: {self._wire.server.death}")
        self._wire.server.drop(marker)
        self._wire.keep_up()

    async def close(self) -> None:
        """See the port."""


class SimulatedOwner:
    """Starts and stops a simulated server; implements `hsx.ports.EngineOwner`.

    Args:
        wire: to the server.
        restarts: hsx owns the server, which then never outlives hsx; otherwise somebody else starts it again when it is dead.
    """

    def __init__(self, wire: Wire, *, restarts: bool) -> None:
        self._wire = wire
        self._restarts = restarts

    @property
    def restarts(self) -> bool:
        """See the port."""
        return self._restarts

    @property
    def situation(self) -> str:
        """See the port."""
        return "the simulated server is coming up"

    async def start(self) -> EpochRecord:
        """See the port."""
        self._wire.keep_up()
        server = self._wire.server
        if server.alive and server.record is not None:
            assert not self._restarts, "the last server still runs; expected it to be stopped first"
            return server.record
        await asyncio.sleep(BOOT_S)
        self._wire.keep_up()
        return server.boot()

    async def ended(self) -> str:
        """See the port."""
        return await self._wire.death()

    async def stop(self, grace_s: float) -> None:
        """See the port."""
        if self._restarts:
            self._wire.server.kill("was stopped")
            self._wire.keep_up()

    async def leave(self, grace_s: float) -> None:
        """See the port."""
        await self.stop(grace_s)
