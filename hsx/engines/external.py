"""Ownership `external`: somebody else starts the server; hsx finds it by its epoch record and watches its process.

Both have to see the same processes: a server in another pid namespace (a container of its own) looks dead from here.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import RECORD_NAME
from hsx.engines.process import process_alive, read_record
from hsx.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.epoch import EpochRecord

_POLL_S: Final = 0.5


class ExternalOwner:
    """Attaches to the server on one port; implements `hsx.ports.EngineOwner`.

    Args:
        dump_dir: where `hsx serve` writes `<epoch>/server.json`.
        port: the server's HTTP port, which its record must name.
        wait_s: how long `start` waits for a server to appear.
        poll_s: how often it looks.
    """

    def __init__(self, dump_dir: Path, port: int, wait_s: float, poll_s: float = _POLL_S) -> None:
        self._dump_dir = dump_dir
        self._port = port
        self._wait_s = wait_s
        self._poll_s = poll_s
        self._record: EpochRecord | None = None
        self._situation = ""

    @property
    def restarts(self) -> bool:
        """See the port."""
        return False

    @property
    def situation(self) -> str:
        """What the last look for a server found, in a sentence; "" before the first."""
        return self._situation

    async def start(self) -> EpochRecord:
        """See the port. Waits for a running server; EngineError `epoch_unknown` says why none was found in time."""
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while True:
            try:
                self._record = await asyncio.to_thread(find_server, self._dump_dir, self._port)
            except EngineError as error:
                self._situation = error.message
                if asyncio.get_running_loop().time() >= deadline:
                    raise EngineError("epoch_unknown", f"{error.message}; waited {self._wait_s:g} s") from error
            else:
                self._situation = f"found epoch {self._record.epoch}, pid {self._record.pid}"
                return self._record
            await asyncio.sleep(self._poll_s)

    async def ended(self) -> str:
        """See the port. How it ended is known to its parent alone."""
        record = self._record
        if record is None:
            raise RuntimeError("no server was found")
        await _gone(record, self._poll_s)
        return (
            f"process {record.pid} of epoch {record.epoch} is gone; it is not a child of hsx, so its exit status is not known"
        )

    async def stop(self, grace_s: float) -> None:
        """See the port. Nothing: the server is not hsx's to end."""


def find_server(dump_dir: Path, port: int) -> EpochRecord:
    """The record of the running server on `port`; the youngest process where several claim it. Blocks briefly.

    Raises EngineError `epoch_unknown`: there is no record, none names this port, or its process is gone; the message tells
    which.
    """
    records, unreadable = [], list[str]()
    for path in _folders(dump_dir, unreadable):
        try:
            record = read_record(path / RECORD_NAME)
        except EngineError as error:
            unreadable.append(error.message)
        else:
            records += [record] if record else []
    mine = [record for record in records if record.port == port]
    alive = [record for record in mine if process_alive(record)]
    if alive:
        return max(alive, key=lambda record: record.start_ticks)
    if mine:
        last = max(mine, key=lambda record: record.start_ticks)
        reason = (
            f"no server runs on port {port}: the process of epoch {last.epoch}, pid {last.pid}, is gone"
            f" ({len(mine)} records name this port); start it with hsx serve"
        )
    elif records:
        ports = ", ".join(str(found) for found in sorted({record.port for record in records}))
        reason = f"no epoch record in {dump_dir} names port {port}; found ports {ports}"
    else:
        reason = f"no epoch record in {dump_dir}: no server was started there with hsx serve"
    raise EngineError("epoch_unknown", "; ".join((reason, *unreadable)))


def _folders(dump_dir: Path, unreadable: list[str]) -> list[Path]:
    try:
        return sorted(dump_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable.append(str(error))
        return []


async def _gone(record: EpochRecord, poll_s: float) -> None:
    try:
        pidfd = os.pidfd_open(record.pid)
    except ProcessLookupError:
        return
    except OSError:
        # Old kernels and some sandboxes refuse pidfd_open.
        while process_alive(record):  # noqa: ASYNC110 - the kernel has no event to wait for here
            await asyncio.sleep(poll_s)
        return
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    try:
        loop.add_reader(pidfd, over.set)
        # The pid may have passed to another process before the descriptor was opened.
        if process_alive(record):
            await over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
