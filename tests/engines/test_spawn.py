"""Nothing of a spawned server outlives hsx, and a start that fails says why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from hsx.core.epoch import SHM_NAME
from hsx.engines.leftovers import SHARED
from hsx.engines.process import descendants, start_ticks
from hsx.engines.reaper import OWNER_GONE
from hsx.engines.spawn import SpawnOwner, SpawnPlan
from hsx.errors import EngineError
from hsx.testing.idle_server import PIDS_NAME, record_of, write_record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PATIENCE_S = 180.0

# A small hsx: it starts a server, says so, and waits to be killed.
PARENT = """
import asyncio, sys
from pathlib import Path
from hsx.engines.spawn import SpawnOwner, SpawnPlan

async def main(folder):
    command = [sys.executable, "-m", "hsx.testing.idle_server", str(folder / "dumps"), "--stubborn", "--shared"]
    owner = SpawnOwner(SpawnPlan(command=command, dump_dir=folder / "dumps", log_file=folder / "server.log"))
    print((await owner.start()).epoch, flush=True)
    await owner.ended()

asyncio.run(main(Path(sys.argv[1])))
"""


def plan(folder: Path, *options: str, record_timeout_s: float = PATIENCE_S) -> SpawnPlan:
    """An idle server under `folder`."""
    return SpawnPlan(
        command=[sys.executable, "-m", "hsx.testing.idle_server", str(folder / "dumps"), *options],
        args=["--port", "7"],
        dump_dir=folder / "dumps",
        log_file=folder / "server.log",
        env={"HSX_TEST_VARIABLE": "there"},
        record_timeout_s=record_timeout_s,
    )


def pids(folder: Path, epoch: str) -> dict[str, Any]:
    """What the idle server wrote of itself."""
    document: dict[str, Any] = json.loads((folder / "dumps" / epoch / PIDS_NAME).read_text())
    return document


def tree(written: dict[str, Any]) -> list[int]:
    """The pids of its three processes."""
    return [written[name] for name in ("main", "child", "orphan")]


def alive(numbers: list[int]) -> list[int]:
    """Those of the pids that run."""
    return [number for number in numbers if start_ticks(number) is not None]


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another process does."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - other processes have no event to wait for
            await asyncio.sleep(0.01)


@pytest.fixture
async def owner(tmp_path: Path) -> AsyncIterator[SpawnOwner]:
    """An owner of an idle server, stopped at the end."""
    owner = SpawnOwner(plan(tmp_path))
    yield owner
    await owner.stop(0)


async def test_start_and_stop(tmp_path: Path, owner: SpawnOwner) -> None:
    """The record names the server itself; the arguments reach it; a stop leaves nothing, and is idempotent."""
    assert owner.restarts
    record = await owner.start()
    written = pids(tmp_path, record.epoch)
    assert record.pid == written["main"]
    assert written["rest"] == ["--port", "7"]
    assert alive(tree(written)) == tree(written)
    environ = await asyncio.to_thread(Path(f"/proc/{record.pid}/environ").read_bytes)
    assert b"HSX_TEST_VARIABLE=there" in environ
    await owner.stop(PATIENCE_S)
    assert alive(tree(written)) == []
    await owner.stop(PATIENCE_S)
    assert "SIGTERM" in await owner.ended()


async def test_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    """A server that ignores SIGTERM is killed when its grace is over."""
    owner = SpawnOwner(plan(tmp_path, "--stubborn"))
    written = pids(tmp_path, (await owner.start()).epoch)
    await owner.stop(0.1)
    assert alive(tree(written)) == []
    assert "SIGKILL" in await owner.ended()


async def test_restart_is_another_epoch(tmp_path: Path, owner: SpawnOwner) -> None:
    """Start, stop, start: two epochs; a start over a running server is a mistake of the caller."""
    first = await owner.start()
    with pytest.raises(RuntimeError, match="still runs"):
        await owner.start()
    await owner.stop(PATIENCE_S)
    second = await owner.start()
    assert first.epoch != second.epoch
    assert alive(tree(pids(tmp_path, second.epoch))) == tree(pids(tmp_path, second.epoch))


async def test_death_of_the_server_takes_its_tree(tmp_path: Path, owner: SpawnOwner) -> None:
    """When the main process is killed, `ended` tells how, and what it left behind is gone by then."""
    written = pids(tmp_path, (await owner.start()).epoch)
    watching = asyncio.create_task(owner.ended())
    os.kill(written["main"], signal.SIGKILL)
    sentence = await asyncio.wait_for(watching, PATIENCE_S)
    assert "SIGKILL" in sentence
    assert "idle server is up" in sentence
    assert alive(tree(written)) == []


def reapers(server: int, root: int) -> list[int]:
    """The two processes between `root` and the server, the outer one first."""
    above = [pid for pid in descendants(root) if server in descendants(pid)]
    return sorted(above, key=lambda pid: -len(descendants(pid)))


@pytest.mark.parametrize("killed", [[0], [1], [0, 1], [1, 0]], ids=["outer", "inner", "outer and inner", "inner and outer"])
async def test_death_of_the_reaper_takes_everything(tmp_path: Path, killed: list[int]) -> None:
    """Even where the reaper is killed, nothing of the server is left, orphans included, once `ended` has returned."""
    owner = SpawnOwner(plan(tmp_path, "--stubborn", "--shared"))
    written = pids(tmp_path, (await owner.start()).epoch)
    await until((SHARED / written["shared"]).exists)
    both = reapers(written["main"], os.getpid())
    assert len(both) == 2
    for which in killed:
        os.kill(both[which], signal.SIGKILL)
    assert "SIGKILL" in await asyncio.wait_for(owner.ended(), PATIENCE_S)
    assert alive(tree(written)) == []
    assert not (SHARED / written["shared"]).exists()


@asynccontextmanager
async def small_hsx(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    """A process that has spawned an idle server, and what that wrote of itself; the server holds a file in /dev/shm."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(folder), stdout=subprocess.PIPE)
    assert parent.stdout is not None
    written = pids(folder, (await parent.stdout.readline()).decode().strip())
    try:
        await until((SHARED / written["shared"]).exists)
        yield parent, written
    finally:
        for pid in (*tree(written), *([parent.pid] if parent.returncode is None else [])):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await parent.wait()
        (SHARED / written["shared"]).unlink(missing_ok=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_death_of_hsx_takes_everything(tmp_path: Path, number: signal.Signals) -> None:
    """However hsx dies, its reaper and the whole tree vanish, and what they held in /dev/shm."""
    async with small_hsx(tmp_path) as (parent, written):
        below = descendants(parent.pid)
        assert set(tree(written)) <= set(below)
        assert len(below) == 5
        parent.send_signal(number)
        await parent.wait()
        await until(lambda: not alive(below))
        assert not (SHARED / written["shared"]).exists()


@pytest.mark.parametrize("which", [0, 1], ids=["outer", "inner"])
async def test_death_of_hsx_and_a_reaper_at_once_takes_everything(tmp_path: Path, which: int) -> None:
    """The other reaper is left to do it. hsx is stopped first, so that it cannot see the first death."""
    async with small_hsx(tmp_path) as (parent, written):
        below, both = descendants(parent.pid), reapers(written["main"], parent.pid)
        for pid, number in ((parent.pid, signal.SIGSTOP), (both[which], signal.SIGKILL), (parent.pid, signal.SIGKILL)):
            os.kill(pid, number)
        await parent.wait()
        await until(lambda: not alive(below))
        assert not (SHARED / written["shared"]).exists()


async def test_what_outlives_hsx_and_both_reapers_goes_at_the_next_start(tmp_path: Path) -> None:
    """The kernel kills the server itself; an orphan of it lives on until hsx starts again, and so does what it holds."""
    async with small_hsx(tmp_path) as (parent, written):
        both, shared = reapers(written["main"], parent.pid), SHARED / written["shared"]
        await until((tmp_path / "dumps" / written["epoch"] / SHM_NAME).exists)
        # Stopped first: none of them can see the death of another.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*both, parent.pid):
                os.kill(pid, number)
        await parent.wait()
        await until(lambda: not alive([written["main"]]))
        assert alive([written["orphan"]])
        assert shared.exists()
        owner = SpawnOwner(plan(tmp_path))
        try:
            await owner.start()
            assert alive(tree(written)) == []
            assert not shared.exists()
            assert "killed 2 processes that an earlier run had left of its server" in owner.situation
            assert "removed 1 files that killed servers had left in /dev/shm" in owner.situation
        finally:
            await owner.stop(0)


async def test_a_stopped_server_is_killed(tmp_path: Path) -> None:
    """SIGSTOP keeps SIGTERM away from it, not SIGKILL."""
    owner = SpawnOwner(plan(tmp_path))
    written = pids(tmp_path, (await owner.start()).epoch)
    for pid in tree(written):
        os.kill(pid, signal.SIGSTOP)
    await until(lambda: all(") T " in Path(f"/proc/{pid}/stat").read_text() for pid in tree(written)))
    await owner.stop(0.1)
    assert alive(tree(written)) == []
    assert "SIGKILL" in await owner.ended()


async def test_a_start_on_a_port_that_somebody_has(tmp_path: Path) -> None:
    """It is refused before a large model is loaded in vain, with the name of who has it; nothing is started."""
    before = set(descendants(os.getpid()))
    with socket.create_server(("127.0.0.1", 0)) as opened:
        port = opened.getsockname()[1]
        with pytest.raises(EngineError, match=rf"port {port} is held by process {os.getpid()} \(.*; expected nobody") as caught:
            await SpawnOwner(replace(plan(tmp_path), port=port)).start()
    assert caught.value.kind == "server_start_failed"
    assert set(descendants(os.getpid())) <= before


async def test_a_server_that_is_not_ours_is_told_and_left_alone(tmp_path: Path, owner: SpawnOwner) -> None:
    """One that somebody else started in the same dump directory."""
    other = record_of(os.getpid(), str(uuid4()))
    write_record(tmp_path / "dumps", other)
    await owner.start()
    assert f"another server still lives in {tmp_path / 'dumps'}: epoch {other.epoch}, pid {os.getpid()}" in owner.situation


async def test_reaper_whose_owner_is_gone_starts_nothing(tmp_path: Path) -> None:
    """If the owner died while the reaper was starting, nothing is started: its pid is not the parent's."""
    marker = tmp_path / "started"
    command = [sys.executable, "-m", "hsx.engines.reaper", "1", "touch", str(marker)]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == OWNER_GONE
    assert not marker.exists()


@pytest.mark.parametrize(("script", "status"), [("exit 3", 3), ("exit 0", 0), ("kill -SEGV $$", 128 + signal.SIGSEGV)])
async def test_reaper_forwards_the_exit_status(script: str, status: int) -> None:
    """The command's own status, or 128 and the signal."""
    command = [sys.executable, "-m", "hsx.engines.reaper", str(os.getpid()), "sh", "-c", script]
    process = await asyncio.create_subprocess_exec(*command)
    assert await process.wait() == status


async def test_early_end_is_told_with_the_output(tmp_path: Path) -> None:
    """A server that ends before its record: the status, the command and the end of its output."""
    owner = SpawnOwner(plan(tmp_path, "--exit", "3", "--last-words", "no such model"))
    with pytest.raises(EngineError) as caught:
        await owner.start()
    assert caught.value.kind == "server_start_failed"
    assert "ended with exit status 3" in caught.value.message
    assert "no such model" in caught.value.message
    assert "--port 7" in caught.value.message


async def test_output_of_an_earlier_start_is_not_told(tmp_path: Path) -> None:
    """The log is appended to; an error shows only what this start wrote."""
    (tmp_path / "server.log").write_text("of yesterday\n")
    with pytest.raises(EngineError) as caught:
        await SpawnOwner(plan(tmp_path, "--exit", "1")).start()
    assert "of yesterday" not in caught.value.message
    assert (tmp_path / "server.log").read_text().startswith("of yesterday\n")


async def test_command_that_is_not_there(tmp_path: Path) -> None:
    """An interpreter that does not exist is an error of the start, with its name."""
    missing = SpawnPlan(command=["/nowhere/python"], dump_dir=tmp_path, log_file=tmp_path / "server.log")
    with pytest.raises(EngineError, match="cannot start /nowhere/python") as caught:
        await SpawnOwner(missing).start()
    assert caught.value.kind == "server_start_failed"


async def test_record_that_is_no_text(tmp_path: Path) -> None:
    """It is an error of the start, which names the file; nothing is left of the server."""
    before = set(descendants(os.getpid()))
    code = (
        "import sys, time; from pathlib import Path\n"
        "folder = Path(sys.argv[1], sys.argv[3]); folder.mkdir(parents=True)\n"
        "(folder / 'server.part').write_bytes(b'\\xff{}'); (folder / 'server.part').rename(folder / 'server.json')\n"
        "time.sleep(3600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "dumps")]
    owner = SpawnOwner(SpawnPlan(command=command, dump_dir=tmp_path / "dumps", log_file=tmp_path / "server.log"))
    with pytest.raises(EngineError, match=r"server\.json: 'utf-8' codec can't decode byte 0xff") as caught:
        await owner.start()
    assert caught.value.kind == "epoch_unknown"
    assert set(descendants(os.getpid())) <= before


async def test_log_that_cannot_be_made(tmp_path: Path) -> None:
    """A start without a place for the server's words is refused before there is a server."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"log .*file/server\.log cannot be written: File exists") as caught:
        await SpawnOwner(replace(plan(tmp_path), log_file=tmp_path / "file" / "server.log")).start()
    assert caught.value.kind == "server_start_failed"


async def test_log_that_somebody_took_away(tmp_path: Path, owner: SpawnOwner) -> None:
    """The end of the server is told all the same, without its last words."""
    await owner.start()
    (tmp_path / "server.log").unlink()
    await owner.stop(0)
    assert (await owner.ended()).endswith("is ''")


async def test_silent_server_is_given_up(tmp_path: Path) -> None:
    """Without a record in time the start fails, and nothing is left of it."""
    before = set(descendants(os.getpid()))
    with pytest.raises(EngineError, match="wrote no") as caught:
        await SpawnOwner(plan(tmp_path, "--no-record", record_timeout_s=0.5)).start()
    assert caught.value.kind == "server_start_failed"
    assert set(descendants(os.getpid())) <= before


async def test_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    """Cancelling a start ends what it began."""
    before = set(descendants(os.getpid()))
    task = asyncio.create_task(SpawnOwner(plan(tmp_path, "--no-record")).start())
    await until(lambda: bool(set(descendants(os.getpid())) - before))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(descendants(os.getpid())) <= before


def test_start_from_another_thread_is_refused(tmp_path: Path) -> None:
    """The kernel reports the death of the forking thread, so only the main thread may fork."""
    found: list[str] = []

    def run() -> None:
        try:
            asyncio.run(SpawnOwner(plan(tmp_path)).start())
        except RuntimeError as error:
            found.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in found[0]


async def test_ended_without_a_start(owner: SpawnOwner) -> None:
    """There is nothing to wait for."""
    with pytest.raises(RuntimeError, match="no server was started"):
        await owner.ended()
