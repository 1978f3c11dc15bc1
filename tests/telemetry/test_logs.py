"""Log output: JSON lines, console, levels, and how much of it."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from hsx import logs
from hsx.events import PER_SAMPLE, PER_TWIN

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    logs.configure("info", "json", stream, samples_per_second=0)
    log = structlog.get_logger()
    log.info(PER_SAMPLE, index=1)
    log.info("job.began")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["job.began"]


def test_a_million_samples_do_not_drown_the_rest() -> None:
    """A burst of ten seconds' worth, then the rate; what is left out is counted, and nothing else is ever left out."""
    now = 0.0
    thinned = logs.Thinned(2, lambda: now)

    def write(event: str) -> dict[str, Any] | None:
        try:
            return dict(thinned(None, "info", {"event": event}))
        except structlog.DropEvent:
            return None

    assert [write(PER_SAMPLE) for _ in range(19)] == [{"event": PER_SAMPLE}] * 19
    assert write(PER_TWIN) == {"event": PER_TWIN}
    assert [write(PER_SAMPLE) for _ in range(7)] == [None] * 7
    assert write("root.lost") == {"event": "root.lost"}
    now = 0.5
    assert write(PER_SAMPLE) == {"event": PER_SAMPLE, "unlogged": 7}
    assert write(PER_TWIN) is None
    now = 1000.0
    assert write(PER_SAMPLE) == {"event": PER_SAMPLE, "unlogged": 1}
    assert [write(PER_SAMPLE) is None for _ in range(20)] == [False] * 19 + [True]


def test_the_level_changes_for_loggers_that_are_in_use() -> None:
    stream = io.StringIO()
    logs.configure("info", "json", stream)
    log = structlog.get_logger()
    log.debug("first")
    logs.set_level("debug")
    log.debug("second")
    logs.set_level("error")
    log.warning("third")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["second"]


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
