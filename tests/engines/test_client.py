"""What the client makes of every answer, and of every lack of one: the server here says what the test wants."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import select
import socket
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from hsx.core.invariants import Answer
from hsx.core.marker import Marker
from hsx.engines import sglang
from hsx.engines.sglang import Limits, SGLangClient
from hsx.errors import EngineError, RunError, SampleError
from hsx.testing.commands import PATIENCE_S
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BACKLOG_TRIES = 64
"""Connections that are begun, at most, until a server that accepts none has no room for another."""
MARKER = Marker("0123abcd", 7, 1, 3)
META: dict[str, Any] = {
    "id": str(MARKER),
    "finish_reason": {"type": "length", "length": 0},
    "prompt_tokens": 3,
    "cached_tokens": 0,
    "num_retractions": 0,
}
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "/models/m",
    "max_req_input_len": 4090,
    "disable_radix_cache": True,
    "pp_size": 1,
    "dp_size": 1,
    "speculative_algorithm": None,
    "allow_auto_truncate": False,
    "disaggregation_mode": "null",
}


@asynccontextmanager
async def answering(handler: Handler, limits: Limits | None = None) -> AsyncIterator[SGLangClient]:
    """A client of a server that answers every request by `handler`."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    client = SGLangClient("127.0.0.1", port, limits)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def says(status: int, body: object) -> Handler:
    """Answers everything alike; a `str` is sent as it is."""

    async def handler(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    return handler


def meta(**changes: object) -> dict[str, Any]:
    """A good answer with changes to its meta_info; a value of ... takes the key out."""
    return {"meta_info": {key: value for key, value in {**META, **changes}.items() if value is not ...}}


async def test_good_answer() -> None:
    """Counts are read, and the request is as documented."""
    seen: list[Any] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, await request.json()))
        return web.json_response(meta(cached_tokens=2, num_retractions=1, prompt_tokens=5))

    async with answering(handler) as client:
        answer = await client.prefill(MARKER, np.array([5, 6, 7], dtype=np.int32), PATIENCE_S)
    assert answer == Answer(prompt_tokens=5, cached_tokens=2, finish_reason="length", retractions=1)
    path, body = seen[0]
    assert path == "/generate"
    assert body["rid"] == str(MARKER)
    assert body["input_ids"] == [5, 6, 7]
    assert body["sampling_params"]["max_new_tokens"] == 0
    assert body["stream"] is False


@pytest.mark.parametrize(
    ("status", "body", "error", "kind", "says_so"),
    [
        (400, {"error": {"message": "input_ids cannot be empty."}}, SampleError, "request_refused", "cannot be empty"),
        (
            400,
            {"error": {"message": f"Duplicate request ID detected: {MARKER}"}},
            SampleError,
            "request_duplicate",
            "Duplicate",
        ),
        (400, {"object": "error", "message": "1 validation error"}, SampleError, "request_refused", "validation error"),
        (400, "not json", SampleError, "request_refused", "not json"),
        (413, "too large", SampleError, "request_refused", "413"),
        (422, {"detail": [{"msg": "bad"}]}, SampleError, "request_refused", "bad"),
        (500, "Internal Server Error", SampleError, "request_failed", "500"),
        (502, "", SampleError, "request_failed", "502"),
        (503, {"detail": "The request queue is full."}, EngineError, "server_full", "queue is full"),
        (401, {"error": "Unauthorized"}, EngineError, "server_protocol", "Unauthorized"),
        (404, {"detail": "Not Found"}, EngineError, "server_protocol", "Not Found"),
        (204, "", EngineError, "server_protocol", "204"),
        (200, "not json", EngineError, "server_protocol", "not json"),
        (200, [], EngineError, "server_protocol", "meta_info"),
        (200, {"text": ""}, EngineError, "server_protocol", "meta_info"),
        (200, meta(prompt_tokens=...), SampleError, "answer_invalid", "prompt_tokens"),
        (200, meta(cached_tokens=...), SampleError, "answer_invalid", "cached_tokens is None"),
        (200, meta(cached_tokens=None), SampleError, "answer_invalid", "cached_tokens"),
        (200, meta(cached_tokens=0.0), SampleError, "answer_invalid", "cached_tokens"),
        (200, meta(cached_tokens=False), SampleError, "answer_invalid", "cached_tokens"),
        (200, meta(num_retractions=...), SampleError, "answer_invalid", "num_retractions"),
        (200, meta(finish_reason=None), EngineError, "server_protocol", "finish_reason"),
        (200, meta(finish_reason={}), EngineError, "server_protocol", "finish_reason"),
        (200, meta(id="hsx1-0123abcd-8-1-3"), EngineError, "server_protocol", "expected this one"),
        (
            200,
            meta(finish_reason={"type": "abort", "message": "Abort in waiting queue"}, prompt_tokens=...),
            SampleError,
            "request_failed",
            "Abort in waiting queue",
        ),
    ],
)
async def test_refusals(status: int, body: object, error: type[SampleError | EngineError], kind: str, says_so: str) -> None:
    """Each answer has its error, which carries the server's words and names the marker."""
    async with answering(says(status, body)) as client:
        with pytest.raises(error) as caught:
            await client.prefill(MARKER, [1, 2, 3], PATIENCE_S)
    assert caught.value.kind == kind
    assert says_so in caught.value.message
    assert str(MARKER) in caught.value.message


async def test_abort_with_counts_is_an_answer() -> None:
    """An abort that was counted is judged by the invariants, not by the client."""
    async with answering(says(200, meta(finish_reason={"type": "abort"}))) as client:
        assert (await client.prefill(MARKER, [1, 2, 3], PATIENCE_S)).finish_reason == "abort"


async def test_nobody_listens() -> None:
    """A refused connection means that the server is gone."""
    client = SGLangClient("127.0.0.1", free_port())
    assert not await client.answers()
    for call in (client.prefill(MARKER, [1], PATIENCE_S), client.facts(), client.abort(MARKER)):
        with pytest.raises(EngineError) as caught:
            await call
        assert caught.value.kind == "server_gone"
    await client.close()


async def test_no_file_descriptor_is_left() -> None:
    """hsx's own want of files is not taken for a server that is gone: it ends the run, by name."""
    async with answering(says(200, meta())) as client:
        # The session and its resolver first, so that the connection alone lacks a file.
        client._open()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            for call in (client.prefill(MARKER, [1, 2, 3], PATIENCE_S), client.facts(), client.answers()):
                with pytest.raises(RunError, match="file descriptor") as caught:
                    await call
                assert caught.value.kind == "out_of_files"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert (await client.prefill(MARKER, [1, 2, 3], PATIENCE_S)).prompt_tokens == 3


@pytest.mark.parametrize(
    ("number", "nobody"),
    [(errno.ECONNREFUSED, True), (errno.EHOSTUNREACH, True), (None, True), (errno.EACCES, False), (errno.ENOBUFS, False)],
)
def test_not_every_failure_to_connect_means_that_the_server_is_gone(number: int | None, nobody: bool) -> None:
    """What the system at hsx's own end refuses fails the request alone; such refusals cannot be provoked portably."""
    key = ConnectionKey("127.0.0.1", 30000, False, True, None, None, None)
    cause = OSError("several reasons") if number is None else OSError(number, os.strerror(number))
    assert sglang.is_nobody(aiohttp.ClientConnectorError(key, cause)) is nobody
    assert not sglang.is_nobody(aiohttp.ClientOSError(errno.ECONNRESET, "was up, and broke"))


async def test_a_host_that_has_no_address_is_gone() -> None:
    """A name that does not resolve."""
    client = SGLangClient("nobody.invalid", 30000)
    with pytest.raises(EngineError) as caught:
        await client.prefill(MARKER, [1], PATIENCE_S)
    assert caught.value.kind == "server_gone"
    await client.close()


@pytest.mark.parametrize("headers_first", [False, True])
async def test_connection_lost(headers_first: bool) -> None:
    """A connection cut before or within the answer fails the request alone."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "100"})
        if headers_first:
            await response.prepare(request)
            await response.write(b"{")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with answering(handler) as client:
        with pytest.raises(SampleError) as caught:
            await client.prefill(MARKER, [1], PATIENCE_S)
    assert caught.value.kind == "request_failed"


async def test_no_answer_in_time() -> None:
    """A silent server is given its time and no more; settings asked in vain mean that it is gone."""
    release = asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        await release.wait()
        return web.Response()

    async with answering(handler, Limits(question_s=0.05)) as client:
        with pytest.raises(SampleError) as caught:
            await client.prefill(MARKER, [1], 0.05)
        assert caught.value.kind == "request_timeout"
        with pytest.raises(EngineError) as asked:
            await client.facts()
        assert asked.value.kind == "server_gone"
        assert not await client.answers()
        await client.abort(MARKER)
        release.set()


async def test_cancellation_passes() -> None:
    """Cancelling a prefill is not an error of the request."""
    reached, release = asyncio.Event(), asyncio.Event()

    async def handler(_request: web.Request) -> web.Response:
        reached.set()
        await release.wait()
        return web.Response()

    async with answering(handler) as client:
        task = asyncio.create_task(client.prefill(MARKER, [1], PATIENCE_S))
        await reached.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()


async def test_concurrency_is_not_throttled_by_the_pool() -> None:
    """As many prefills as the limit says are in flight at once, and an abort still gets through."""
    together, aborted = asyncio.Barrier(20), asyncio.Event()

    async def handler(request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            aborted.set()
            return web.Response()
        await together.wait()
        await aborted.wait()
        return web.json_response(meta(id=(await request.json())["rid"]))

    async with answering(handler, Limits(concurrency=20)) as client:
        markers = [Marker("0123abcd", index, 1, 3) for index in range(20)]
        tasks = [asyncio.create_task(client.prefill(marker, [1, 2, 3], PATIENCE_S)) for marker in markers]
        await client.abort(MARKER)
        answers = await asyncio.gather(*tasks)
    assert len(answers) == 20


async def test_facts_of_a_fit_server() -> None:
    """The limit is what the scheduler accepts: one below the length that it refuses."""
    async with answering(says(200, INFO)) as client:
        facts = await client.facts()
    assert (facts.engine_version, facts.model, facts.max_prompt_tokens) == ("0.5.23", "/models/m", 4089)
    assert facts.vocab_size is None
    assert facts.problems == ()


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, 1),
        ({"dp_size": 4}, 4),
        ({"dp_size": 4, "enable_dp_attention": True}, 4),
        ({"dp_size": 1, "attn_dp_size": 8, "enable_dp_attention": True}, 8),
        ({"dp_size": 2, "attn_dp_size": 1}, 2),
    ],
)
async def test_data_parallel_ranks_are_counted_with_or_without_dp_attention(settings: dict[str, object], ranks: int) -> None:
    async with answering(says(200, {**INFO, **settings})) as client:
        facts = await client.facts()
    assert (facts.dp_size, facts.problems) == (ranks, ())


async def test_a_server_that_does_not_say_how_many_ranks_it_has_is_refused() -> None:
    async with answering(says(200, {**INFO, "dp_size": None})) as client:
        with pytest.raises(EngineError, match="dp_size None, attn_dp_size 1; expected integers") as caught:
            await client.facts()
    assert caught.value.kind == "server_protocol"


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("disable_radix_cache", False, "--disable-radix-cache"),
        ("disable_radix_cache", ..., "--disable-radix-cache"),
        ("pp_size", 2, "--pp-size 1"),
        ("speculative_algorithm", "EAGLE3", "--speculative-algorithm"),
        ("allow_auto_truncate", True, "--allow-auto-truncate"),
        ("disaggregation_mode", "prefill", "--disaggregation-mode"),
    ],
)
async def test_unfit_settings(name: str, value: object, remedy: str) -> None:
    """Each unfit setting is one problem that names itself and the argument to change."""
    info = {key: setting for key, setting in {**INFO, name: value}.items() if setting is not ...}
    async with answering(says(200, info)) as client:
        problems = (await client.facts()).problems
    assert len(problems) == 1
    assert name in problems[0]
    assert remedy in problems[0]


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, {**INFO, "max_req_input_len": None}, "server_protocol"),
        (200, {**INFO, "version": 5}, "server_protocol"),
        (200, "hello", "server_protocol"),
        (404, {"detail": "Not Found"}, "server_protocol"),
        (500, "", "server_gone"),
    ],
)
async def test_strange_facts(status: int, body: object, kind: str) -> None:
    """A server that does not say what hsx must know is not used."""
    async with answering(says(status, body)) as client:
        with pytest.raises(EngineError) as caught:
            await client.facts()
    assert caught.value.kind == kind


async def test_ipv6_address() -> None:
    """An IPv6 host is put in brackets; nobody listens there."""
    client = SGLangClient("::1", free_port())
    with pytest.raises(EngineError, match=r"http://\[::1\]:"):
        await client.facts()
    await client.close()


async def test_a_connection_that_does_not_come_up_is_not_a_late_answer() -> None:
    """The server lets nobody in: its backlog is full."""
    with socket.socket() as server, ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(BACKLOG_TRIES):
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(server.getsockname())
            if not select.select([], [other], [], 0.5)[1]:
                break
        else:
            pytest.fail("the backlog is never full")
        client = SGLangClient("127.0.0.1", server.getsockname()[1], Limits(connect_s=0.2))
        try:
            with pytest.raises(SampleError, match=r"connection to \S+ could not be made within 0\.2 s") as error:
                await client.prefill(MARKER, [1, 2, 3], 600.0)
            assert error.value.kind == "request_failed"
        finally:
            await client.close()
