"""An endpoint in this process, with what is in front of it, and a run that says how it stands."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from hsx.status.document import encode
from hsx.status.guard import Gate
from hsx.status.server import StatusServer
from hsx.status.site import Board, Site
from hsx.testing.commands import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from hsx.telemetry import Telemetry


class Clock:
    """Monotonic seconds that are moved by hand."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, slots=True)
class Served:
    """A running endpoint.

    Attributes:
        url: where.
        port: the same.
        board, gate, site: its parts.
        clock: theirs.
        session: a client.
        say: makes the board know how the run stands now.
    """

    url: str
    port: int
    board: Board
    gate: Gate
    site: Site
    clock: Clock
    session: aiohttp.ClientSession
    say: Callable[[], None]

    async def get(self, path: str, **headers: str) -> tuple[int, str, Any]:
        """(status, content type, text or JSON) of a path."""
        async with self.session.get(self.url + path, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, answer.content_type, await (answer.json() if is_json else answer.text())

    async def raw(self, data: bytes) -> bytes:
        """What a connection gets that sends `data` and then nothing, until it is closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()


@asynccontextmanager
async def serving(
    telemetry: Telemetry,
    facts: Callable[[], dict[str, Any]] = dict,
    *,
    token: str = "",
    most: int = 256,
    live: bool = True,
) -> AsyncIterator[Served]:
    """Serves what a telemetry tells; with `live`, as of each request."""
    run = StatusServer(telemetry, facts, "127.0.0.1", 0)
    clock = Clock()
    board, gate = Board(clock), Gate(clock, most=most)

    def say() -> None:
        board.update(encode(run.document()))

    site = Site(board, gate, token, "127.0.0.1", say if live else lambda: None)
    runner = web.AppRunner(
        site.application(),
        handler_cancellation=True,
        access_log=None,
        lingering_time=0.0,
        max_field_size=4096,
        shutdown_timeout=0.1,
    )
    await runner.setup()
    http = runner.server
    assert http is not None
    server = await asyncio.get_running_loop().create_server(lambda: gate.wrap(http()), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    # Its one connection stays open, however long a test takes.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(keepalive_timeout=PATIENCE_S)) as session:
        try:
            yield Served(f"http://127.0.0.1:{port}", port, board, gate, site, clock, session, say)
        finally:
            server.close()
            await runner.cleanup()


@pytest.fixture
def serve() -> Callable[..., AbstractAsyncContextManager[Served]]:
    """`serving`."""
    return serving


async def begun(server: StatusServer) -> str:
    """Starts an endpoint and returns its URL once it answers: its process is a polite one, and may need long to come up."""
    url = await server.start()
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url}/healthz") as answer:
        await answer.read()
    return url


@pytest.fixture
def begin() -> Callable[[StatusServer], Awaitable[str]]:
    """`begun`."""
    return begun
