"""The recipes of docs/logs.md: taken from the page, run with the real jq on the lines of a run on the reference engine."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsx.core.marker import parse
from hsx.events import EVENTS
from hsx.exit_codes import ExitCode
from hsx.testing.commands import hsx_done
from hsx.testing.servers import running_reference
from hsx.testing.tiny_job import LAYERS, make_job

PAGE = (Path(__file__).parents[2] / "docs" / "logs.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^([^\n]+)\n\n```sh\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
"""Each recipe, by the line above it."""
RECIPES = {words.lstrip("# ").rstrip(":"): text for words, text in BLOCKS.items()}
BAD = 3
TROUBLE = """
import sys, structlog
from hsx import logs
from hsx.telemetry import Telemetry
logs.configure("info", "json", sys.stderr)
structlog.contextvars.bind_contextvars(run="aabbccdd")
clock = iter(range(0, 1000, 45))
telemetry = Telemetry(wall=lambda: float(next(clock)))
for reason in ("alive", "alive", "advancing"):
    telemetry.engine_restarted(reason, "what was\tfound", 7, 2.0)
telemetry.intake_paused("roots_full", "free 2 MB on root a")
telemetry.intake_resumed("roots_full")
telemetry.violation(None, "sole_writer", "two of them")
telemetry.samples_revoked("e", "twins", "another row", 5, 50, 500)
"""
"""What a run of a bad week says, by the code that says it."""

Ask = Callable[[str, list[str]], tuple[int, str]]

pytestmark = pytest.mark.skipif(shutil.which("jq") is None, reason="needs Debian's package jq")


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The log of a run in which sample 3 fails until it is given up."""
    folder = tmp_path_factory.mktemp("logs")
    with running_reference(folder / "server" / "dumps", LAYERS) as server:
        job = make_job(folder, 6, 40, server)
        asyncio.run(server.fault("nan_row", count=-1, match=f"-{BAD}-"))
        run = hsx_done(job.loaded.path, "run")
    assert run.process.returncode == ExitCode.INCOMPLETE
    return run.log.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def trouble() -> list[str]:
    return subprocess.run([sys.executable, "-c", TROUBLE], capture_output=True, check=True, text=True).stderr.splitlines()


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Runs a recipe on lines: (exit code, what it printed)."""

    def asked(recipe: str, lines: list[str]) -> tuple[int, str]:
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        # The journal gives the lines as they were written, less their priorities; everything after it is the page's own.
        program = f"set -o pipefail; journalctl() {{ cat {tmp_path}/lines; }}\n{RECIPES[recipe]}"
        done = subprocess.run(["bash", "-c", program], capture_output=True, check=False, text=True)
        return done.returncode, done.stdout + done.stderr

    return asked


def committed(lines: list[str]) -> list[dict[str, Any]]:
    whole = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in whole if line["event"] == "sample.committed"]


def test_what_went_wrong(ask: Ask, lines: list[str]) -> None:
    code, said = ask("Warnings and errors, one a line", [*lines, "Traceback (most recent call last):"])
    assert code == 0
    assert len(re.findall(r"^\S{19} warning attempt.failed \{.*finite", said, re.MULTILINE)) == 2
    assert len(re.findall(r"^\S{19} error sample.quarantined \{.*finite", said, re.MULTILINE)) == 1
    assert "sample.committed" not in said


def test_what_samples_failed_of(ask: Ask, lines: list[str]) -> None:
    code, said = ask("Failed attempts by reason, most frequent first", lines)
    assert (code, [json.loads(line) for line in said.splitlines()]) == (0, [{"reason": "finite", "attempts": 3}])


def test_one_sample(ask: Ask, lines: list[str]) -> None:
    code, said = ask("Everything that speaks of sample 3, by its index or its marker", lines)
    found = [json.loads(line) for line in said.splitlines()]
    assert code == 0
    assert [line["event"] for line in found if line["event"] != "invariant.violated"] == ["attempt.failed"] * 2 + [
        "sample.quarantined"
    ]
    assert {(parse(line["marker"]) or pytest.fail("no marker")).index for line in found} == {BAD}


def test_tokens_a_minute_and_the_slowest(ask: Ask, lines: list[str]) -> None:
    rows = committed(lines)
    assert len(rows) == 5
    code, said = ask("Tokens a minute", lines)
    table = [line.split("\t") for line in said.splitlines()]
    assert code == 0
    assert [sum(int(line[column]) for line in table) for column in (1, 2, 3)] == [5, sum(row["tokens"] for row in rows), 0]
    code, said = ask("Seconds from request to commit, tokens, index", lines)
    seconds = [float(line.split("\t")[0]) for line in said.splitlines()]
    assert (code, len(seconds)) == (0, 5)
    assert seconds == sorted(seconds, reverse=True)
    assert sorted(int(line.split("\t")[2]) for line in said.splitlines()) == [0, 1, 2, 4, 5]


def test_restarts_and_pauses(ask: Ask, lines: list[str], trouble: list[str]) -> None:
    code, said = ask("Time, reason, samples that went back to the queue, evidence", trouble)
    assert code == 0
    assert [line.split("\t")[1:] for line in said.splitlines()] == [
        [reason, "7", "what was\\tfound"] for reason in ("alive", "alive", "advancing")
    ]
    code, said = ask("How long the job stood for want of room", trouble)
    assert code == 0
    assert float(said) > 0
    assert ask("How long the job stood for want of room", lines) == (0, "0\n")


def test_rules_are_quiet_while_all_is_well_and_tell_what_is_not(ask: Ask, lines: list[str], trouble: list[str]) -> None:
    restarts = "More than two restarts within an hour"
    doubt = "A server that mixes requests, samples that were taken back, a disk that was lost, or a run that hangs"
    silence = "Silence: no sample committed within half an hour (of a run that is not done)"
    assert [ask(rule, lines)[0] for rule in (restarts, doubt, silence)] == [0, 0, 0]
    code, said = ask(restarts, trouble)
    assert code == 1
    assert "3 restarts: alive, alive, advancing" in said
    assert ask(restarts, trouble[:2])[0] == 0
    code, said = ask(doubt, trouble)
    assert code == 1
    assert "invariant.violated sole_writer" in said
    assert "samples.revoked twins" in said
    assert ask(silence, trouble)[0] == 1
    assert ask(silence, [])[0] == 1


def test_every_recipe_is_tested_and_speaks_of_events_that_exist() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [words for words in RECIPES if f'"{words}"' not in source] == []
    assert PAGE.count("```sh") == len(RECIPES) == 10
    named = set(re.findall(r"\"([a-z]+\.[a-z_]+)\"", "".join(RECIPES.values())))
    assert named <= set(EVENTS)
    for text in RECIPES.values():
        assert text.startswith("journalctl -u hsx@kimi -o cat")
