"""Runs one command so that nothing of it outlives its owner.

    python -m hsx.engines.reaper [--epoch-folder FOLDER] OWNER_PID COMMAND...

A server is a tree of processes, some of which leave their parent's session or outlive it. The reaper stands between the owner
(hsx) and the tree: as a subreaper it becomes the parent of every orphan in it, and the kernel tells it when the owner dies,
however that happens. It is two processes, an outer and an inner one that watches the command, and each does the same for the
one above it: whichever is killed, with the owner or without, the other is left to clear up.

=================================  ==========================================================
what happens                       what the reaper does
=================================  ==========================================================
the owner dies (PDEATHSIG)         kills the whole tree, ends
SIGTERM or SIGINT                  passes SIGTERM on to the command: the owner asks it to end
SIGUSR1                            kills the whole tree, ends
the command ends                   kills what it left behind, ends with its exit status
the outer process is killed        the inner one kills the whole tree
the inner process is killed        the kernel kills the command (PDEATHSIG), the outer one the rest
=================================  ==========================================================

Where the epoch's folder is given, it keeps in mind what the tree holds in /dev/shm, and removes it when the tree is dead. The
exit status is the command's, 128 + n where signal n ended it, or 125 where the owner was gone before the start. Standard
library only; it has to be small and to start fast.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.engines.leftovers import remember, sweep_epoch
from hsx.engines.process import descendants

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OWNER_GONE: Final = 125
KILL_NOW: Final = signal.SIGUSR1
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_WATCHED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, KILL_NOW)
_SWEEP_S: Final = 0.005
_REMEMBER_S: Final = 5.0
"""How often the inner process looks at what the tree holds in /dev/shm."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command to its end; returns the exit status.

    Args:
        arguments: `--epoch-folder` with a folder, or not; the owner's pid; the command.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--epoch-folder", type=Path, help="where the server writes its record; not made here")
    parser.add_argument("owner", type=int)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(arguments)
    folder: Path | None = args.epoch_folder
    # Blocked before anything else, and read by sigwait: no signal is lost between a check and a wait.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    outer = os.getpid()

    def inner() -> int:
        watcher = os.getpid()
        return _watch(outer, lambda: _become(args.command, watcher), folder, _REMEMBER_S)

    return _watch(args.owner, inner, folder, None)


def _watch(owner: int, run: Callable[[], int], folder: Path | None, every_s: float | None) -> int:
    """Runs `run` in a child until it ends or `owner` dies; kills what is left. Returns the exit status."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner:
        # It died before prctl took effect: its death sends no signal any more.
        return OWNER_GONE
    child = _fork(run)
    status = None
    while status is None:
        number = _next_signal(every_s if folder is not None else None)
        if number is None:
            _remember(folder)
        elif number == signal.SIGCHLD:
            status = _reap(child)
        elif number == KILL_NOW or os.getppid() != owner:
            break
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGTERM)
    _remember(folder)
    swept = _kill_all(child)
    if folder is not None:
        sweep_epoch(folder)
    return _exit_status(swept if status is None else status)


def _next_signal(timeout_s: float | None) -> int | None:
    """The next of the watched signals; None where none came in time."""
    if timeout_s is None:
        return signal.sigwait(_WATCHED)
    found = signal.sigtimedwait(_WATCHED, timeout_s)
    return None if found is None else found.si_signo


def _remember(folder: Path | None) -> None:
    if folder is not None:
        remember(folder, descendants(os.getpid()))


def _fork(run: Callable[[], int]) -> int:
    """Runs `run` in a child, which ends with its result; returns the child's pid."""
    child = os.fork()
    if child:
        return child
    status = 127
    try:
        status = run()
    except BaseException:  # noqa: BLE001 - a child must never return into its parent's frames, whatever happens
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _become(command: list[str], watcher: int) -> int:
    """Replaces this process by the command; returns 127 where that cannot be, or the watcher is gone already."""
    try:
        # An interpreter ignores these two; a program started by a shell does not.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == watcher:
            os.execvp(command[0], command)  # noqa: S606 - the command is the owner's, as a list
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        sys.stderr.flush()
    return 127


def _reap(child: int) -> int | None:
    """Collects what has ended; the wait status of `child` if it is among that."""
    found = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                found = status
    return found


def _kill_all(child: int) -> int | None:
    """Kills the tree until no child is left: what forks during one round is met in the next."""
    found = None
    while True:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        status = _reap(child)
        found = status if found is None else found
        try:
            # WNOWAIT leaves the status for _reap; no child at all is an error, and the end of the work.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return found
        time.sleep(_SWEEP_S)


def _exit_status(status: int | None) -> int:
    if status is None:
        return 128 + signal.SIGKILL
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
