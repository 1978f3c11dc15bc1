"""Ownership `spawn`: the server is a child of hsx, under a reaper that lets none of it survive hsx."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import RECORD_NAME
from hsx.engines.leftovers import SHARED, remember, sweep_epoch, sweep_shared_memory
from hsx.engines.listeners import taken
from hsx.engines.process import carrying, descendants, process_alive, read_record
from hsx.engines.reaper import KILL_NOW
from hsx.engines.records import bystander, look_up
from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hsx.core.epoch import EpochRecord

_POLL_S: Final = 0.02
_KILL_S: Final = 10.0
_TAIL_BYTES: Final = 4000
REAPER: Final = "hsx.engines.reaper"
_TAG: Final = "HSX_SPAWNED_EPOCH"
"""Environment variable by which every process of a spawned server can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnPlan:
    """What to start.

    Attributes:
        command: `hsx serve` and its own arguments, such as `[python, "-m", "hsx", "serve", "job.toml"]`; each start appends
            `--epoch UUID -- *args`.
        args: arguments of the server.
        dump_dir: where the server writes `<epoch>/server.json`.
        log_file: gets the server's output, appended.
        env: variables added to hsx's environment.
        record_timeout_s: longest time from start to the record, which is written before the server loads anything.
        host: address that the server will bind, and
        port: its port: a start is refused while somebody else listens there. 0: not checked.
    """

    command: Sequence[str]
    args: Sequence[str] = ()
    dump_dir: Path
    log_file: Path
    env: Mapping[str, str] = field(default_factory=dict)
    record_timeout_s: float = 120.0
    host: str = "127.0.0.1"
    port: int = 0


class SpawnOwner:
    """Starts and ends the server; implements `hsx.ports.EngineOwner`."""

    def __init__(self, plan: SpawnPlan) -> None:
        self._plan = plan
        self._process: asyncio.subprocess.Process | None = None
        self._epoch = ""
        self._log_start = 0
        self._notes: tuple[str, ...] = ()

    @property
    def restarts(self) -> bool:
        """See the port."""
        return True

    @property
    def situation(self) -> str:
        """See the port."""
        return "; ".join((f"the server is coming up; its output goes to {self._plan.log_file}", *self._notes))

    async def start(self) -> EpochRecord:
        """See the port.

        Must be called on the main thread: the kernel reports the death of the *thread* that forked; and under the dump
        directory's lock: what earlier owners there have spawned is killed first. Raises EngineError `server_start_failed`
        where somebody else has the port, or, with the end of the server's output, where the process ends or writes no record
        in time; nothing of it is left running then, nor when this is cancelled.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a server must be spawned from the main thread, whose death its reaper is told of")
        if self._process is not None and self._process.returncode is None:
            raise RuntimeError("the server of the last start still runs; stop it first")
        plan, self._epoch = self._plan, str(uuid.uuid4())
        command = [*plan.command, "--epoch", self._epoch, "--", *plan.args]
        record_file = plan.dump_dir / self._epoch / RECORD_NAME
        self._notes = await asyncio.to_thread(_make_way, plan)
        try:
            await self._launch(command)
            async with asyncio.timeout(plan.record_timeout_s):
                while (record := await asyncio.to_thread(_alive_record, record_file)) is None:
                    self._raise_if_ended(command)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            await self.stop(0)
            raise self._failed(f"wrote no {record_file} within {plan.record_timeout_s:g} s", command) from error
        except BaseException:
            await self.stop(0)
            raise
        return record

    async def ended(self) -> str:
        """See the port."""
        if self._process is None:
            raise RuntimeError("no server was started")
        status = await self._process.wait()
        await self._sweep()
        last = self._tail().rstrip().rpartition("\n")[2]
        return f"server {_how(status)}; the last line of {self._plan.log_file} is {last!r}"

    async def stop(self, grace_s: float) -> None:
        """See the port."""
        process = self._process
        if process is None:
            return
        steps = [(signal.SIGTERM, grace_s)] if grace_s > 0 else []
        for number, seconds in (*steps, (KILL_NOW, _KILL_S), (signal.SIGKILL, _KILL_S)):
            if process.returncode is None:
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await process.wait()
                    break
        await self._sweep()

    async def leave(self, grace_s: float) -> None:
        """See the port: a spawned server does not outlive hsx."""
        await self.stop(grace_s)

    async def _sweep(self) -> None:
        """Where the reaper was killed, waits for what is left of it to clear up, and does it where nothing is."""
        if self._process is not None and self._process.returncode == -signal.SIGKILL:
            await asyncio.to_thread(_clear_up, self._plan.dump_dir, {self._epoch})
            await asyncio.to_thread(sweep_epoch, self._plan.dump_dir / self._epoch)

    async def _launch(self, command: list[str]) -> None:
        plan = self._plan
        output = await asyncio.to_thread(_open_log, plan.log_file)
        try:
            self._log_start = os.fstat(output).st_size
            # A session of its own: Ctrl-C in the terminal is hsx's to handle, which drains before it stops the server.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", REAPER, "--epoch-folder", str(plan.dump_dir / self._epoch)),
                *(str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **plan.env, _TAG: self._epoch},
                start_new_session=True,
            )
        finally:
            os.close(output)

    def _raise_if_ended(self, command: list[str]) -> None:
        if self._process is not None and self._process.returncode is not None:
            raise self._failed(_how(self._process.returncode), command)

    def _failed(self, how: str, command: list[str]) -> EngineError:
        return EngineError(
            "server_start_failed",
            f"server {how} before it was ready; command: {' '.join(command)}; end of {self._plan.log_file}:\n{self._tail()}",
        )

    def _tail(self) -> str:
        """The end of what the server has written since its start; "" where somebody has taken the log away."""
        try:
            with self._plan.log_file.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                # A log that was cut short under the server begins anew.
                log.seek(max(self._log_start if self._log_start <= end else 0, end - _TAIL_BYTES))
                return log.read().decode("utf-8", "replace")
        except OSError:
            return ""


def _alive_record(path: Path) -> EpochRecord | None:
    record = read_record(path)
    return record if record is not None and process_alive(record) else None


def _make_way(plan: SpawnPlan) -> tuple[str, ...]:
    """Ends what earlier owners have left in the dump directory; what is to be told of it, and of servers that are not ours.

    Raises EngineError `server_start_failed` where the port is taken.
    """
    records = look_up(plan.dump_dir)
    killed = _clear_up(plan.dump_dir, {folder.name for folder in plan.dump_dir.glob("*/")})
    swept = sweep_shared_memory(plan.dump_dir)
    holder = taken(plan.host, plan.port) if plan.port else ""
    if holder:
        raise EngineError(
            "server_start_failed",
            f"port {plan.port} is held by {holder}; expected nobody there: end it, or give the server another port",
        )
    notes = [f"killed {killed} processes that an earlier run had left of its server"] if killed else []
    notes += [f"removed {swept} files that killed servers had left in {SHARED}"] if swept else []
    return (*notes, *(bystander(record, plan.dump_dir) for record in records.living if process_alive(record)))


def _clear_up(dump_dir: Path, epochs: set[str]) -> int:
    """Leaves no process of spawned epochs; returns how many had to be killed, where no reaper did it.

    They are told by a variable in their environment. One that has overwritten it, as a server's workers do that give themselves
    a title, is found below one that has not.
    """
    start, killed = time.monotonic(), set[int]()
    # Bounded: a process that is stuck in the kernel dies when the kernel lets it.
    while (carriers := _carriers(epochs)) and _passed(start) < 2 * _KILL_S:
        # A reaper knows its tree better than anybody else: it is given time, unless it does not get on.
        if _passed(start) > _KILL_S or not any(map(_is_reaper, carriers)):
            trees = {pid: {pid, *descendants(pid)} - {os.getpid()} for pid in carriers}
            for pid, epoch in carriers.items():
                remember(dump_dir / epoch, trees[pid])
            for pid in set[int]().union(*trees.values()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        time.sleep(_POLL_S)
    return len(killed)


def _carriers(epochs: set[str]) -> dict[int, str]:
    return {pid: epoch for pid, epoch in carrying(_TAG).items() if epoch in epochs}


def _passed(start: float) -> float:
    return time.monotonic() - start


def _is_reaper(pid: int) -> bool:
    try:
        return REAPER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def _open_log(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EngineError("server_start_failed", f"the server's log {path} cannot be written: {error.strerror}") from error


def _how(status: int) -> str:
    number = -status if status < 0 else status - 128
    if 0 < number < signal.NSIG and number in set(signal.Signals):
        return f"was ended by {signal.Signals(number).name}"
    return f"ended with exit status {status}"
