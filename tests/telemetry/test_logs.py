"""Log output: JSON lines, console, levels, and the table of events."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import structlog

from hsx import logs

if TYPE_CHECKING:
    from collections.abc import Iterator

HSX = Path(__file__).parents[2] / "hsx"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_json_lines_carry_event_level_time_and_fields() -> None:
    stream = io.StringIO()
    logs.configure("info", "auto", stream)
    structlog.get_logger().info("thing.happened", path=Path("/x"), count=3)
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "thing.happened", "level": "info", "path": "/x", "count": 3}


LOGGING = """
import logging, structlog, sys
from hsx import logs
logs.configure("info", sys.argv[1], sys.stderr)
for number in range(2000):
    structlog.get_logger().info("thing.happened", number=number)
    logging.getLogger("aiohttp").warning("number %d", number)
print("done")
"""


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | true"])
def test_a_log_that_cannot_be_written_ends_nothing(format: str, redirection: str) -> None:  # noqa: A002 - the key's name
    """A full disk, no standard error at all, a reader that went away: the work goes on, and its exit status stays 0."""
    closed = "import os, sys\nsys.stderr = sys.stderr or open(os.devnull, 'w')\n"
    command = f'set -o pipefail; "$0" -c "$1" {format} {redirection}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, closed + LOGGING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == ("" if "|" in redirection else "done\n")


def test_lines_are_written_again_once_there_is_room(full_disk: Path) -> None:
    with (full_disk / "log").open("w", buffering=1) as stream:
        log = logs.LenientStream(stream)
        for _ in range(1000):
            log.write("x" * 100 + "\n")
        assert (full_disk / "log").stat().st_size == 0
        (full_disk / "filler").unlink()
        log.write("after\n")
    assert (full_disk / "log").read_text().splitlines()[-1] == "after"


def test_a_terminal_gets_text() -> None:
    stream = Terminal()
    logs.configure("info", "auto", stream)
    structlog.get_logger().info("thing.happened", count=3)
    assert "thing.happened" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_a_format_that_is_asked_for_wins() -> None:
    plain, terminal = io.StringIO(), Terminal()
    logs.configure("info", "console", plain)
    structlog.get_logger().info("thing.happened")
    logs.configure("info", "json", terminal)
    structlog.get_logger().info("thing.happened")
    assert not plain.getvalue().startswith("{")
    assert json.loads(terminal.getvalue())["event"] == "thing.happened"


def test_what_is_below_the_level_is_left_out() -> None:
    stream = io.StringIO()
    logs.configure("warning", "json", stream)
    log = structlog.get_logger()
    log.info("quiet")
    log.warning("loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["loud"]


def test_the_line_of_each_sample_can_be_left_out() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream, samples=False)
    log = structlog.get_logger()
    log.info(logs.PER_SAMPLE, index=1)
    log.info("job.began")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["job.began"]


def test_the_standard_librarys_loggers_come_out_the_same_way() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    logging.getLogger("aiohttp.server").error("failed with %s", 5)
    logging.getLogger("aiohttp.server").info("chatter")
    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert (event["event"], event["level"], event["logger"]) == ("failed with 5", "error", "aiohttp.server")


@pytest.mark.parametrize("form", ["json", "console"])
def test_exceptions_are_written_whole(form: logs.Format) -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs.configure("info", form, stream)
        try:
            raise ValueError("the reason")
        except ValueError:
            structlog.get_logger().exception("thing.failed")
            logging.getLogger("x").exception("other")
    assert stream.getvalue().count("ValueError: the reason") == 2


def logged_events() -> dict[str, str]:
    """Event names given to a log method as text, with a file that does so."""
    found = {}
    for path in sorted(HSX.rglob("*.py")):
        if "capture" in path.parts or "testing" in path.parts:
            continue  # inside the server, and for tests: they do not write hsx's log
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in {"debug", "info", "warning", "error", "critical", "exception"}
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found[str(node.args[0].value)] = str(path.relative_to(HSX))
    return found


def test_every_event_is_in_the_table_and_named_as_a_fact() -> None:
    assert {event: path for event, path in logged_events().items() if event not in logs.EVENTS} == {}
    for event in logs.EVENTS:
        noun, _, verb = event.partition(".")
        assert noun.isidentifier(), event
        assert verb.isidentifier(), event


def test_every_event_of_the_table_is_written_somewhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in HSX.rglob("*.py") if path.name != "logs.py")
    assert [event for event in logs.EVENTS if event != logs.PER_SAMPLE and f'"{event}"' not in text] == []
