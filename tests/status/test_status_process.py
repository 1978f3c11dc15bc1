"""The process that serves the status: it tells what the run says, outlives nothing, and comes back when it dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any

import aiohttp

from hsx.engines.process import start_ticks
from hsx.status import StatusServer
from hsx.status.channel import DOCUMENT, Frame, Receiver, Sender
from hsx.telemetry import Telemetry


def blocking(code: str) -> bytes:
    """What a program of its own prints; nothing else goes on here meanwhile."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout


async def ask(url: str) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/status") as answer:
        return dict(await answer.json())


async def until_status(url: str, field: str, name: str) -> None:
    while True:
        with suppress(aiohttp.ClientError):
            if (await ask(url))[field]["name"] == name:
                return
        await asyncio.sleep(0.02)


async def test_it_answers_while_the_run_does_nothing() -> None:
    telemetry = Telemetry()
    server = StatusServer(telemetry, dict, "127.0.0.1", 0)
    url = await server.start()
    assert (await ask(url))["phase"]["name"] == "starting"
    telemetry.phase("extracting")
    server.tell()
    assert (await ask(url))["phase"]["name"] == "extracting"
    # It runs while this thread, and with it the event loop, stands still.
    code = f"import urllib.request; print(urllib.request.urlopen('{url}/healthz').status)"
    assert blocking(code) == b"200\n"
    await server.stop()


async def test_it_comes_back_when_it_dies() -> None:
    telemetry = Telemetry()
    server = StatusServer(telemetry, dict, "127.0.0.1", 0)
    url = await server.start()
    await ask(url)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    telemetry.phase("draining")
    await until_status(url, "phase", "draining")
    assert [event["event"] for event in telemetry.log.last] == ["status.failed"]
    await server.stop()


async def test_it_hears_no_signal_and_ends_with_the_run() -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0)
    url = await server.start()
    await ask(url)
    pid = server.pid
    assert pid is not None
    ticks = start_ticks(pid) or 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert (await ask(url))["version"] == 1
    await server.stop()
    assert start_ticks(pid) != ticks


async def test_a_stopped_process_holds_nobody_up() -> None:
    server = StatusServer(Telemetry(), dict, "127.0.0.1", 0)
    url = await server.start()
    await ask(url)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    for _ in range(2000):  # more than the socket between them takes
        server.tell()
    os.kill(server.pid, signal.SIGCONT)
    assert (await ask(url))["version"] == 1
    await server.stop()


def test_frames_are_whole_however_slowly_they_are_taken() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Sender(ours), Receiver(theirs)
    first, second = Frame(DOCUMENT, b"a" * 5_000_000), Frame(DOCUMENT, b"b")
    assert sender.send(first)
    assert not sender.send(second)  # left out: the first is on its way
    taken: list[Frame] = []
    while not sender.flush():
        taken += receiver.take()
    assert sender.send(second)
    sender.close()
    while not receiver.ended:
        taken += receiver.take()
    assert taken == [first, second]
    theirs.close()
