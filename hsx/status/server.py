"""The run's side of its status: binds the port, starts the process that serves it, and tells that how the run stands.

A poll costs the run nothing, however many there are: it writes one document twice a second, whoever reads it.
"""

from __future__ import annotations

import asyncio
import errno
import os
import platform
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hsx import __version__
from hsx.core.lifecycle import State
from hsx.errors import RunError
from hsx.status.channel import DOCUMENT, END, SETTINGS, Frame, Sender
from hsx.status.document import VERSION, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.telemetry import Telemetry

EVERY_S: Final = 0.5
AGAIN_S: Final = 5.0
"""How long after the serving process died another one is started."""
GOODBYE_S: Final = 3.0
"""How long that process may take to end."""
BUSY_S: Final = 2.0
"""How long a port that is taken is tried again: a run that was killed a moment ago may not have let go of it."""


class StatusServer:
    """Serves `/`, `/status`, `/healthz`, `/readyz`, `/metrics` and `/events`; see `hsx.status.site`.

    Args:
        telemetry: what the run counts.
        facts: returns what the run knows beyond that, merged into the document by top-level key (a table into a table): limits,
            versions, and `ready` and `health`: `{"ok": bool, "reason": str}`. Must not block.
        host: address to bind.
        port: port to bind; 0 takes any free one.
        token: clients must know it; "": anybody may ask.
        goodbye_s: how long the serving process may take to end.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        facts: Callable[[], dict[str, Any]],
        host: str,
        port: int,
        *,
        token: str = "",
        goodbye_s: float = GOODBYE_S,
    ) -> None:
        self._telemetry = telemetry
        self._facts = facts
        self._host = host
        self._port = port
        self._token = token
        self._goodbye_s = goodbye_s
        self._listening: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sender: Sender | None = None
        self._telling: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Binds and serves; returns the base URL. Raises RunError `status_failed` where the address cannot be bound."""
        self._listening = await self._bind()
        self._spawn()
        self._telling = asyncio.create_task(self._tell_on())
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._listening.getsockname()[1]}"

    async def stop(self) -> None:
        """Tells listeners how the run stands at its end; closes the port and its connections. Idempotent."""
        telling, self._telling = self._telling, None
        if telling is not None:
            telling.cancel()
            with suppress(asyncio.CancelledError):
                await telling
        process, self._process = self._process, None
        sender, self._sender = self._sender, None
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.close()
        if process is None or sender is None:
            return
        await asyncio.to_thread(_end, process, sender, self._goodbye_s, Frame(END, encode(self.document())))

    def tell(self) -> None:
        """Tells the serving process how the run stands now. Never blocks; a process that does not take it misses it."""
        if self._sender is not None:
            with suppress(OSError):  # it is gone; see _tell_on
                self._sender.send(Frame(DOCUMENT, encode(self.document())))

    def kill(self) -> None:
        """Lets go of the port without a word, as a run does that is killed; for tests."""
        if self._telling is not None:
            self._telling.cancel()
        if self._listening is not None:
            self._listening.close()
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int | None:
        """The serving process; None where there is none."""
        return None if self._process is None else self._process.pid

    def document(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = {"version": VERSION, **self._telemetry.snapshot()}
        document["versions"] = {"hsx": __version__, "python": platform.python_version()}
        for key, value in self._facts().items():
            merged = document.get(key)
            document[key] = {**merged, **value} if isinstance(merged, dict) and isinstance(value, dict) else value
        document.setdefault("ready", _ready(document["engine"], document["intake"]))
        document.setdefault("health", {"ok": True, "reason": ""})
        return document

    async def _bind(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        until = time.monotonic() + BUSY_S
        while True:
            try:
                (family, kind, number, _, address), *_ = await loop.getaddrinfo(
                    self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
                )
                listening = socket.socket(family, kind, number)
                try:
                    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    listening.setblocking(False)
                    listening.bind(address)
                    listening.listen(1024)
                except BaseException:
                    listening.close()
                    raise
                return listening
            except OSError as error:
                if time.monotonic() >= until or error.errno != errno.EADDRINUSE:
                    raise RunError(
                        "status_failed",
                        f"status endpoint cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                        "set status.port to a free port, to 0 for any, or status.enabled = false",
                    ) from error
            await asyncio.sleep(0.1)

    def _spawn(self) -> None:
        """Starts the serving process. It needs a moment; until then, clients wait in the socket's queue."""
        assert self._listening is not None
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = (theirs.fileno(), self._listening.fileno())
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hsx.status.child", *map(str, numbers)],
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
            )
        self._sender = Sender(ours)
        self._sender.send(Frame(SETTINGS, msgspec.json.encode({"host": self._host, "token": self._token})))
        self.tell()

    async def _tell_on(self) -> None:
        """Tells until cancelled, and starts the serving process again where it died."""
        while True:
            await asyncio.sleep(EVERY_S)
            process = self._process
            if process is not None and process.poll() is not None:
                self._telemetry.log.warning("status.failed", exit_status=process.returncode)
                _end(process, self._sender, self._goodbye_s)
                self._process = self._sender = None
                await asyncio.sleep(AGAIN_S)
                self._spawn()
            self.tell()


def _end(process: subprocess.Popen[bytes], sender: Sender | None, patience_s: float, last: Frame | None = None) -> None:
    """Tells the serving process a last word, waits for it to end, and ends it. Blocks."""
    if sender is not None:
        until = time.monotonic() + patience_s
        with suppress(OSError):
            while last is not None and not sender.send(last) and time.monotonic() < until:
                time.sleep(0.02)
            while not sender.flush() and time.monotonic() < until:
                time.sleep(0.02)
        sender.close()
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    is_up = bool(process.stdout.read())  # else nobody can be listening to it yet
    with suppress(subprocess.TimeoutExpired):
        process.wait(patience_s if is_up else 0)
    process.kill()
    process.wait()
    process.stdout.close()


def _ready(engine: dict[str, Any], intake: dict[str, Any]) -> dict[str, Any]:
    """Ready means that samples flow: the engine passed its boot gate, and there is room for them."""
    if intake["paused"]:
        return {"ok": False, "reason": "; ".join(f"{pause['kind']}: {pause['message']}" for pause in intake["pauses"])}
    if engine["state"] == State.READY.value:
        return {"ok": True, "reason": ""}
    why = engine["waiting_for"] or engine["reason"]
    because = f": {why}" if why else ""
    return {"ok": False, "reason": f"engine is {engine['state']}{because}"}
