"""Ownership `systemd`: the server is a unit of its own, which outlives hsx and which hsx starts and stops through systemd.

The unit runs `hsx serve`, so its process is found by its epoch record, as with `external`; the unit's invocation id says which
record is the unit's. hsx needs a polkit rule for exactly this unit, which `hsx install-units` writes; to use a server that runs
already, it needs none.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hsx.engines.external import look_for, process_gone
from hsx.errors import EngineError, RunError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.epoch import EpochRecord

_POLL_S: Final = 0.2
_PROPERTIES: Final = ("ActiveState", "SubState", "Result", "InvocationID", "ExecMainStatus", "LoadState")
_RUNNING: Final = frozenset({"active", "activating", "reloading"})
_DENIED: Final = ("authentication required", "Access denied", "not authorized", "Permission denied")
"""What systemctl says where polkit, or the bus, refuses."""


@dataclass(frozen=True, slots=True)
class UnitState:
    """What systemd says of the unit.

    Attributes:
        active: `active`, `activating`, `deactivating`, `inactive` or `failed`.
        sub: the finer state, such as `running` or `auto-restart`.
        result: why it failed, such as `exit-code` or `start-limit-hit`; `success` where it did not.
        invocation: 32 hex digits of its current or last start; "" before the first.
        status: exit status or signal number of its last main process.
        loaded: `loaded`, or `not-found` where there is no such unit.
    """

    active: str
    sub: str
    result: str
    invocation: str
    status: str
    loaded: str

    def __str__(self) -> str:
        if self.active == "failed":
            return f"failed ({self.result}, status {self.status})"
        return f"{self.active} ({self.sub})"


class SystemdOwner:
    """Starts and stops the server's unit; implements `hsx.ports.EngineOwner`.

    Args:
        unit: the unit's name, such as `hsx-sglang@kimi.service`.
        dump_dir: where the unit's `hsx serve` writes `<epoch>/server.json`.
        port: the server's HTTP port, which its record must name.
        wait_s: how long `start` waits for the record of a unit that systemd calls active.
        systemctl: the program.
        poll_s: how often it looks.
    """

    def __init__(
        self, unit: str, dump_dir: Path, port: int, wait_s: float, *, systemctl: str = "systemctl", poll_s: float = _POLL_S
    ) -> None:
        self._unit = unit
        self._dump_dir = dump_dir
        self._port = port
        self._wait_s = wait_s
        self._systemctl = systemctl
        self._poll_s = poll_s
        self._record: EpochRecord | None = None
        self._situation = ""

    @property
    def restarts(self) -> bool:
        """See the port."""
        return True

    @property
    def situation(self) -> str:
        """See the port."""
        return self._situation

    async def start(self) -> EpochRecord:
        """See the port. A unit that runs already is used as it is.

        Raises also RunError `unit_refused`, where systemd does not know the unit, or does not let hsx start it.
        """
        state = await self.state()
        if state.loaded != "loaded":
            raise RunError("unit_refused", f"{self._unit}: systemd says {state.loaded}; `hsx install-units` writes the unit")
        if state.active not in _RUNNING or state.sub == "auto-restart":
            self._situation = f"{self._unit} is being started"
            # The unit's StartLimit is for when nobody else counts: hsx has a budget of its own.
            await self._do("reset-failed")
            await self._do("start")
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while True:
            record = await self._find()
            if record is not None:
                self._record = record
                return record
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineError("epoch_unknown", f"{self._situation}; waited {self._wait_s:g} s")
            await asyncio.sleep(self._poll_s)

    async def ended(self) -> str:
        """See the port."""
        record = self._record
        if record is None:
            raise RuntimeError("no server was started")
        await process_gone(record, self._poll_s, self._dump_dir / record.epoch)
        with contextlib.suppress(EngineError):
            return f"process {record.pid} of epoch {record.epoch} is gone; {self._unit} is {await self.state()}"
        return f"process {record.pid} of epoch {record.epoch}, of {self._unit}, is gone"

    async def stop(self, grace_s: float) -> None:
        """See the port. How long it may take before it is killed is the unit's TimeoutStopSec."""
        if (await self.state()).active not in ("inactive", "failed"):
            self._situation = f"{self._unit} is being stopped"
            await self._do("stop")

    async def leave(self, grace_s: float) -> None:
        """See the port. Nothing: the server outlives hsx."""

    async def state(self) -> UnitState:
        """What systemd says of the unit now. Raises EngineError `server_start_failed` where it says nothing."""
        status, out, err = await self._call("show", *(f"--property={name}" for name in _PROPERTIES), self._unit)
        found = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
        if status != 0 or not found:
            raise EngineError("server_start_failed", f"systemd says nothing of {self._unit}: {err or out or status}")
        active, sub, result, invocation, exit_status, loaded = (found.get(name, "") for name in _PROPERTIES)
        return UnitState(active, sub, result, invocation, exit_status, loaded)

    async def _find(self) -> EpochRecord | None:
        """The record of the unit's process; None while it has written none. Raises EngineError where the unit has failed."""
        state = await self.state()
        if state.active in ("failed", "inactive"):
            raise EngineError("server_start_failed", f"{self._unit} is {state}; see journalctl --unit={self._unit}")
        try:
            record, notes = await asyncio.to_thread(look_for, self._dump_dir, self._port)
        except EngineError as error:
            self._situation = f"{self._unit} is {state}; {error.message}"
            return None
        if record.invocation_id != state.invocation:
            self._situation = (
                f"{self._unit} is {state}, invocation {state.invocation}; the server on port {self._port} (pid {record.pid}) "
                f"is of invocation {record.invocation_id or 'none'}: it is not the unit's"
            )
            return None
        self._situation = "; ".join((f"found epoch {record.epoch}, pid {record.pid}, of {self._unit}", *notes))
        return record

    async def _do(self, verb: str) -> None:
        """Raises RunError `unit_refused` where hsx may not, else EngineError `server_start_failed` where it fails."""
        status, out, err = await self._call(verb, self._unit)
        if status == 0:
            return
        words = " ".join((err or out).split())
        if any(mark in words for mark in _DENIED):
            raise RunError("unit_refused", f"systemd does not let hsx {verb} {self._unit}: {words}; see `hsx install-units`")
        if verb != "reset-failed":
            raise EngineError("server_start_failed", f"systemctl {verb} {self._unit} ended with {status}: {words}")

    async def _call(self, *words: str) -> tuple[int, str, str]:
        command = [self._systemctl, "--no-ask-password", "--no-pager", *words]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as error:
            raise EngineError("server_start_failed", f"{self._systemctl} cannot be run: {error.strerror}") from error
        try:
            out, err = await process.communicate()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # only the messenger: what systemd was told it goes on with
            raise
        return process.returncode or 0, out.decode(errors="replace").strip(), err.decode(errors="replace").strip()
