"""Lines that lead to systemd's journal carry their priority; all others do not."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from hsx.journal import leads_to_journal, with_priority

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import logging, os, sys
found = os.fstat(2)
os.environ["JOURNAL_STREAM"] = f"{found.st_dev}:{found.st_ino}"
import structlog
from hsx import logs
from hsx.cli import main
logs.configure("debug", "auto", sys.stderr)
log = structlog.get_logger()
log.debug("a.b")
log.info("a.b")
log.warning("a.b")
log.error("a.b")
logging.getLogger("library").error("x")
main(["show", "/nowhere.toml", "0"])
"""


def test_priorities_by_level(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", PROGRAM], stderr=log, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    assert [line[:4] for line in lines[:5]] == ["<7>{", "<6>{", "<4>{", "<3>{", "<3>{"]
    assert json.loads(lines[0][3:])["event"] == "a.b"
    assert lines[5].startswith("<3>hsx: error [config_unreadable]")


def test_every_line_of_a_text_is_an_entry() -> None:
    assert with_priority("error", "a\nb") == "<3>a\n<3>b"
    assert with_priority("unknown", "a") == "<6>a"


def test_only_the_very_stream_that_the_manager_connected(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        found = os.fstat(log.fileno())
        assert leads_to_journal(log, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not leads_to_journal(log, {"JOURNAL_STREAM": f"{found.st_dev}:1"})
        assert not leads_to_journal(log, {})
    assert not leads_to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:1"})
