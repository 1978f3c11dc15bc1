"""`hsx run` around the run itself: exit code, summary, progress views; and one real run, watched from outside."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from hsx.app import Outcome
from hsx.commands.run import code_of, open_view, summary
from hsx.config import Log
from hsx.exit_codes import ExitCode
from hsx.progress_view import BarView, PlainView, duration, summary_line
from hsx.telemetry import Telemetry
from hsx.testing.commands import PATIENCE_S
from hsx.testing.jobs import write_job
from hsx.testing.servers import free_port, tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DONE = Outcome(
    committed=10,
    quarantined=0,
    rejected=0,
    pending=0,
    tokens=500,
    seconds=10.0,
    violations={},
    restarts=0,
    store="/s",
    interrupted=False,
)


@pytest.mark.parametrize(
    ("changes", "allowed", "code"),
    [
        ({}, 0.0, ExitCode.DONE),
        ({"rejected": 3}, 0.0, ExitCode.DONE),
        ({"quarantined": 1}, 0.0, ExitCode.INCOMPLETE),
        ({"committed": 9, "quarantined": 1}, 0.1, ExitCode.DONE),
        ({"committed": 8, "quarantined": 2}, 0.1, ExitCode.INCOMPLETE),
        ({"pending": 1}, 1.0, ExitCode.INCOMPLETE),
        ({"pending": 1, "interrupted": True}, 0.0, ExitCode.INTERRUPTED),
    ],
)
def test_never_0_while_an_accepted_sample_is_neither_committed_nor_allowed(
    changes: dict[str, Any], allowed: float, code: ExitCode
) -> None:
    assert code_of(replace(DONE, **changes), allowed) is code


def test_a_signal_that_came_too_late_interrupted_nothing() -> None:
    assert code_of(replace(DONE, interrupted=True), 0.0) is ExitCode.DONE


def test_the_summary_names_what_there_is() -> None:
    assert summary(DONE, ExitCode.DONE).splitlines()[:4] == [
        "store       /s",
        "committed   10 samples",
        "this run    500 tokens in 10 s, 50 tokens/s",
        "violations  none",
    ]
    text = summary(replace(DONE, quarantined=2, violations={"finite": 6}, restarts=1), ExitCode.INCOMPLETE)
    assert "violations  finite 6\nquarantined 2\nrestarts    1\nexit code   3: " in text
    assert "revoked     7\n" in summary(replace(DONE, revoked=7), ExitCode.DONE)
    assert "committed   1 sample\n" in summary(replace(DONE, committed=1), ExitCode.DONE)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3599, "1 h"), (12_000, "3 h 20 min"), (200_000, "2 d 8 h"), (172_800, "2 d")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_line_of_a_run_that_has_just_begun() -> None:
    line = summary_line(Telemetry().snapshot())
    assert line == "samples 0, 0 tokens/s, 0 bytes/s, in flight 0, engine STOPPED"


def test_the_plain_view_writes_now_and_then_and_at_the_end() -> None:
    lines: list[str] = []
    now = [0.0]
    view = PlainView(lines.append, every_s=30.0, clock=lambda: now[0])
    telemetry = Telemetry()
    for now[0] in (0.0, 10.0, 29.0):
        view.update(telemetry.snapshot())
    assert len(lines) == 1
    telemetry.gauges(3, 0, 0)
    now[0] = 31.0
    view.update(telemetry.snapshot())
    assert len(lines) == 2
    telemetry.gauges(4, 0, 0)
    view.update(telemetry.snapshot())
    view.close()
    view.close()
    assert [re.findall(r"in flight (\d)", line) for line in lines] == [["0"], ["3"], ["4"]]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def _logging_restored() -> Iterator[None]:
    import logging

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_logging_restored")
def test_a_terminal_gets_a_bar_and_everything_else_lines() -> None:
    terminal = Terminal()
    view = open_view(terminal, Log(), 0)
    try:
        assert isinstance(view, BarView)
        view.update(Telemetry().snapshot())
    finally:
        view.close()
    assert "samples 0" in terminal.getvalue()

    stream = io.StringIO()
    plain = open_view(stream, Log(), 0)
    plain.update(Telemetry().snapshot())
    plain.close()
    (line,) = stream.getvalue().splitlines()
    assert json.loads(line)["event"] == "job.progressed"


def follow(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """Reads the log up to the next `event` and returns it."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if line.startswith("{") and (fields := json.loads(line))["event"] == event:
            found: dict[str, Any] = fields
            return found
    raise AssertionError(f"{event} never came: {seen[-5:]}")


@pytest.mark.slow
def test_a_real_run_from_outside(tmp_path: Path) -> None:
    """Notify socket, status endpoint, SIGTERM's drain with code 75, and the same command finishing the job."""
    # No server comes up before the signal has come, however late that is.
    deaths = tmp_path / "deaths"
    deaths.write_text("1000")
    engine = {"kind": "reference", "ownership": "spawn", "port": free_port(), "stop_grace_s": 5.0}
    changes = {
        "engine": {**engine, "args": ["--die-at-boot", str(deaths)]},
        "status": {"port": 0},
        "watchdog": {"restart_budget": 1000},
    }
    job = write_job(tmp_path, changes)
    tiny_config(tmp_path / "model")
    notify = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(notify))
        manager.setblocking(False)
        environ = {**os.environ, "NOTIFY_SOCKET": str(notify)}
        command = [sys.executable, "-m", "hsx", "run", str(job)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as run:
            url = follow(run, "status.listening")["url"]
            with urllib.request.urlopen(f"{url}/status", timeout=PATIENCE_S) as answer:
                status = json.load(answer)
            assert (status["version"], status["job"]["name"], status["progress"]["samples"]["total"]) == (1, "tiny", 5)
            run.send_signal(signal.SIGTERM)
            follow(run, "run.draining")
            assert run.stderr is not None
            assert "hsx: error [interrupted]" in run.stderr.read()
        assert run.returncode == ExitCode.INTERRUPTED
        messages = []
        with suppress(BlockingIOError):
            while True:
                messages.append(manager.recv(4096).decode())
    assert messages[0].startswith("STATUS=reading the dataset")
    assert any(message.startswith("READY=1") for message in messages)
    deaths.unlink()
    finished = subprocess.run([*command, "--json"], capture_output=True, text=True)
    assert finished.returncode == ExitCode.DONE, finished.stderr
    assert json.loads(finished.stdout)["committed"] == 5
