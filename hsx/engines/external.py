"""Ownership `external`: somebody else starts the server; hsx finds it by its epoch record and watches its process.

Both have to see the same processes: a server in another pid namespace (a container of its own) looks dead from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import TYPE_CHECKING, Final

from hsx.engines.leftovers import SHARED, remember, sweep_shared_memory
from hsx.engines.listeners import Hold, holds_port
from hsx.engines.process import descendants, process_alive
from hsx.engines.records import bystander, look_up
from hsx.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.epoch import EpochRecord
    from hsx.engines.listeners import Finding

_POLL_S: Final = 0.5
_REMEMBER_S: Final = 10.0
"""How often hsx looks at what the server holds in /dev/shm, so that it can be removed should the server be killed."""


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
                record, notes = await asyncio.to_thread(look_for, self._dump_dir, self._port)
            except EngineError as error:
                self._situation = error.message
                if asyncio.get_running_loop().time() >= deadline:
                    raise EngineError("epoch_unknown", f"{error.message}; waited {self._wait_s:g} s") from error
            else:
                swept = await asyncio.to_thread(sweep_shared_memory, self._dump_dir)
                notes += (f"removed {swept} files that killed servers had left in {SHARED}",) if swept else ()
                self._record = record
                self._situation = "; ".join((f"found epoch {record.epoch}, pid {record.pid}", *notes))
                return record
            await asyncio.sleep(self._poll_s)

    async def ended(self) -> str:
        """See the port. How it ended is known to its parent alone."""
        record = self._record
        if record is None:
            raise RuntimeError("no server was found")
        await process_gone(record, self._poll_s, self._dump_dir / record.epoch)
        return (
            f"process {record.pid} of epoch {record.epoch} is gone; it is not a child of hsx, so its exit status is not known"
        )

    async def stop(self, grace_s: float) -> None:
        """See the port. Nothing: the server is not hsx's to end."""

    async def leave(self, grace_s: float) -> None:
        """See the port. Nothing."""


def find_server(dump_dir: Path, port: int) -> EpochRecord:
    """The record of the running server on `port`; see `look_for`."""
    return look_for(dump_dir, port)[0]


def look_for(dump_dir: Path, port: int) -> tuple[EpochRecord, tuple[str, ...]]:
    """The record of the running server on `port`, and what else is to be said. Blocks briefly.

    A server that lives is not taken for the one that answers: where somebody listens on the port, it has to be the server or
    a process below it. Where nobody does yet, the only server that names the port is it.

    Raises EngineError `epoch_unknown`: there is no record, none names this port, its process is gone, or another listens there;
    the message tells which.
    """
    records = look_up(dump_dir)
    living = [record for record in records.living if record.port == port]
    held = {record.epoch: holds_port(record) for record in living}
    fit = _fit(living, held)
    if fit is not None:
        notes = [bystander(record, dump_dir) for record in records.living if record is not fit]
        return fit, (held[fit.epoch].sentence, *notes) if held[fit.epoch].sentence else tuple(notes)
    lost = [(record, why) for record, why in records.lost if record.port == port]
    if living:
        reason = _contested(port, living, held)
    elif lost:
        last, why = max(lost, key=lambda pair: pair[0].start_ticks)
        reason = (
            f"no server runs on port {port}: the process of epoch {last.epoch}, pid {last.pid}, is gone ({why};"
            f" {len(lost)} records name this port); start it with hsx serve"
        )
    elif records.living or records.lost:
        ports = {record.port for record in (*records.living, *(record for record, _ in records.lost))}
        reason = f"no epoch record in {dump_dir} names port {port}; found ports {', '.join(map(str, sorted(ports)))}"
    else:
        reason = f"no epoch record in {dump_dir}: no server was started there with hsx serve"
    notes = [bystander(record, dump_dir) for record in records.living if record.port != port]
    raise EngineError("epoch_unknown", "; ".join((reason, *notes, *records.unreadable)))


def _fit(living: list[EpochRecord], held: dict[str, Finding]) -> EpochRecord | None:
    """The one that holds the port; where none is seen to, the only one that may."""
    holders = [record for record in living if held[record.epoch].hold is Hold.HELD]
    possible = holders or [record for record in living if held[record.epoch].hold is not Hold.TAKEN]
    return possible[0] if len(possible) == 1 else None


def _contested(port: int, living: list[EpochRecord], held: dict[str, Finding]) -> str:
    named = ", ".join(f"epoch {record.epoch} (pid {record.pid})" for record in living)
    if len(living) == 1:
        return f"the server of {named} lives, but {held[living[0].epoch].sentence}; expected that server or a process below it"
    said = "".join(f"; {found}" for found in sorted({held[record.epoch].sentence for record in living} - {""}))
    return f"{len(living)} living servers name port {port}: {named}; expected one of them to listen there alone{said}"


async def process_gone(record: EpochRecord, poll_s: float, folder: Path) -> None:
    """Returns when the record's process is gone. Until then keeps in mind what its tree holds in /dev/shm."""
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
        while process_alive(record) and not over.is_set():
            await asyncio.to_thread(_remember, record.pid, folder)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REMEMBER_S):
                    await over.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _remember(pid: int, folder: Path) -> None:
    remember(folder, [pid, *descendants(pid)])
