"""Which record is the running server's, and why none is."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from hsx.engines.external import ExternalOwner, find_server
from hsx.engines.process import boot_id, environment, mismatch, process_alive, start_ticks
from hsx.engines.records import look_up
from hsx.errors import EngineError
from hsx.testing.commands import wait_until
from hsx.testing.idle_server import record_of, write_record

if TYPE_CHECKING:
    from collections.abc import Iterator

PORT = 7
"""A port on which nobody listens."""


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A living process that is no server."""
    sleeper = subprocess.Popen(["sleep", "3600"])
    yield sleeper
    sleeper.kill()
    sleeper.wait()


def refusal(dump_dir: Path, port: int = PORT) -> str:
    """Why no server is found."""
    with pytest.raises(EngineError) as caught:
        find_server(dump_dir, port)
    assert caught.value.kind == "epoch_unknown"
    return caught.value.message


def test_running_server_is_found(tmp_path: Path) -> None:
    """Port, boot, pid and start time agree."""
    record = record_of(os.getpid(), str(uuid4()))
    write_record(tmp_path, record)
    assert process_alive(record)
    assert find_server(tmp_path, PORT) == record


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"boot_id": "another"}, r"the host was started anew: expected boot id another, found [0-9a-f-]{36}"),
        (
            {"start_ticks": 1},
            r"pid \d+ went to another process: expected one started at tick 1, found '.*' started at tick \d+",
        ),
        ({"pid": 1 << 22, "start_ticks": 5}, r"expected process 4194304, found none"),
    ],
)
def test_process_that_is_gone(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    """Another boot, another process under the pid, or none: the message says that it is gone, whose it was, and why."""
    record = replace(record_of(os.getpid(), str(uuid4())), **changes)
    write_record(tmp_path, record)
    assert not process_alive(record)
    message = refusal(tmp_path)
    assert "is gone" in message
    assert record.epoch in message
    assert f"pid {record.pid}" in message
    assert re.search(sentence, message)
    ((_, why),) = look_up(tmp_path).lost
    assert re.fullmatch(sentence, why)


@contextmanager
def started(*command: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with variables of its own, that has its command by now."""
    process = subprocess.Popen(
        ["sh", "-c", 'echo; exec "$@"', "sh", *command], env={**os.environ, **variables}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        # In the middle of an exec a process has neither arguments nor variables to show.
        shown = Path(f"/proc/{process.pid}")
        wait_until(lambda: (shown / "cmdline").read_bytes()[:3] not in (b"", b"sh\0"), "the command", 60.0)
        if command[0] == "sleep":
            wait_until(lambda: bool((shown / "environ").read_bytes()), "its variables", 60.0)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("variables", "recorded", "sentence"),
    [
        ({"INVOCATION_ID": "b" * 32}, "b" * 32, ""),
        ({"INVOCATION_ID": "b" * 32}, "", ""),
        ({"INVOCATION_ID": "b" * 32}, "a" * 32, f"of another unit: expected invocation id {'a' * 32}, found {'b' * 32}"),
        ({"HSX_EPOCH_RECORD": "/dumps/mine/server.json"}, "", ""),
        ({"HSX_EPOCH_RECORD": "/dumps/other/server.json"}, "", "serves another epoch: expected mine, found other"),
    ],
)
def test_a_process_says_itself_what_it_is(tmp_path: Path, variables: dict[str, str], recorded: str, sentence: str) -> None:
    """What it was started with must not contradict the record: its unit's invocation, and the record it was given."""
    with started("sleep", "3600", **variables) as process:
        record = replace(record_of(process.pid, "mine"), invocation_id=recorded)
        write_record(tmp_path, record)
        assert process_alive(record)
        if sentence:
            assert sentence in refusal(tmp_path)
            assert sentence in mismatch(record)
        else:
            assert find_server(tmp_path, PORT) == record


def test_a_process_whose_variables_cannot_be_read_is_judged_by_the_rest() -> None:
    """A title may have overwritten them; another user's cannot be read. What is not known contradicts nothing."""
    with started("env", "-i", "sleep", "3600") as process:
        record = record_of(process.pid, str(uuid4()))
        while environment(process.pid):
            pass
        assert mismatch(replace(record, invocation_id="a" * 32)) == ""


def test_zombie_is_gone(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """A process that ended and was not waited for does not serve any more."""
    record = record_of(process.pid, str(uuid4()))
    write_record(tmp_path, record)
    assert find_server(tmp_path, PORT) == record
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) is None
    assert "is gone" in refusal(tmp_path)


def test_no_record_at_all(tmp_path: Path) -> None:
    """No folder, an empty one, or folders without a record: nobody ever started a server here."""
    for folder in (tmp_path / "none", tmp_path):
        assert "no server was started there" in refusal(folder)
    (tmp_path / str(uuid4())).mkdir()
    assert "no server was started there" in refusal(tmp_path)


def test_records_that_cannot_be_read_are_counted_not_fatal(tmp_path: Path) -> None:
    """Bytes that are no text, a folder, a loop of links: none hides the server that is there, and without one each is named."""
    broken = {name: tmp_path / name / "server.json" for name in ("bytes", "folder", "loop")}
    for path in broken.values():
        path.parent.mkdir()
    broken["bytes"].write_bytes(b'{"epoch": "\xff"}')
    broken["folder"].mkdir()
    broken["loop"].symlink_to(broken["loop"])
    (tmp_path / "hsx.lock").write_text("")
    message = refusal(tmp_path)
    assert all(str(path) in message for path in broken.values())
    assert "hsx.lock" not in message
    record = record_of(os.getpid(), str(uuid4()))
    write_record(tmp_path, record)
    assert find_server(tmp_path, PORT) == record


def test_folders_that_this_user_may_not_enter(tmp_path: Path) -> None:
    """The server of another user: the message says what is in the way."""
    write_record(tmp_path, record_of(os.getpid(), "closed"))
    (tmp_path / "closed").chmod(0)
    tmp_path.chmod(0o755)
    code = (
        "import os; from pathlib import Path\n"
        "from hsx.engines.external import find_server; from hsx.errors import EngineError\n"
        "os.getuid() or os.setuid(65534)\n"
        "try: find_server(Path('.'), 1)\n"
        "except EngineError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "closed").chmod(0o700)
    assert "[epoch_unknown]" in done.stdout
    assert "Permission denied: 'closed/server.json'" in done.stdout


def test_other_ports_only(tmp_path: Path) -> None:
    """Servers on other ports are named, not taken."""
    for port in (8, 9):
        write_record(tmp_path, record_of(os.getpid(), str(uuid4()), port))
    message = refusal(tmp_path)
    assert "names port 7" in message
    assert "8, 9" in message


def test_living_server_among_dead_ones(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """Records of earlier epochs do not hide the running one."""
    running = record_of(process.pid, str(uuid4()))
    for record in (
        replace(record_of(os.getpid(), str(uuid4())), start_ticks=3),
        running,
        record_of(os.getpid(), str(uuid4()), 8),
    ):
        write_record(tmp_path, record)
    assert find_server(tmp_path, PORT) == running


def test_unreadable_record_is_told(tmp_path: Path) -> None:
    """A record that cannot be read does not stop the search, and is named where it finds nothing."""
    folder = write_record(tmp_path, record_of(os.getpid(), str(uuid4()), 8))
    broken = tmp_path / str(uuid4())
    broken.mkdir()
    (broken / "server.json").write_text("{")
    assert str(broken) in refusal(tmp_path)
    write_record(tmp_path, record_of(os.getpid(), str(uuid4())))
    assert find_server(tmp_path, PORT).pid == os.getpid()
    assert folder.exists()


async def test_start_waits_for_a_server(tmp_path: Path) -> None:
    """A server that comes later is found; stop leaves it alone."""
    owner = ExternalOwner(tmp_path, PORT, wait_s=60, poll_s=0.01)
    assert not owner.restarts
    task = asyncio.create_task(owner.start())
    while "no server was started" not in owner.situation:  # noqa: ASYNC110 - the owner polls, so the test does
        await asyncio.sleep(0.01)
    record = record_of(os.getpid(), str(uuid4()))
    write_record(tmp_path, record)
    assert await task == record
    assert record.epoch in owner.situation
    await owner.stop(0)
    assert process_alive(record)


async def test_start_gives_up(tmp_path: Path) -> None:
    """After its time the reason is what the last look found."""
    write_record(tmp_path, replace(record_of(os.getpid(), str(uuid4())), boot_id="another"))
    with pytest.raises(EngineError, match=r"is gone.*waited 0 s") as caught:
        await ExternalOwner(tmp_path, PORT, wait_s=0).start()
    assert caught.value.kind == "epoch_unknown"


async def test_ended_follows_the_process(tmp_path: Path, process: subprocess.Popen[bytes]) -> None:
    """It returns when the process ends, not before, and at once for one that is gone already."""
    record = record_of(process.pid, str(uuid4()))
    write_record(tmp_path, record)
    owner = ExternalOwner(tmp_path, PORT, wait_s=0)
    await owner.start()
    task = asyncio.create_task(owner.ended())
    await asyncio.wait([task], timeout=0.05)
    assert not task.done()
    process.kill()
    assert f"process {process.pid} of epoch {record.epoch} is gone" in await task
    process.wait()
    assert "is gone" in await owner.ended()


async def test_ended_can_be_cancelled(tmp_path: Path) -> None:
    """Giving up the watch leaves no reader behind."""
    write_record(tmp_path, record_of(os.getpid(), str(uuid4())))
    owner = ExternalOwner(tmp_path, PORT, wait_s=0)
    await owner.start()
    for _ in range(3):
        task = asyncio.create_task(owner.ended())
        await asyncio.wait([task], timeout=0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_ended_without_a_start(tmp_path: Path) -> None:
    """There is nothing to watch."""
    with pytest.raises(RuntimeError, match="no server was found"):
        await ExternalOwner(tmp_path, PORT, wait_s=0).ended()


def test_boot_id_is_one_line() -> None:
    """As `hsx serve` writes it."""
    assert boot_id() == boot_id().strip()
    assert len(boot_id()) == 36
