"""sd_notify, with a real datagram socket at the other end."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING

import pytest
import structlog

from hsx.systemd import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """The service manager's socket, and what it puts into NOTIFY_SOCKET."""
    name = f"@hsx-test-{secrets.token_hex(8)}" if request.param == "abstract" else str(tmp_path / "notify")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as channel:
        channel.bind("\0" + name[1:] if name.startswith("@") else name)
        channel.setblocking(False)
        yield channel, name


def received(channel: socket.socket) -> list[str]:
    messages = []
    with suppress(BlockingIOError):
        while True:
            messages.append(channel.recv(4096).decode())
    return messages


def test_the_states_of_a_run(manager: tuple[socket.socket, str]) -> None:
    channel, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("extracting")
    notifier.ready()
    notifier.status("samples 1/2")
    notifier.ping()
    notifier.extend_timeout(1.5)
    notifier.stopping("draining")
    assert received(channel) == [
        "READY=1\nSTATUS=extracting",
        "READY=1",
        "STATUS=samples 1/2",
        "WATCHDOG=1",
        "EXTEND_TIMEOUT_USEC=1500000",
        "STOPPING=1\nSTATUS=draining",
    ]


def test_a_status_cannot_smuggle_in_a_state(manager: tuple[socket.socket, str]) -> None:
    channel, name = manager
    Notifier({"NOTIFY_SOCKET": name}).status("line\nREADY=1\n" + "x" * 500)
    (message,) = received(channel)
    assert "\n" not in message
    assert message.startswith("STATUS=line READY=1 xxx")
    assert len(message) < 250


def test_without_a_service_manager_nothing_happens() -> None:
    notifier = Notifier({})
    notifier.ready()
    assert notifier.watchdog_s is None


def test_a_deaf_service_manager_is_logged_and_otherwise_ignored(tmp_path: Path) -> None:
    with structlog.testing.capture_logs() as events:
        Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
    assert [(event["event"], event["message"]) for event in events] == [("systemd.notify_failed", "READY=1")]


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdogs_interval(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_s == seconds


async def next_message(channel: socket.socket) -> str:
    return (await asyncio.get_running_loop().sock_recv(channel, 4096)).decode()


async def test_the_ping_follows_progress(manager: tuple[socket.socket, str]) -> None:
    """No number of turns of the loop makes a ping while the run says that it does not advance."""
    channel, name = manager
    asked = asyncio.Event()
    progressing = False
    questions = 0

    def is_progressing() -> bool:
        nonlocal questions
        questions += 1
        if questions == 5:
            asked.set()
        return progressing

    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "2000"})
    pinging = asyncio.create_task(notifier.keep_alive(is_progressing))
    await asked.wait()
    assert received(channel) == []
    progressing = True
    assert await next_message(channel) == "WATCHDOG=1"
    assert await next_message(channel) == "WATCHDOG=1"
    pinging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pinging


async def test_without_a_watchdog_there_is_nothing_to_keep_alive() -> None:
    await Notifier({}).keep_alive(lambda: True)
