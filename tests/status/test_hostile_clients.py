"""Slow and hostile clients: they are cut off, make way for others, and cost the run nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from hsx.core.lifecycle import State
from hsx.status.guard import IDLE_S
from hsx.status.site import MOST_STREAMS, STALE_S
from hsx.telemetry import Telemetry

if TYPE_CHECKING:
    import aiohttp

Serve = Callable[..., Any]
TOKEN = "0123456789abcdef"


async def connect(port: int, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def until(found: Callable[[], bool]) -> None:
    while not found():  # noqa: ASYNC110 - what is waited for is the state of the server, which sets no event
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    "data", [b"", b"GET /status HT", b"GET /status HTTP/1.1\r\nHost: localhost\r\nX-", b"GET /healthz HTTP/1.1\r\n"]
)
async def test_who_never_ends_a_request_is_cut_off(serve: Serve, data: bytes) -> None:
    async with serve(Telemetry()) as served:
        reader, writer = await connect(served.port, data)
        await until(lambda: len(served.gate) == 1)
        served.clock.now += IDLE_S - 1
        served.gate.sweep()
        assert len(served.gate) == 1
        served.clock.now += 1
        served.gate.sweep()
        assert len(served.gate) == 0
        with suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_who_never_reads_is_cut_off(serve: Serve) -> None:
    telemetry = Telemetry()
    for number in range(3000):
        telemetry.root_space(f"root-{number}", 1)  # a document larger than the kernel takes
    async with serve(telemetry) as served:
        _, writer = await connect(served.port, b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40)
        guarded = next(iter(served.gate._open.values()), None)
        while guarded is None or not guarded.unread():
            await asyncio.sleep(0.005)
            guarded = next(iter(served.gate._open.values()), None)
        served.gate.sweep()
        for _ in range(2):
            served.clock.now += IDLE_S
            served.gate.sweep()
        assert len(served.gate) == 0
        assert served.gate.cut == 1
        writer.close()


async def test_the_longest_idle_makes_way(serve: Serve) -> None:
    async with serve(Telemetry(), most=8) as served:
        held = [await connect(served.port) for _ in range(8)]
        await until(lambda: len(served.gate) == 8)
        for _ in range(5):
            served.clock.now += 0.1
            assert (await served.get("/healthz"))[0] == 200
        assert served.gate.cut == 1  # the client above keeps its one connection
        for _, writer in held:
            writer.close()


async def test_a_crowd_of_half_open_connections_keeps_nobody_out(serve: Serve) -> None:
    async with serve(Telemetry(), most=32) as served:
        held = [await connect(served.port, b"GET /st") for _ in range(200)]
        await until(lambda: served.gate.cut >= 200 - 32)
        assert (await served.get("/healthz"))[0] == 200
        assert len(served.gate) <= 32
        for _, writer in held:
            writer.close()


async def test_long_headers_and_bodies_are_refused(serve: Serve) -> None:
    async with serve(Telemetry()) as served:
        assert (await served.get("/status", **{"X-Long": "x" * 5000}))[0] == 400
        async with served.session.get(f"{served.url}/status", data=b"x" * 10) as answer:
            assert answer.status == 413
        assert b" 413 " in await served.raw(b"GET /status HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\nxx")
        assert b" 400 " in await served.raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n")


async def test_streams_are_bounded(serve: Serve) -> None:
    async with serve(Telemetry()) as served:
        streams = [await served.session.get(f"{served.url}/events") for _ in range(MOST_STREAMS)]
        assert [stream.status for stream in streams] == [200] * MOST_STREAMS
        assert (await served.get("/events"))[0] == 503
        streams.pop().close()
        await until(lambda: served.site.streams < MOST_STREAMS)
        for stream in streams:
            stream.close()


async def test_a_token_is_asked_for_everything_that_tells_something(serve: Serve) -> None:
    async with serve(Telemetry(), token=TOKEN) as served:
        for path in ("/status", "/metrics", "/readyz", "/events"):
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": TOKEN}, {"Authorization": "Bearer é"}):
                assert (await served.get(path, **headers))[0] == 401, path
        assert (await served.get("/status", Authorization=f"Bearer {TOKEN}"))[0] == 200
        assert (await served.get("/healthz"))[0] == 200
        assert (await served.get("/"))[0] == 200


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 421), ("localhost:8470", 200), ("[::1]:8470", 200), ("10.0.0.7", 200)]
)
async def test_a_name_from_elsewhere_is_not_served(serve: Serve, host: str, status: int) -> None:
    async with serve(Telemetry()) as served:
        assert (await served.get("/status", Host=host))[0] == status


async def test_pages_load_nothing_from_elsewhere(serve: Serve) -> None:
    async with serve(Telemetry()) as served:
        for path in ("/", "/dashboard.css", "/dashboard.js"):
            status, _, text = await served.get(path)
            assert status == 200
            assert "https://" not in text
            assert "//cdn" not in text
        async with served.session.get(served.url) as answer:
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


async def test_a_run_that_hangs_is_not_healthy(serve: Serve) -> None:
    telemetry = Telemetry()
    telemetry.phase("extracting")
    telemetry.engine_state(State.READY)
    async with serve(telemetry, live=False) as served:
        assert (await served.get("/healthz"))[0] == (await served.get("/status"))[0] == (await served.get("/metrics"))[0] == 503
        served.say()
        assert (await served.get("/healthz"))[0] == (await served.get("/readyz"))[0] == (await served.get("/metrics"))[0] == 200
        served.clock.now += STALE_S
        hangs = {"ok": False, "reason": "hsx has said nothing for 30 s: it hangs, or was stopped"}
        assert await served.get("/healthz") == await served.get("/readyz") == (503, "application/json", hangs)
        assert (await served.get("/metrics"))[0] == 503
        assert (await served.get("/status"))[0] == 200


async def event(stream: aiohttp.ClientResponse) -> list[bytes]:
    """The next one's id and data; a stream that was silent for long says in between that it lives."""
    while not (line := await stream.content.readline()).startswith(b"id: "):
        assert line, "the stream has ended"
    return [line, await stream.content.readline()]


async def test_events_are_streamed_once_and_in_order(serve: Serve) -> None:
    telemetry = Telemetry()
    telemetry.engine_state(State.STARTING)
    async with serve(telemetry, live=False) as served:
        served.say()
        async with served.session.get(f"{served.url}/events") as stream:
            assert stream.content_type == "text/event-stream"
            assert await stream.content.readline() == b"retry: 2000\n"
            first = await event(stream)
            telemetry.engine_state(State.READY)
            served.say()
            second = await event(stream)
        assert b'"state":"STARTING"' in first[1]
        assert b'"state":"READY"' in second[1]
        last = int(first[0].removeprefix(b"id: "))
        async with served.session.get(f"{served.url}/events", headers={"Last-Event-ID": str(last)}) as stream:
            again = await event(stream)
        assert again == second
        served.board.update(served.board.body.plain, ended=True)
        async with served.session.get(f"{served.url}/events", headers={"Last-Event-ID": str(last + 1)}) as stream:
            text = await stream.text()
        assert "event: ended\ndata: {" in text
