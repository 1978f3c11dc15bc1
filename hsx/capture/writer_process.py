"""The writer process: it writes the dumps of one capturing process, so that Python there has one thread less that is busy.

The thread that runs the model lets go of the interpreter lock at each operation of torch, and a thread that writes files takes
it at each call to the kernel; the turns they take cost more than the writing. Here the writer thread sends what is to be done
as one message, sleeps, and gets what came of it as another. The states do not travel: both map the same memory.

    python -m hsx.capture.writer_process SOCKET MEMORY NBYTES PARENT

is the process, with descriptors that it has inherited; it is told the rest in the first message, and says when it is ready. It
ends with the process it writes for: at the end of the messages, or by the kernel's hand (PDEATHSIG) where that dies. It
inherits the capture lock, which is therefore free only when nobody is left who could publish a dump.

Where it dies alone, what had been asked and not answered has failed, but for dumps that lie there under their names, and the
thread does the rest itself (`DumpsHere`). A dump that was published and is gone already nobody can tell from one that never
was: its number is not given again, and if it had not been given it is missing, which the consumer counts as it counts a loss.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.capture.calls import Call, DumpsHere, Outcome, perform
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.memory import SharedMemory, map_bytes
from hsx.core.marker import Marker, parse
from hsx.core.spec import CaptureSpec, final_state

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

log = logging.getLogger(__name__)

START_S: Final = 60.0
"""Longest start: a tenth of a second on an idle machine."""
END_S: Final = 5.0
"""Longest wait for an end."""
_READY: Final = "ready"
_LENGTH: Final = 4
"""Bytes of a message's length, in front of it."""
_ONE_READ: Final = 1 << 16
_PR_SET_PDEATHSIG: Final = 1
_NO_THREADS: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""numpy would start one for each core, for nothing."""


class DumpsElsewhere:
    """Has calls done by a writer process, which it starts; see `hsx.capture.calls.Dumps`.

    Made by the main thread (the kernel ends the process with the *thread* that started it), used by one other.

    Args:
        writer: what the process writes with, and what is written with where it dies. It must not have been used.
        memory: where the arrays of the calls lie.
        lock: descriptor that holds the capture lock.

    Raises:
        OSError: no process can be started, or it does not become ready.
    """

    def __init__(self, writer: DumpWriter, memory: SharedMemory, lock: int) -> None:
        if threading.current_thread() is not threading.main_thread() or not sys.executable:
            raise OSError(f"it can only be started by the main thread, with an interpreter (here: {sys.executable!r})")
        self._writer = writer
        self._memory = memory
        self._given = 0
        self._begun: set[Marker] = set()
        self._lost = Outcome()
        self._here: DumpsHere | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            inherited = (theirs.fileno(), memory.fd)
            # It finds its modules where this process finds them, and nowhere else: not in a folder that happens to be current.
            path = os.pathsep.join(map(os.path.abspath, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, *map(str, inherited), str(len(memory.bytes)), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(*inherited, lock),
                env={**os.environ, **_NO_THREADS, "PYTHONPATH": path},
            )
        self._socket.settimeout(START_S)
        try:
            _send(self._socket, writer.described())
            said = _receive(self._socket)
        except (OSError, ValueError) as error:
            said = error
        if said != _READY:
            raise OSError(f"the writer process did not start ({self._end()}): {said or 'it said nothing'}")
        self._socket.settimeout(None)

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def do(self, calls: Sequence[Call]) -> list[Outcome]:
        """See `Dumps`."""
        if not calls:
            return []
        return self._do_here(calls) if self._here else self._ask(calls)

    def close(self) -> None:
        """See `Dumps`. Waits for the end of the process, unless that stands still: it ends with this one in any case."""
        if self._here is None:
            self._hang_up()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)

    def _ask(self, calls: Sequence[Call]) -> list[Outcome]:
        packed = [self._packed(call) for call in calls]
        try:
            _send(self._socket, packed)
            answer = _receive(self._socket)
            if answer is None:
                raise ConnectionResetError(errno.ECONNRESET, "the writer process closed its socket")
            outcomes = [Outcome(*told) for told in answer]
        except (OSError, ValueError) as error:
            return self._go_on_here(calls, error)
        self._given = max(self._given, *(outcome.sequence for outcome in outcomes))
        for call in calls:
            if call.kind == "begin":
                self._begun.add(call.marker)
            elif call.kind != "write":
                self._begun.discard(call.marker)
        return outcomes

    def _packed(self, call: Call) -> list[object]:
        places = (self._memory.at(call.states), self._memory.at(call.input_ids)) if call.kind in ("write", "whole") else (0, 0)
        return [call.kind, str(call.marker), call.offset, len(call.input_ids), *places, call.reason, call.errno]

    def _go_on_here(self, calls: Sequence[Call], error: Exception) -> list[Outcome]:
        ended = self._end()
        asked = [call.marker for call in calls if call.kind in ("publish", "whole")]
        found = {marker: sequence for marker in asked if (sequence := self._writer.published(marker))}
        self._writer.go_on(max(self._given, *found.values(), 0) + len(asked) - len(found))
        self._here = DumpsHere(self._writer)
        log.error("capture.writer_died pid=%d ended=%r given=%d", self._process.pid, ended, self._given, exc_info=error)
        self._lost = Outcome(error=f"the writer process of the capture ended ({ended})", errno=errno.EPIPE)
        self._begun = (self._begun | {call.marker for call in calls}) - found.keys()
        # A marker that has its dump takes nothing more; any other call of it was done before that.
        rest = iter(self._do_here([call for call in calls if call.marker not in found]))
        return [
            Outcome(found[call.marker] if call.kind in ("publish", "whole") else 0) if call.marker in found else next(rest)
            for call in calls
        ]

    def _do_here(self, calls: Sequence[Call]) -> list[Outcome]:
        """What was begun or asked there is lost, until it is done away with."""
        assert self._here is not None
        self._begun -= {call.marker for call in calls if call.kind in ("fail", "drop")}
        lost = [call.marker in self._begun for call in calls]
        done = iter(self._here.do([call for call, gone in zip(calls, lost, strict=True) if not gone]))
        return [self._lost if gone else next(done) for gone in lost]

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # whoever else was forked and holds it, too
        self._socket.close()

    def _end(self) -> str:
        """Makes sure that the process is dead; how it ended."""
        self._hang_up()
        try:
            status = self._process.wait(END_S)  # it may be about to end by itself, and knows better why
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return f"signal {-status}" if status < 0 else f"status {status}"


def serve(connection: socket.socket, memory: NDArray[np.uint8]) -> None:
    """The process: does what is asked until nobody is left who asks.

    Args:
        connection: brings the description of the writer, and then calls.
        memory: uint8, what the calls' arrays are parts of.
    """
    described = _receive(connection)
    if described is None:
        return
    spec = CaptureSpec(tuple(described.pop("layers")), final_state(described.pop("final")))
    writer = DumpWriter(Path(described.pop("folder")), spec=spec, **described)
    _send(connection, _READY)
    while (asked := _receive(connection)) is not None:
        calls = [_unpacked(packed, memory, spec.states, described["hidden_size"]) for packed in asked]
        _send(connection, [(outcome.sequence, outcome.error, outcome.errno) for outcome in perform(writer, calls)])


def _send(connection: socket.socket, document: object) -> None:
    data = json.dumps(document).encode()
    connection.sendall(len(data).to_bytes(_LENGTH, "little") + data)


def _receive(connection: socket.socket) -> Any:  # noqa: ANN401 - whatever JSON says
    """The next message; None at the end of them. Raises OSError, or ValueError for one that is cut."""
    data = connection.recv(_ONE_READ)  # as a rule all of it, in one call
    if not data:
        return None
    while len(data) < _LENGTH or len(data) < _LENGTH + int.from_bytes(data[:_LENGTH], "little"):
        more = connection.recv(_ONE_READ)
        if not more:
            raise ValueError(f"a message ends after {len(data)} bytes")
        data += more
    return json.loads(data[_LENGTH:])


def _unpacked(packed: list[Any], memory: NDArray[np.uint8], states: int, width: int) -> Call:
    kind, text, offset, count, states_at, ids_at, reason, number = packed
    marker = parse(text)
    if marker is None:
        raise ValueError(f"{text!r} is no marker")
    size = count * states * width
    return Call(
        kind,
        marker,
        offset,
        memory[states_at : states_at + 2 * size].view(np.uint16).reshape(count, states, width),
        memory[ids_at : ids_at + 4 * count].view(np.int32),
        reason,
        number,
    )


def main(arguments: Sequence[str]) -> int:
    """Makes sure of its end, and serves."""
    sock, fd, nbytes, parent = map(int, arguments)
    # Ctrl-C and a stop of the whole group are for the server, which ends this process when it has no more to write.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # As hsx.engines.reaper does, which is not for this side to import.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # it died before it could be watched
    with socket.socket(fileno=sock) as connection:
        serve(connection, map_bytes(fd, nbytes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
