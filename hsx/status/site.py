"""Answers requests for the status of a run from what was last said about it. Nothing here waits for the run."""

from __future__ import annotations

import asyncio
import gzip
import hmac
import ipaddress
import socket
from collections import deque
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from hsx import metrics

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from hsx.status.guard import Gate

STALE_S: Final = 30.0
"""A document this old is one of a run that hangs: it says something twice a second."""
MOST_STREAMS: Final = 32
KEPT_EVENTS: Final = 500
BEAT_S: Final = 15.0
"""A stream without events says something this often, so that a client that is gone is noticed."""
WRITE_S: Final = 10.0
"""How long a stream's client may take to read what it was sent."""

_OPEN_PATHS: Final = frozenset({"/", "/dashboard.css", "/dashboard.js", "/healthz"})
"""What needs no token: the page without its data, and whether hsx is sound."""
_FILES: Final = {
    "/": ("index.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
}
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """An answer's body, compressed the first time that somebody asks for that."""

    plain: bytes
    _packed: list[bytes] = field(default_factory=list)

    def packed(self) -> bytes:
        """gzip."""
        if not self._packed:
            self._packed.append(gzip.compress(self.plain, 5))
        return self._packed[0]


class Board:
    """What was last said about the run.

    Args:
        clock: monotonic seconds.

    Attributes:
        body: the status document as JSON; empty until there is one.
        data: the same, decoded.
        events: the last events, (id, as JSON), oldest first.
        ended: the run is over: no other document follows.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._arrived = clock()
        self._changed = asyncio.Event()
        self._metrics: Body | None = None
        self.body = Body(b"")
        self.data: dict[str, Any] = {}
        self.events: deque[tuple[int, bytes]] = deque(maxlen=KEPT_EVENTS)
        self.ended = False

    def update(self, body: bytes, *, ended: bool = False) -> None:
        """Takes a document, the last one where `ended`."""
        self._arrived = self._clock()
        self.body, self.data, self._metrics = Body(body), msgspec.json.decode(body), None
        newest = self.events[-1][0] if self.events else -1
        self.events.extend((event["id"], msgspec.json.encode(event)) for event in self.data["events"] if event["id"] > newest)
        self.ended = ended
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def changed(self) -> None:
        """Returns when another document has come."""
        await self._changed.wait()

    def snapshot(self) -> dict[str, Any]:
        """For the metrics."""
        return self.data

    def metrics(self) -> Body:
        """The text exposition format, rendered once a document."""
        if self._metrics is None:
            self._metrics = Body(metrics.render(metrics.registry_of(self)))
        return self._metrics

    def health(self) -> dict[str, Any]:
        """Whether hsx is sound: it says something, and says that it is."""
        if not self.data:
            return {"ok": False, "reason": "hsx has not said anything yet"}
        age = self._clock() - self._arrived
        # While the dataset is read, hsx has better to do than to talk.
        if age >= STALE_S and self.data["phase"]["name"] != "starting":
            return {"ok": False, "reason": f"hsx has said nothing for {age:.0f} s: it hangs, or was stopped"}
        return dict(self.data["health"])

    def ready(self) -> dict[str, Any]:
        """Whether samples flow."""
        health = self.health()
        return dict(self.data["ready"]) if health["ok"] else health


class Site:
    """The pages of the endpoint.

    Args:
        board: what they are made of.
        gate: where connections are bounded.
        token: clients must send it as `Authorization: Bearer <token>`; "": they need not.
        host: the address that was bound.
        refresh: called before each answer: brings the board up to date without waiting.
    """

    def __init__(self, board: Board, gate: Gate, token: str, host: str, refresh: Callable[[], None] = lambda: None) -> None:
        self._board = board
        self._gate = gate
        self._token = token.encode()
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._refresh = refresh
        self._files = {path: (Body(_file(name)), kind) for path, (name, kind) in _FILES.items()}
        self.streams = 0
        """Clients of `/events`."""
        self.silent = asyncio.Event()
        """Set while there is none."""
        self.silent.set()

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._admit], client_max_size=1)
        for path in _FILES:
            app.router.add_get(path, self._page)
        app.router.add_get("/status", self._status)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/events", self._events)
        return app

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self._refresh()
        refused = self._refusal(request)
        if refused is not None:
            return refused
        with self._gate.serving(request.protocol):
            try:
                return await handler(request)
            except web.HTTPException as error:
                error.headers.update(_HEADERS)
                raise

    def _refusal(self, request: web.Request) -> web.Response | None:
        if request.body_exists:
            return _refuse(413, "a request to this endpoint has no body", close=True)
        if not self._token:
            # A page from elsewhere that a browser here has open may not read this through a name of its own (DNS rebinding).
            return None if self._is_known(request.headers.get("Host", "localhost")) else _refuse(421, "unknown host name")
        if request.path in _OPEN_PATHS:
            return None
        kind, _, given = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(given.strip().encode(errors="replace"), self._token):
            return None
        refused = _refuse(401, "expected Authorization: Bearer, with the token of status.token_file")
        refused.headers["WWW-Authenticate"] = 'Bearer realm="hsx"'
        return refused

    def _is_known(self, host: str) -> bool:
        name = host.rsplit("]", 1)[0].lstrip("[") if host.startswith("[") else host.rsplit(":", 1)[0]
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    async def _page(self, request: web.Request) -> web.Response:
        body, kind = self._files[request.path]
        return _answer(request, body, kind, charset="utf-8")

    async def _status(self, request: web.Request) -> web.Response:
        if not self._board.data:
            return _refuse(503, "hsx has not said anything yet")
        return _answer(request, self._board.body, "application/json")

    async def _healthz(self, request: web.Request) -> web.Response:
        return _verdict(request, self._board.health())

    async def _readyz(self, request: web.Request) -> web.Response:
        return _verdict(request, self._board.ready())

    async def _metrics(self, request: web.Request) -> web.Response:
        # Numbers that stand still because nobody counts any more would look like a run that does nothing.
        health = self._board.health()
        if not self._board.data or "said nothing" in health["reason"]:
            return _refuse(503, health["reason"])
        response = _answer(request, self._board.metrics(), "text/plain")
        response.headers["Content-Type"] = metrics.CONTENT_TYPE
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.streams >= MOST_STREAMS:
            return _refuse(503, f"{MOST_STREAMS} clients listen already")
        self.streams += 1
        self.silent.clear()
        try:
            return await self._stream(request)
        finally:
            self.streams -= 1
            if not self.streams:
                self.silent.set()

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Sends what happens until the client goes, falls behind, or the run ends."""
        text = request.headers.get("Last-Event-ID", "")
        seen = int(text) if text.isdecimal() and len(text) < 20 else -1
        response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await asyncio.wait_for(response.write(b"retry: 2000\n\n"), WRITE_S)
            while True:
                change = asyncio.ensure_future(self._board.changed())
                try:
                    lines = [b"id: %d\ndata: %b\n\n" % event for event in self._board.events if event[0] > seen]
                    seen = max([seen, *(number for number, _ in self._board.events)])
                    if self._board.ended:
                        lines.append(b"event: ended\ndata: %b\n\n" % self._board.body.plain)
                    if lines:
                        await asyncio.wait_for(response.write(b"".join(lines)), WRITE_S)
                    if self._board.ended:
                        return response
                    done, _ = await asyncio.wait({change}, timeout=BEAT_S)
                    if not done:
                        await asyncio.wait_for(response.write(b": alive\n\n"), WRITE_S)
                finally:
                    change.cancel()
        except TimeoutError:
            # It does not read. An orderly end would wait for it as well.
            if request.transport is not None:
                request.transport.abort()
        except ConnectionError:
            pass
        return response


def _file(name: str) -> bytes:
    return (resources.files("hsx") / "dashboard" / name).read_bytes()


def _answer(request: web.Request, body: Body, kind: str, *, status: int = 200, charset: str | None = None) -> web.Response:
    packed = len(body.plain) > 1000 and "gzip" in request.headers.get("Accept-Encoding", "")
    headers = {**_HEADERS, "Vary": "Accept-Encoding", **({"Content-Encoding": "gzip"} if packed else {})}
    data = body.packed() if packed else body.plain
    return web.Response(body=data, status=status, content_type=kind, charset=charset, headers=headers)


def _verdict(request: web.Request, verdict: dict[str, Any]) -> web.Response:
    return _answer(request, Body(msgspec.json.encode(verdict)), "application/json", status=200 if verdict["ok"] else 503)


def _refuse(status: int, reason: str, *, close: bool = False) -> web.Response:
    body = msgspec.json.encode({"ok": False, "reason": reason})
    response = web.Response(body=body, status=status, content_type="application/json", headers=_HEADERS)
    if close:
        response.force_close()
    return response
