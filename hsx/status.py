"""The HTTP status endpoint of a run: read-only, on loopback, answered from memory."""

from __future__ import annotations

import asyncio
import platform
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from hsx import __version__, metrics
from hsx.core.lifecycle import State
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hsx.telemetry import Telemetry

VERSION: Final = 1
"""Version of the status document. Added fields do not change it; renamed, removed or redefined ones do."""


class StatusServer:
    """Serves `/status`, `/healthz`, `/readyz` and `/metrics`.

    Args:
        telemetry: what the run counts.
        facts: returns what the run knows beyond that, merged into the document by top-level key (a table into a table): limits,
            versions, and `ready`: `{"ok": bool, "reason": str}`. Must not block.
        host: address to bind.
        port: port to bind; 0 takes any free one.
    """

    def __init__(self, telemetry: Telemetry, facts: Callable[[], dict[str, Any]], host: str, port: int) -> None:
        self._telemetry = telemetry
        self._facts = facts
        self._host = host
        self._port = port
        self._registry = metrics.registry_of(telemetry)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Binds and serves; returns the base URL. Raises RunError `status_failed` where the address cannot be bound."""
        app = web.Application()
        app.router.add_get("/status", self._status)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise RunError(
                "status_failed",
                f"status endpoint cannot listen on {self._host}:{self._port}: {error.strerror or error}; "
                "set status.port to a free port, to 0 for any, or status.enabled = false",
            ) from error
        self._runner = runner
        port = runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{port}"

    async def stop(self) -> None:
        """Closes the port and its connections. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def document(self) -> dict[str, Any]:
        """The status document."""
        document: dict[str, Any] = {"version": VERSION, **self._telemetry.snapshot()}
        document["versions"] = {"hsx": __version__, "python": platform.python_version()}
        for key, value in self._facts().items():
            merged = document.get(key)
            document[key] = {**merged, **value} if isinstance(merged, dict) and isinstance(value, dict) else value
        document.setdefault("ready", _ready(document["engine"], document["intake"]))
        return document

    async def _status(self, _request: web.Request) -> web.Response:
        return _json(self.document())

    async def _healthz(self, _request: web.Request) -> web.Response:
        # Reaching this line is the health: the event loop turns.
        await asyncio.sleep(0)
        return _json({"ok": True})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = self.document()["ready"]
        return _json(ready, status=200 if ready["ok"] else 503)

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(body=metrics.render(self._registry), headers={"Content-Type": metrics.CONTENT_TYPE})


def _ready(engine: dict[str, Any], intake: dict[str, Any]) -> dict[str, Any]:
    """Ready means that samples flow: the engine passed its boot gate, and there is room for them."""
    if intake["paused"]:
        return {"ok": False, "reason": "; ".join(f"{pause['kind']}: {pause['message']}" for pause in intake["pauses"])}
    if engine["state"] == State.READY.value:
        return {"ok": True, "reason": ""}
    why = engine["waiting_for"] or engine["reason"]
    because = f": {why}" if why else ""
    return {"ok": False, "reason": f"engine is {engine['state']}{because}"}


def _json(document: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), status=status, content_type="application/json")
