"""`hsx` as a process of its own, for tests that send it signals, kill it, or read what it says and its exit code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.testing.catalogue import strays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S: Final = 300.0
"""How long tests wait for what must come: less than pytest's own timeout, and long enough for a busy machine, on which a small
server alone may take 20 s to start.
"""
POLL_S: Final = 0.02


def log_lines(*files: Path) -> list[dict[str, Any]]:
    """The JSON lines of logs, one file after the other; others are left out, torn and unfinished ones among them."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]]
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def wait_until(true: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Blocks until `true()`. Raises AssertionError, naming `what`, when that takes too long."""
    deadline = time.monotonic() + patience_s
    while not true():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {patience_s:g} s")
        time.sleep(POLL_S)


@dataclass(frozen=True, slots=True)
class HsxProcess:
    """A running or ended command.

    Attributes:
        process: the child.
        out: file with its standard output.
        log: file with its standard error: the log in JSON lines, and the error that ended it.
    """

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Its exit code, once it has ended. Raises AssertionError, with the end of the log, where it goes on too long."""
        try:
            return self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {patience_s:g} s:\n{self.log.read_text()[-4000:]}") from None

    def send(self, number: int) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and waits for the end."""
        self.process.kill()
        self.process.wait()

    def events(self, name: str) -> list[dict[str, Any]]:
        """The fields of each log line of the event `name` so far."""
        return [line for line in log_lines(self.log) if line["event"] == name]

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first log line of `event`, once it is there. Raises AssertionError where the process ends without it."""
        wait_until(lambda: bool(self.events(event)) or self.process.poll() is not None, event)
        found = self.events(event)
        assert found, f"ended ({self.process.returncode}) without {event}:\n{self.log.read_text()[-4000:]}"
        return found[0]

    def error(self) -> str:
        """Kind and message of the error that ended it, such as `[roots_full] no root ...`; "" where there is none."""
        return self.log.read_text().rpartition("hsx: error ")[2] if "hsx: error " in self.log.read_text() else ""


@contextmanager
def hsx_running(job: Path, *arguments: str) -> Iterator[HsxProcess]:
    """Starts `hsx COMMAND JOB [...]` on a job file; `arguments` begin with the command. Killed on leaving, if it still runs.

    Raises AssertionError on leaving where it has logged what the catalogue of events does not know.
    """
    command, *rest = arguments
    stem = f"{command}-{time.monotonic_ns()}"
    out, log = job.with_name(f"{stem}.out"), job.with_name(f"{stem}.log")
    with out.open("wb") as output, log.open("wb") as errors:
        process = subprocess.Popen([sys.executable, "-m", "hsx", command, str(job), *rest], stdout=output, stderr=errors)
    try:
        yield HsxProcess(process, out, log)
    finally:
        process.kill()
        process.wait()
    with log.open(encoding="utf-8", errors="replace") as lines:
        objections = strays(line.rstrip("\n") for line in lines)
    assert not objections, objections


def hsx_done(job: Path, *arguments: str, patience_s: float = PATIENCE_S) -> HsxProcess:
    """The same, waited for; the exit code is in `process.returncode`."""
    with hsx_running(job, *arguments) as running:
        running.wait(patience_s)
    return running


def command_lines() -> list[str]:
    """The command line of every process that this user may look at, words joined by spaces."""
    lines = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):  # it may end between the two looks
                lines.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").rstrip())
    return lines


def delete_in_use(path: Path) -> None:
    """Deletes a file or a folder, whoever adds and removes names in it meanwhile."""
    while path.exists():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
