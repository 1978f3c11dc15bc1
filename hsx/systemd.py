"""The service manager's side of a run: sd_notify, and a watchdog ping that is tied to real progress."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Final

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_LONGEST_STATUS: Final = 200


class Notifier:
    """Sends state changes to the socket in NOTIFY_SOCKET; does nothing where there is none.

    Failures are logged and otherwise ignored: a run does not end because the service manager is deaf.

    Args:
        environ: the process's environment.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        values = os.environ if environ is None else environ
        address = values.get("NOTIFY_SOCKET", "")
        # A leading @ spells an abstract socket, whose address begins with a zero byte.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(values)

    def ready(self, status: str = "") -> None:
        """READY=1: the job is open and its dataset indexed. Whether the server is up yet is told by STATUS."""
        self._send("READY=1", f"STATUS={_one_line(status)}" if status else "")

    def status(self, text: str) -> None:
        """STATUS: one line for `systemctl status`."""
        self._send(f"STATUS={_one_line(text)}")

    def reloading(self) -> None:
        """RELOADING=1: the job file is read again; `ready` says that it was."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def ping(self) -> None:
        """WATCHDOG=1."""
        self._send("WATCHDOG=1")

    def stopping(self, status: str = "") -> None:
        """STOPPING=1: the drain has begun."""
        self._send("STOPPING=1", f"STATUS={_one_line(status)}" if status else "")

    def extend_timeout(self, seconds: float) -> None:
        """EXTEND_TIMEOUT_USEC: start-up or stop needs `seconds` more from now; to be repeated while that is so."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    async def keep_alive(self, is_progressing: Callable[[], bool]) -> None:
        """Pings at half the watchdog's interval for as long as `is_progressing` says so; runs until it is cancelled.

        A wedged event loop pings no more by itself. A loop that turns while nothing advances, and nothing is being done
        about it, must not ping either: that is what `is_progressing` is for. Returns at once without a watchdog.
        """
        if self.watchdog_s is None:
            return
        while True:
            if is_progressing():
                self.ping()
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as channel:
                channel.sendto("\n".join(filter(None, lines)).encode(), self._address)
        except OSError as error:
            structlog.get_logger().warning("systemd.notify_failed", message=lines[0], error=str(error))


def _watchdog_s(values: Mapping[str, str]) -> float | None:
    """The watchdog's interval in seconds, where it is set and meant for this process."""
    text, pid = values.get("WATCHDOG_USEC", ""), values.get("WATCHDOG_PID", "")
    if not text.isdecimal() or int(text) == 0 or (pid and pid != str(os.getpid())):
        return None
    return int(text) / 1e6


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST_STATUS]
