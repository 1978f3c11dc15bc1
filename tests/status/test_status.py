"""The status endpoint, over real HTTP."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hsx import __version__
from hsx.core.lifecycle import State
from hsx.errors import RunError
from hsx.records import Counts
from hsx.status import VERSION, StatusServer
from hsx.telemetry import Telemetry

KEYS = {
    "version",
    "job",
    "progress",
    "engine",
    "in_flight",
    "staging",
    "roots",
    "intake",
    "invariants",
    "canaries",
    "failed_attempts",
    "quarantine",
    "last_errors",
    "versions",
    "ready",
    "time",
    "phase",
    "history",
    "events",
    "health",
}


Serve = Callable[..., Any]


async def test_the_status_document(serve: Serve) -> None:
    telemetry = Telemetry()
    telemetry.job_began("job", "aabbccdd", "/store", Counts(3, 0, 0, 0, 30, 0, 0))
    telemetry.engine_state(State.READY)
    telemetry.gauges(2, 20, 200)
    async with serve(telemetry, lambda: {"limits": {"requests": 4}, "versions": {"engine": "x"}}) as served:
        status, content_type, document = await served.get("/status")
    assert (status, content_type) == (200, "application/json")
    assert document["version"] == VERSION
    assert KEYS | {"limits"} == set(document)
    assert document["job"]["name"] == "job"
    assert document["progress"]["samples"]["total"] == 3
    assert document["in_flight"] == {"requests": 2, "tokens": 20}
    assert document["versions"]["hsx"] == __version__
    assert document["versions"]["engine"] == "x"  # tables are merged, not replaced


async def test_ready_only_while_the_engine_is(serve: Serve) -> None:
    telemetry = Telemetry()
    async with serve(telemetry) as served:
        assert await served.get("/readyz") == (503, "application/json", {"ok": False, "reason": "engine is STOPPED"})
        telemetry.engine_state(State.READY)
        assert await served.get("/readyz") == (200, "application/json", {"ok": True, "reason": ""})
        telemetry.engine_state(State.BACKOFF, "nothing came out")
        assert (await served.get("/readyz"))[2] == {"ok": False, "reason": "engine is BACKOFF: nothing came out"}


async def test_not_ready_while_there_is_no_room(serve: Serve) -> None:
    telemetry = Telemetry()
    telemetry.engine_state(State.READY)
    telemetry.intake_paused("roots_full", "free 2 MB on root a")
    async with serve(telemetry) as served:
        assert await served.get("/readyz") == (
            503,
            "application/json",
            {"ok": False, "reason": "roots_full: free 2 MB on root a"},
        )
        telemetry.intake_resumed("roots_full")
        assert (await served.get("/readyz"))[0] == 200


async def test_the_run_may_say_itself_whether_it_is_ready(serve: Serve) -> None:
    telemetry = Telemetry()
    telemetry.engine_state(State.READY)
    async with serve(telemetry, lambda: {"ready": {"ok": False, "reason": "draining"}}) as served:
        assert await served.get("/readyz") == (503, "application/json", {"ok": False, "reason": "draining"})


async def test_healthy_while_the_loop_turns(serve: Serve) -> None:
    async with serve(Telemetry()) as served:
        assert await served.get("/healthz") == (200, "application/json", {"ok": True, "reason": ""})


async def test_metrics_are_what_prometheus_reads(serve: Serve) -> None:
    telemetry = Telemetry()
    async with serve(telemetry) as served:
        status, content_type, text = await served.get("/metrics")
    assert (status, content_type) == (200, "text/plain")
    assert "hsx_samples_committed" in {family.name for family in text_string_to_metric_families(text)}


async def test_it_is_read_only_and_knows_no_other_path() -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0)
    url = await server.start()
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/status") as answer:
            assert answer.status == 405
        async with session.get(f"{url}/nothing") as answer:
            assert answer.status == 404
    await server.stop()


async def test_a_port_that_is_taken_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = StatusServer(Telemetry(), dict, "127.0.0.1", port)
        with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1:{port}: .*; set status.port") as caught:
            await server.start()
    assert caught.value.kind == "status_failed"
    await server.stop()


async def test_an_address_that_is_not_here_is_a_clear_error() -> None:
    with pytest.raises(RunError, match=r"cannot listen on 192\.0\.2\.1:0") as caught:
        await StatusServer(Telemetry(), dict, "192.0.2.1", 0).start()
    assert caught.value.kind == "status_failed"


async def test_stopping_frees_the_port_and_may_be_repeated() -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0)
    port = int((await server.start()).rpartition(":")[2])
    await server.stop()
    await server.stop()
    again = StatusServer(Telemetry(), dict, "127.0.0.1", port)
    assert (await again.start()) == f"http://127.0.0.1:{port}"
    await again.stop()
