"""The process that serves a run's status: `python -m hsx.status.child CHANNEL SOCKET`, two inherited file descriptors.

It knows what the run tells it and nothing else: no file, no server, no ledger. It ends with the run, however that ends, because
the channel does. When the machine runs out of memory or of processor time, it is the one to go without, not the run.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
from aiohttp import web

from hsx.status.channel import DOCUMENT, END, SETTINGS, Frame, Receiver
from hsx.status.guard import MOST_CONNECTIONS, Gate
from hsx.status.site import Board, Site

FAREWELL_S: Final = 1.0
"""How long listeners may take to read the last document."""
_NICENESS: Final = 5
_FILES: Final = MOST_CONNECTIONS + 64
_BACKLOG: Final = 1024
_LONGEST_LINE: Final = 4096
_MOST_HEADERS: Final = 50


class Settings(msgspec.Struct, frozen=True):
    """The first frame. `host`: the address that was bound; `token`: see `hsx.status.site.Site`."""

    host: str
    token: str = ""


def main() -> int:
    """Serves until the channel ends. Returns the exit status."""
    channel, listening = socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2]))
    # The run decides when it ends: what a terminal or service manager sends goes to all, and a draining run is still watched.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500", encoding="ascii")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(_FILES, hard), hard))
    # What clients do wrong is no news: they could fill a disk with it.
    logging.disable(logging.ERROR)
    asyncio.run(_serve(Receiver(channel), channel, listening))
    return 0


class Inbox:
    """Takes what the run says: to the settings, and to the board.

    Args:
        receiver: the channel.
        board: gets the documents.
    """

    def __init__(self, receiver: Receiver, board: Board) -> None:
        self._receiver = receiver
        self._board = board
        self.settings: asyncio.Future[Settings] = asyncio.get_running_loop().create_future()
        self.over = asyncio.Event()

    def take(self) -> None:
        """Takes what has come; never waits."""
        frames = self._receiver.take()
        # Only the newest document matters, so a process that was starved has nothing to catch up with.
        newest = next((frame for frame in reversed(frames) if frame.kind in (DOCUMENT, END)), None)
        for frame in frames:
            if frame.kind == SETTINGS and not self.settings.done():
                self.settings.set_result(msgspec.json.decode(frame.body, type=Settings))
        if newest is not None:
            self._show(newest)
        if self._receiver.ended:
            self.over.set()

    def _show(self, frame: Frame) -> None:
        self._board.update(frame.body, ended=frame.kind == END)
        if self._board.ended:
            self.over.set()


async def _serve(receiver: Receiver, channel: socket.socket, listening: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    board, gate = Board(time.monotonic), Gate(time.monotonic)
    inbox = Inbox(receiver, board)
    loop.add_reader(channel, inbox.take)
    over = asyncio.ensure_future(inbox.over.wait())
    either: set[asyncio.Future[Any]] = {inbox.settings, over}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not inbox.settings.done():
        return
    settings = inbox.settings.result()
    site = Site(board, gate, settings.token, settings.host, inbox.take)
    runner = web.AppRunner(
        site.application(),
        access_log=None,
        handle_signals=False,
        handler_cancellation=True,  # a listener that goes away makes way for another at once
        shutdown_timeout=FAREWELL_S,
        lingering_time=0.0,
        max_line_size=_LONGEST_LINE,
        max_field_size=_LONGEST_LINE,
        max_headers=_MOST_HEADERS,
    )
    await runner.setup()
    http = runner.server
    assert http is not None
    server = await loop.create_server(lambda: gate.wrap(http()), sock=listening, backlog=_BACKLOG)
    watching = asyncio.ensure_future(gate.watch())
    with suppress(OSError):
        os.write(1, b"up\n")
    await over
    loop.remove_reader(channel)
    server.close()
    if board.ended:
        with suppress(TimeoutError):
            await asyncio.wait_for(site.silent.wait(), FAREWELL_S)
    watching.cancel()
    await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
