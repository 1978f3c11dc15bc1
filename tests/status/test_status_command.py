"""`hsx status`: of a run, of a job at rest, and until the end."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.config_load import load
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, locked
from hsx.records import Counts
from hsx.status import StatusServer
from hsx.stores.ledger_schema import FILE_NAME
from hsx.telemetry import Telemetry
from hsx.testing.commands import PATIENCE_S, wait_until
from hsx.testing.jobs import write_job
from hsx.testing.left_job import leave_job
from hsx.testing.scenes import SCENES
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

Begin = Callable[[StatusServer], Awaitable[str]]
TOKEN = "0123456789abcdef"


async def hsx(*arguments: str) -> int:
    """`hsx status`, in a thread: the endpoint that it asks is told by this one."""
    return await asyncio.to_thread(main, ["status", *arguments])


@pytest.fixture
async def url_of(begin: Begin) -> AsyncIterator[Any]:
    """Serves a scene; returns its URL."""
    servers: list[StatusServer] = []

    async def serve(name: str) -> str:
        scene = SCENES[name]()
        servers.append(StatusServer(scene.telemetry, scene.facts, "127.0.0.1", 0))
        return await begin(servers[-1])

    yield serve
    for server in servers:
        await server.stop()


async def test_a_run_at_a_glance(url_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    url = await url_of("running")
    assert await hsx(url) == ExitCode.DONE
    said = capsys.readouterr().out
    assert await hsx(url, "--json") == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert said.startswith("kimi-k2.5-eagle3  extracting  run 5e1f09ab")
    committed, total = document["progress"]["samples"]["committed"], document["progress"]["samples"]["total"]
    assert f"committed    {committed:,} of {total:,} samples" in said
    assert re.search(r"^left +\d+ min, until \d{4}-\d\d-\d\d \d\d:\d\d", said, re.MULTILINE)
    assert "engine       READY for" in said
    assert "restarts 1, the last" in said
    assert "61 of 64 requests, 148,220 of 262,144 tokens; staging 8.5 GB of 34.4 GB" in said
    assert re.findall(r"(nvme\d)  in service", said) == ["nvme0", "nvme1", "nvme2", "nvme3"]
    assert "quarantine   3: finite 3; 7 rows of the dataset rejected" in said
    assert "\x1b" not in said


@pytest.mark.parametrize(
    ("scene", "code", "says"),
    [
        ("empty", ExitCode.DONE, "STARTING for .*: no server answers on 127.0.0.1:30000 yet"),
        ("full", ExitCode.DONE, "paused       free at least 169.8 MB on root nvme0"),
        ("restarting", ExitCode.DONE, "nvme3  lost.*: root nvme3 cannot be written"),
        ("failed", ExitCode.RUN_ERROR, r"failed: \[restart_budget\] the server needed 6 restarts"),
        ("done", ExitCode.DONE, "100 %"),
    ],
)
async def test_other_times_of_its_life(
    url_of: Any, capsys: pytest.CaptureFixture[str], scene: str, code: ExitCode, says: str
) -> None:
    assert await hsx(await url_of(scene)) == code
    assert re.search(says, capsys.readouterr().out)


async def test_no_terminal_obeys_what_a_server_said(capsys: pytest.CaptureFixture[str], begin: Begin) -> None:
    telemetry = Telemetry()
    telemetry.error_met("server_gone", "\x1b]0;title\x07\x9b31m[bold]said\nso")
    server = StatusServer(telemetry, dict, "127.0.0.1", 0)
    assert await hsx(await begin(server)) == ExitCode.DONE
    said = capsys.readouterr().out
    assert r"\x1b]0;title\x07\x9b31m[bold]said so" in said
    await server.stop()


async def test_a_run_that_is_not_sound_is_not_fine(capsys: pytest.CaptureFixture[str], begin: Begin) -> None:
    server = StatusServer(Telemetry(), lambda: {"health": {"ok": False, "reason": "it hangs"}}, "127.0.0.1", 0)
    assert await hsx(await begin(server)) == ExitCode.RUN_ERROR
    assert "NOT SOUND: it hangs" in capsys.readouterr().out
    await server.stop()


def served_job(folder: Path, **status: Any) -> str:
    """A job with an endpoint of its own, which nobody serves yet."""
    return str(write_job(folder, {"status": {"port": free_port(), **status}}))


def server_of(job: str, store: str = "", token: str = "") -> tuple[Telemetry, StatusServer]:
    """What a run of it serves."""
    loaded, telemetry = load(job), Telemetry()
    telemetry.job_began(loaded.config.job.name, "aabbccdd", store or str(loaded.store), Counts(5, 0, 0, 0, 15, 0, 0))
    return telemetry, StatusServer(telemetry, dict, "127.0.0.1", loaded.config.status.port, token=token)


async def test_by_the_job_file_with_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str], begin: Begin) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    job = served_job(tmp_path, token_file=str(token))
    _, server = server_of(job, token=TOKEN)
    url = await begin(server)
    assert await hsx(job) == ExitCode.DONE
    assert "tiny  starting  run aabbccdd" in capsys.readouterr().out
    assert await hsx(url, "--token-file", str(token)) == ExitCode.DONE
    capsys.readouterr()
    assert await hsx(url) == ExitCode.RUN_ERROR
    assert "hsx: error [status_refused]" in capsys.readouterr().err
    await server.stop()


def test_of_a_job_at_rest_the_ledger_is_read_and_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = leave_job(tmp_path)
    ledger = left.loaded.state_dir / FILE_NAME
    before = ledger.read_bytes()
    assert main(["status", left.file]) == ExitCode.INCOMPLETE
    said = capsys.readouterr().out
    assert said.splitlines()[1] == ("hsx was not asked: nobody listens on http://127.0.0.1:8470. This is what the ledger says")
    assert "committed    3 of 5 samples, 6 of 15 tokens" in said
    assert "pending      1\n" in said
    assert "quarantine   1: finite 1" in said
    assert re.search(r"roots        a  3 samples, .* free", said)
    assert main(["status", left.file, "--json"]) == ExitCode.INCOMPLETE
    facts = json.loads(capsys.readouterr().out)
    assert (facts["source"], facts["held_by"]) == ("ledger", "")
    assert facts["samples"] == {"total": 5, "committed": 3, "pending": 1, "quarantined": 1, "shared": 0, "rejected_rows": 0}
    assert facts["roots"]["a"]["samples"] == 3
    assert facts["roots"]["a"]["bytes"] == facts["bytes"]["committed"] > 0
    assert facts["quarantine"] == {"by_reason": {"finite": 1}}
    assert facts["last_commit"] <= time.time()
    assert ledger.read_bytes() == before


def test_who_holds_the_job_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = leave_job(tmp_path)
    with locked(left.loaded.state_dir / JOB_LOCK, "job"):
        assert main(["status", left.file, "--json"]) == ExitCode.DONE  # somebody is at it
        assert f"pid {os.getpid()}, running since" in json.loads(capsys.readouterr().out)["held_by"]


@pytest.mark.parametrize(
    ("status", "why"),
    [({"enabled": False}, "status.enabled is false"), ({"port": 0}, "status.port is 0, so that only the log")],
)
def test_a_job_that_nobody_can_be_asked_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: dict[str, Any], why: str
) -> None:
    left = leave_job(tmp_path)
    write_job(tmp_path, {"status": status})
    assert main(["status", left.file, "--json"]) == ExitCode.INCOMPLETE
    assert json.loads(capsys.readouterr().out)["why"].startswith(why)


async def test_the_run_of_another_job_is_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str], begin: Begin) -> None:
    left = await asyncio.to_thread(leave_job, tmp_path)
    job = served_job(tmp_path)
    _, server = server_of(job, store="/elsewhere.zarr")
    await begin(server)
    capsys.readouterr()  # the telemetry's own log
    assert await hsx(left.file, "--json") == ExitCode.INCOMPLETE
    assert "is another one, tiny" in json.loads(capsys.readouterr().out)["why"]
    await server.stop()


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["JOB"], ExitCode.REFUSED, "[not_run_yet]"),
        (["/nowhere.toml"], ExitCode.REFUSED, "[config_unreadable]"),
        (["http://127.0.0.1:PORT"], ExitCode.RUN_ERROR, "[status_unreachable] nobody listens on http://127.0.0.1:"),
        (["http://127.0.0.1:PORT", "--watch"], ExitCode.RUN_ERROR, "[status_unreachable]"),
        (["ftp://127.0.0.1"], ExitCode.REFUSED, "[usage]"),
        (["JOB", "--watch", "soon"], ExitCode.REFUSED, "[usage] --watch is 'soon'; expected a number of seconds above 0"),
        (["JOB", "--watch", "0"], ExitCode.REFUSED, "[usage] --watch is 0; expected a number of seconds above 0"),
        (["JOB", "--watch", "nan"], ExitCode.REFUSED, "[usage]"),
        (["--watch", "JOB"], ExitCode.REFUSED, "[not_run_yet]"),
        (
            ["127.0.0.1:8470"],
            ExitCode.REFUSED,
            "[usage] '127.0.0.1:8470' is neither a job file nor a URL; expected",
        ),
        (["JOB", "--token-file", "/nowhere"], ExitCode.RUN_ERROR, "[status_failed] --token-file: /nowhere cannot be read"),
    ],
)
def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: ExitCode, error: str) -> None:
    names = {"JOB": served_job(tmp_path), "PORT": str(free_port())}
    given = [re.sub("JOB|PORT", lambda found: names[found[0]], word) for word in arguments]
    assert main(["status", *given]) == code
    assert f"hsx: error {error}" in capsys.readouterr().err


@contextmanager
def watching(*arguments: str, output: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", "hsx", "status", *arguments], stdout=output, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def seen(out: Path, what: str) -> None:
    """Waits until the text is in the file."""
    await asyncio.to_thread(wait_until, lambda: what in out.read_text(), what)


async def test_watching_outlives_the_endpoint_and_ends_with_the_run(tmp_path: Path, begin: Begin) -> None:
    left = await asyncio.to_thread(leave_job, tmp_path)
    job, out = served_job(tmp_path), tmp_path / "out"
    assert job == left.file
    _, server = server_of(job)
    await begin(server)
    with out.open("wb") as output, watching(job, "--watch", "0.1", output=output.fileno()) as process:
        await seen(out, "starting: samples 0/5")
        server.kill()
        await server.stop()
        await seen(out, "ledger alone (nobody listens on")
        assert "samples 3/5, quarantined 1" in out.read_text()
        telemetry, server = server_of(job)
        telemetry.phase("extracting")
        await begin(server)
        await seen(out, "extracting: samples 0/5")
        telemetry.phase("failed", kind="root_unusable", reason="all are lost")
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == ExitCode.RUN_ERROR
        await server.stop()
    assert out.read_text().splitlines()[-1].startswith("failed: samples 0/5")


async def test_watching_a_url_says_that_it_is_silent(tmp_path: Path, begin: Begin) -> None:
    telemetry, out = Telemetry(), tmp_path / "out"
    server = StatusServer(telemetry, dict, "127.0.0.1", 0)
    url = await begin(server)
    with out.open("wb") as output, watching(url, "--watch", "0.1", output=output.fileno()) as process:
        await seen(out, "starting: samples 0")
        server.kill()
        await seen(out, f"silent: nobody listens on {url}")
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == ExitCode.RUN_ERROR
    await server.stop()


async def test_watching_in_json_is_one_object_a_line(tmp_path: Path, url_of: Any) -> None:
    out = tmp_path / "out"
    with out.open("wb") as output, watching(await url_of("done"), "--watch", "--json", output=output.fileno()) as process:
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == ExitCode.DONE
    (line,) = out.read_text().splitlines()
    assert json.loads(line)["phase"]["name"] == "done"


async def test_a_terminal_is_redrawn_and_given_back(url_of: Any) -> None:
    ours, theirs = pty.openpty()
    with watching(await url_of("running"), "--watch", "0.1", output=theirs) as process:
        os.close(theirs)
        text = await asyncio.to_thread(read_until, ours, lambda text: text.count("extracting") >= 3)
        process.send_signal(signal.SIGINT)
        text += await asyncio.to_thread(read_until, ours, lambda text: False)
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == ExitCode.DONE
        assert process.stderr is not None
        assert process.stderr.read() == b""
    os.close(ours)
    assert "\x1b[?25l" in text
    assert text.rindex("\x1b[?25h") > text.rindex("extracting")  # the cursor is back
    assert "kimi-k2.5-eagle3" in text


def read_until(terminal: int, enough: Any) -> str:
    """What a terminal shows, until that is enough, or whoever wrote has gone."""
    text, deadline = "", time.monotonic() + PATIENCE_S
    with suppress(OSError):  # EIO: the other end is closed
        while not enough(text):
            assert time.monotonic() < deadline, text[-2000:]
            if select.select([terminal], [], [], 1.0)[0]:
                text += os.read(terminal, 65536).decode(errors="replace")
    return text
