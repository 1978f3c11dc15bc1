"""The HTTP face of the reference engine: the endpoints, statuses and messages of SGLang's that hsx meets."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from aiohttp import web

from hsx.testing.faults import FAULTS
from hsx.testing.reference_scheduler import Work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hsx.testing.faults import Faults
    from hsx.testing.reference_scheduler import Scheduler

_RESERVED: Final = 6
"""Positions that the server keeps for itself: prompts of context - 6 tokens and more are refused."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the server says of itself, and its limits.

    Attributes:
        model_path: as given.
        version: of the engine.
        vocab_size: of the model.
        context_length: of the model.
        chunk: tokens per step.
        max_queued: prompts that may wait; further ones are turned away with 503. None: no limit.
        radix_cache: pretends to keep a prefix cache, as a server does that was started without --disable-radix-cache.
        allow_faults: whether `/_fault` is there.
    """

    model_path: str
    version: str
    vocab_size: int
    context_length: int
    chunk: int
    max_queued: int | None
    radix_cache: bool
    allow_faults: bool


class Face:
    """The handlers. All state is on the event loop; the schedulers' threads only call back into it.

    Args:
        settings: see there.
        schedulers: one for each data-parallel rank; requests that name none go to them in turn.
        faults: the armed faults.
    """

    def __init__(self, settings: Settings, schedulers: Sequence[Scheduler], faults: Faults) -> None:
        self._settings = settings
        self._schedulers = schedulers
        self._turns = itertools.cycle(schedulers)
        self._faults = faults
        self._flying: dict[str, Work] = {}
        self._seen: set[bytes] = set()
        self._deserted: set[asyncio.Task[Work]] = set()

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        if self._settings.allow_faults:
            app.router.add_post("/_fault", self._arm)
            app.router.add_get("/_fault", self._struck)
            app.router.add_delete("/_fault", self._disarm)
        return app

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        try:
            body = msgspec.json.decode(await request.read())
            rid, ids, rank = str(body["rid"]), body["input_ids"], body.get("routed_dp_rank")
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            return _error(400, f"body is no generate request: {error!r}")
        ranks = len(self._schedulers)
        if rank is not None and (type(rank) is not int or not 0 <= rank < ranks):
            return _error(400, f"routed_dp_rank={rank} out of range [0, {ranks})")
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            return _error(400, "input_ids: elements must be int")
        if not ids:
            return _error(400, "input_ids cannot be empty.")
        if len(ids) >= settings.context_length:
            return _error(
                400,
                f"The input ({len(ids)} tokens) is longer than the model's context length ({settings.context_length} tokens).",
            )
        limit = settings.context_length - _RESERVED
        if len(ids) >= limit:
            return _error(400, f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({limit} tokens).")
        if rid in self._flying:
            return _error(400, f"Duplicate request ID detected: {rid}")
        for kind, status in (("http_400", 400), ("http_500", 500), ("http_503", 503)):
            if self._faults.take(kind, rid):
                return _error(status, f"fault {kind}")
        if settings.max_queued is not None and self._waiting >= settings.max_queued:
            return web.json_response({"detail": "The request queue is full."}, status=503)
        if self._faults.take("connection_reset_before", rid):
            return _cut(request)
        if self._faults.take("connection_reset_during", rid):
            return await self._desert(request, rid, ids)
        work = await self._prefill(rid, ids, rank=rank)
        if self._faults.take("connection_reset_after", rid):
            return _cut(request)
        body = msgspec.json.encode(self._answer(work))
        if self._faults.take("answer_cut", rid):
            return await _cut_short(request, body)
        return web.json_response(body=body)

    async def _desert(self, request: web.Request, rid: str, ids: list[int]) -> web.StreamResponse:
        """Cuts the connection after the first chunk; the prefill is a task of its own and goes on."""
        begun = asyncio.Event()
        task = asyncio.create_task(self._prefill(rid, ids, begun))
        self._deserted.add(task)
        task.add_done_callback(self._deserted.discard)
        await begun.wait()
        return _cut(request)

    async def _prefill(self, rid: str, ids: list[int], begun: asyncio.Event | None = None, rank: int | None = None) -> Work:
        loop, finished = asyncio.get_running_loop(), asyncio.Event()
        prompt = np.asarray(ids, dtype=np.int64).clip(-1, 2**31 - 1).astype(np.int32)
        work = Work(rid, prompt, lambda: _wake(loop, finished))
        if begun is not None:
            work.begun = lambda: _wake(loop, begun)
        if self._settings.radix_cache:
            key = prompt.tobytes()
            work.skip = len(ids) - 1 if key in self._seen else 0
            self._seen.add(key)
        self._flying[rid] = work
        scheduler = next(self._turns) if rank is None else self._schedulers[rank]
        scheduler.submit(work)
        try:
            await finished.wait()
        except asyncio.CancelledError:
            # The client is gone: its prompt is cut, and its rid is free again.
            scheduler.abort(work)
            raise
        finally:
            del self._flying[rid]
        return work

    def _answer(self, work: Work) -> dict[str, Any]:
        if work.aborted:
            # SGLang leaves the counts out of an aborted request's answer.
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            return {"text": "", "meta_info": {"id": work.rid, "finish_reason": reason, "completion_tokens": 0}}
        prompt, cached = len(work.ids), work.skip
        lie = self._faults.take("wrong_prompt_tokens", work.rid)
        prompt += int(lie.number(1)) if lie else 0
        lie = self._faults.take("cached_tokens", work.rid)
        cached += int(lie.number(1)) if lie else 0
        meta = {
            "id": work.rid,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": prompt,
            "completion_tokens": 0,
            "cached_tokens": cached,
            "num_retractions": work.retractions,
        }
        if self._faults.take("no_counts", work.rid):
            del meta["cached_tokens"]
        return {"text": "", "output_ids": [], "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        prefix = str((await request.json()).get("rid", ""))
        for rid, work in list(self._flying.items()):
            if rid.startswith(prefix):
                for scheduler in self._schedulers:  # one of them has it
                    scheduler.abort(work)
        return web.Response()

    async def _server_info(self, _request: web.Request) -> web.Response:
        settings = self._settings
        return web.json_response(
            {
                "model_path": settings.model_path,
                "version": settings.version,
                "vocab_size": settings.vocab_size,
                "max_req_input_len": settings.context_length - _RESERVED,
                "disable_radix_cache": not settings.radix_cache,
                "chunked_prefill_size": settings.chunk,
                "max_queued_requests": settings.max_queued,
                "pp_size": 1,
                "tp_size": 1,
                "dp_size": len(self._schedulers),
                "speculative_algorithm": None,
                "allow_auto_truncate": False,
                "disaggregation_mode": "null",
            }
        )

    async def _model_info(self, _request: web.Request) -> web.Response:
        return web.json_response({"model_path": self._settings.model_path, "is_generation": True})

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _arm(self, request: web.Request) -> web.Response:
        try:
            self._faults.arm(**await request.json())
        except (TypeError, ValueError) as error:
            return _error(400, str(error))
        return web.Response()

    async def _disarm(self, request: web.Request) -> web.Response:
        self._faults.clear(request.query.get("kind", ""), request.query.get("match", ""))
        return web.Response()

    async def _struck(self, _request: web.Request) -> web.Response:
        says = {kind: fault.says for kind, fault in FAULTS.items()}
        return web.json_response({"struck": self._faults.struck(), "waiting": self._waiting, "faults": says})

    @property
    def _waiting(self) -> int:
        return sum(scheduler.waiting for scheduler in self._schedulers)


def _wake(loop: asyncio.AbstractEventLoop, finished: asyncio.Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(finished.set)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)


async def _cut_short(request: web.Request, body: bytes) -> web.StreamResponse:
    """Announces the whole body, sends half of it and closes the connection."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await response.prepare(request)
    await response.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return response


def _cut(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)
