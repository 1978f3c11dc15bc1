"""Bounds on what clients may cost: how many connections there are, and how long one may do nothing.

A client that never finishes its request, never reads its answer or only holds a connection open is cut off. When all
connections are taken, whoever has idled longest makes way, so half-open connections by the thousand keep nobody out for long.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MOST_CONNECTIONS: Final = 256
IDLE_S: Final = 10.0
SWEEP_S: Final = 1.0


class Gate:
    """All connections of one endpoint.

    Args:
        clock: monotonic seconds.
        most: connections at once.
        idle_s: how long a connection may go without a request, and an answer without being read.
    """

    def __init__(self, clock: Callable[[], float], *, most: int = MOST_CONNECTIONS, idle_s: float = IDLE_S) -> None:
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._open: dict[asyncio.BaseProtocol, Guarded] = {}
        self.cut = 0
        """Connections that were cut off."""

    def __len__(self) -> int:
        return len(self._open)

    def wrap(self, inner: asyncio.Protocol) -> Guarded:
        """A protocol for a new connection, in front of the one that speaks HTTP."""
        return Guarded(inner, self)

    @contextmanager
    def serving(self, protocol: asyncio.BaseProtocol) -> Iterator[None]:
        """A request of this connection is being answered, and the server takes the time."""
        guarded = self._open.get(protocol)
        if guarded is not None:
            guarded.busy = True
        try:
            yield
        finally:
            if guarded is not None:
                guarded.busy = False
                guarded.active = self._clock()

    def opened(self, guarded: Guarded) -> bool:
        """A connection was made; False where there is no place for it."""
        if len(self._open) >= self._most:
            idle = [other for other in self._open.values() if not other.busy]
            if not idle:
                self.cut += 1
                return False
            self._cut(min(idle, key=lambda other: other.active))
        guarded.active = self._clock()
        self._open[guarded.inner] = guarded
        return True

    def closed(self, guarded: Guarded) -> None:
        """A connection is gone."""
        self._open.pop(guarded.inner, None)

    def sweep(self) -> None:
        """Cuts off whoever has idled too long; to be called every `SWEEP_S` seconds."""
        now = self._clock()
        for guarded in list(self._open.values()):
            if guarded.busy:
                continue
            unread = guarded.unread()
            if unread < guarded.unread_before:
                guarded.active = now
            guarded.unread_before = unread
            if now - guarded.active >= self._idle_s:
                self._cut(guarded)

    async def watch(self) -> None:
        """Sweeps until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def _cut(self, guarded: Guarded) -> None:
        self.cut += 1
        self._open.pop(guarded.inner, None)
        guarded.abort()


class Guarded(asyncio.Protocol):
    """One connection: passes everything on, and can be cut off.

    Args:
        inner: the protocol that speaks HTTP.
        gate: see there.

    Attributes:
        active: when this connection was last of use to its client, in monotonic seconds.
        busy: a request is being answered.
        unread_before: bytes that the client had not read yet when it was last looked at.
    """

    def __init__(self, inner: asyncio.Protocol, gate: Gate) -> None:
        self.inner = inner
        self._gate = gate
        self._transport: asyncio.Transport | None = None
        self._admitted = False
        self.active = 0.0
        self.busy = False
        self.unread_before = 0

    def unread(self) -> int:
        """Bytes that wait for the client to read."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def abort(self) -> None:
        """Closes the connection; what it has not read is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._admitted = self._gate.opened(self)
        if self._admitted:
            self.inner.connection_made(transport)
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gate.closed(self)
        if self._admitted:
            self.inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._admitted:
            self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received() if self._admitted else None

    def pause_writing(self) -> None:
        if self._admitted:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        if self._admitted:
            self.inner.resume_writing()
