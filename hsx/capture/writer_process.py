"""The writer process: it writes the dumps of one capturing process, so that Python there has one thread less that is busy.

The thread that runs the model lets go of the interpreter lock at each operation of torch, and a thread that writes files takes
it at each call to the kernel; the turns they take cost more than the writing. Here the writer thread sends what is to be done
as one message, sleeps, and gets what came of it as another. The states do not travel: both map the same memory.

    python -m hsx.capture.writer_process SOCKET MEMORY NBYTES PARENT

is the process, with descriptors that it has inherited; it is told the rest in the first message. It ends with the process it
writes for: at the end of the messages, or by the kernel's hand (PDEATHSIG) where that dies. It inherits the capture lock, which
is therefore free only when nobody is left who could publish a dump.

Where it dies alone, what had been asked and not answered has failed, and the thread does the rest itself (`DumpsHere`). How
many of those dumps it had published nobody knows, so the numbers that it may have given are not given again: where it had not
given them they are missing, which the consumer takes for what it is, an epoch that cannot be trusted.
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

MOST_CALLS: Final = 64
"""Calls in one message, at most; each is some hundred bytes."""
_MOST_TEXT: Final = 500
"""Characters of a reason that are sent: six bytes each at worst, and all of a message has to fit into the socket's buffer."""
_MESSAGE: Final = 1 << 20
"""Bytes of a message that are taken, at most."""
_END_S: Final = 5.0
_PR_SET_PDEATHSIG: Final = 1
_NO_THREADS: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""numpy would start one for each core, for nothing."""


class DumpsElsewhere:
    """Has calls done by a writer process, which it starts; see `hsx.capture.calls.Dumps`. From the same thread always.

    Args:
        writer: what the process writes with, and what is written with where it dies. It must not have been used.
        memory: where the arrays of the calls lie.
        lock: descriptor that holds the capture lock.

    Raises:
        OSError: no process can be started.
    """

    def __init__(self, writer: DumpWriter, memory: SharedMemory, lock: int) -> None:
        self._writer = writer
        self._memory = memory
        self._given = 0
        self._begun: set[Marker] = set()
        self._lost = Outcome()
        self._here: DumpsHere | None = None
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            inherited = (theirs.fileno(), memory.fd)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, inherited), str(len(memory.bytes)), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=(*inherited, lock),
                env=os.environ | _NO_THREADS,
            )
        self._socket.send(json.dumps(writer.described()).encode())

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def do(self, calls: Sequence[Call]) -> list[Outcome]:
        """See `Dumps`."""
        outcomes: list[Outcome] = []
        for first in range(0, len(calls), MOST_CALLS):
            some = calls[first : first + MOST_CALLS]
            outcomes += self._do_here(some) if self._here else self._ask(some)
        return outcomes

    def close(self) -> None:
        """See `Dumps`. Waits for the end of the process, unless that stands still: it ends with this one in any case."""
        if self._here is None:
            self._socket.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)

    def _ask(self, calls: Sequence[Call]) -> list[Outcome]:
        message = json.dumps([self._packed(call) for call in calls]).encode()
        try:
            self._socket.send(message)
            answer = self._socket.recv(_MESSAGE)
            if not answer:
                raise ConnectionResetError(errno.ECONNRESET, "the writer process closed its socket")
            outcomes = [Outcome(*told) for told in json.loads(answer)]
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
        count = len(call.input_ids)
        return [call.kind, str(call.marker), call.offset, count, *places, call.reason[:_MOST_TEXT], call.errno]

    def _go_on_here(self, calls: Sequence[Call], error: Exception) -> list[Outcome]:
        self._socket.close()
        self._process.kill()
        status = self._process.wait()
        self._writer.go_on(self._given + sum(call.kind in ("publish", "whole") for call in calls))
        self._here = DumpsHere(self._writer)
        log.error("capture.writer_died pid=%d status=%d given=%d", self._process.pid, status, self._given, exc_info=error)
        ended = f"signal {-status}" if status < 0 else f"status {status}"
        self._lost = Outcome(error=f"the writer process of the capture ended ({ended})", errno=errno.EPIPE)
        self._begun |= {call.marker for call in calls}
        return self._do_here(calls)

    def _do_here(self, calls: Sequence[Call]) -> list[Outcome]:
        """What was begun or asked there is lost, until it is done away with."""
        assert self._here is not None
        self._begun -= {call.marker for call in calls if call.kind in ("fail", "drop")}
        lost = [call.marker in self._begun for call in calls]
        done = iter(self._here.do([call for call, gone in zip(calls, lost, strict=True) if not gone]))
        return [self._lost if gone else next(done) for gone in lost]


def serve(connection: socket.socket, memory: NDArray[np.uint8]) -> None:
    """The process: does what is asked until nobody is left who asks.

    Args:
        connection: brings the description of the writer, and then calls.
        memory: uint8, what the calls' arrays are parts of.
    """
    described = json.loads(connection.recv(_MESSAGE))
    spec = CaptureSpec(tuple(described.pop("layers")), final_state(described.pop("final")))
    writer = DumpWriter(Path(described.pop("folder")), spec=spec, **described)
    while message := connection.recv(_MESSAGE):
        calls = [_unpacked(packed, memory, spec.states, described["hidden_size"]) for packed in json.loads(message)]
        outcomes = perform(writer, calls)
        told = [(outcome.sequence, outcome.error[:_MOST_TEXT], outcome.errno) for outcome in outcomes]
        connection.send(json.dumps(told).encode())


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
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1  # it died before it could be watched
    with socket.socket(fileno=sock) as connection:
        serve(connection, map_bytes(fd, nbytes))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
