"""Locks: who holds them, where they lie, and what a folder that takes none is called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hsx.engines.process import descendants
from hsx.errors import RunError
from hsx.locks import JOB_LOCK, locked, store_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


def test_a_lock_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "new" / JOB_LOCK
    with locked(path, "job a"):
        message = refusal(path)
        assert message.startswith(f"job a is held by pid {os.getpid()}, running since 20")
        assert "pytest" in message
    with locked(path, "job a"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def refusal(path: Path) -> str:
    """Why the lock cannot be had."""
    with pytest.raises(RunError, match="expected no other hsx on it") as caught, locked(path, "job a"):
        pass
    assert caught.value.kind == "job_locked"
    return caught.value.message


@contextmanager
def holding(path: Path, tracer: Sequence[str] = ()) -> Iterator[subprocess.Popen[bytes]]:
    """Another process that holds the lock, and is killed at the end; under a tracer, it is not waited for."""
    code = (
        "import sys, time; from pathlib import Path; from hsx.locks import locked\n"
        "with locked(Path(sys.argv[1]), 'job a'): print('held', flush=True); time.sleep(3600)"
    )
    process = subprocess.Popen([*tracer, sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert tracer or process.stdout.readline() == b"held\n"
        yield process
    finally:
        for pid in (*descendants(process.pid), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def test_another_process_is_named_and_its_death_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / JOB_LOCK
    with holding(path) as process:
        message = refusal(path)
        assert f"held by pid {process.pid}, running since" in message
        assert "import sys, time" in message
    assert json.loads(path.read_text())["pid"] == process.pid
    with locked(path, "job a"):
        assert f"held by pid {os.getpid()}," in refusal(path)


@pytest.mark.parametrize("changes", [{"start_ticks": 1}, {"boot_id": "another"}, {"pid": "x"}, None])
def test_a_name_that_is_not_the_holders_is_not_told(tmp_path: Path, changes: dict[str, object] | None) -> None:
    """Its pid went to another process, is of another boot, or the file says nothing: the kernel's table names the holder."""
    path = tmp_path / JOB_LOCK
    with holding(path) as process:
        written = json.loads(path.read_text())
        innocent = {**written, "pid": os.getpid(), "command": "innocent", **changes} if changes else {}
        path.write_text(json.dumps(innocent))
        message = refusal(path)
    assert f"held by pid {process.pid}: {sys.executable}"[:60] in message
    assert "innocent" not in message


def test_a_holder_on_another_host_is_named_with_it(tmp_path: Path) -> None:
    """On a shared disk its process cannot be looked at from here."""
    path = tmp_path / JOB_LOCK
    with locked(path, "job a"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere", "pid": 7}))
        message = refusal(path)
    assert "held by pid 7, running since" in message
    assert "(on host elsewhere)" in message


@pytest.mark.usefixtures("strace")
def test_a_file_that_is_removed_between_open_and_lock(tmp_path: Path) -> None:
    """The lock of a file without a name keeps nobody out, so the next one is taken. strace stops the process in between."""
    path, trace = tmp_path / JOB_LOCK, tmp_path / "trace"
    command = ["strace", "-qq", "-o", str(trace), "-e", "trace=flock", "-e", "inject=flock:signal=STOP:when=1"]
    with holding(path, command) as process:
        stopped = wait_for(lambda: "stopped by SIGSTOP" in trace.read_text() if trace.exists() else False)
        assert stopped
        path.unlink()
        tracee = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        os.kill(tracee, signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert f"held by pid {tracee}," in refusal(path)
    assert trace.read_text().count("flock(") == 2


def wait_for(condition: Callable[[], bool]) -> bool:
    """Waits for what another process does; False after three minutes."""
    deadline = time.monotonic() + 180
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.usefixtures("strace")
def test_a_file_system_without_locks(tmp_path: Path) -> None:
    """ENOLCK, put in by strace, as a network disk without a lock service gives it."""
    code = (
        "import sys; from pathlib import Path; from hsx.locks import locked; from hsx.errors import RunError\n"
        "try: locked(Path(sys.argv[1]), 'store s', 'store_unwritable').__enter__()\n"
        "except RunError as error: print(error)"
    )
    command = ["strace", "-qq", "-o", str(tmp_path / "trace"), "-e", "inject=flock:error=ENOLCK", sys.executable, "-c", code]
    done = subprocess.run([*command, str(tmp_path / JOB_LOCK)], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"[store_unwritable] store s: {tmp_path / JOB_LOCK} cannot be locked: No locks available")
    assert "expected a file system that supports flock" in done.stdout


def test_a_folder_of_another_user(tmp_path: Path) -> None:
    """The message tells who may not write where."""
    (tmp_path / "closed").mkdir(mode=0o500)
    code = (
        "import os, sys; from pathlib import Path; from hsx.locks import locked; from hsx.errors import RunError\n"
        "os.getuid() or os.setuid(65534)\n"
        "try: locked(Path('closed/job.lock'), 'job a').__enter__()\n"
        "except RunError as error: print(error)"
    )
    tmp_path.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "lock file closed/job.lock cannot be written: Permission denied (user id " in done.stdout


def test_an_error_inside_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), locked(tmp_path / JOB_LOCK, "job"):
        (tmp_path / "none").read_text()


@pytest.mark.parametrize("kind", ["ledger_failed", "staging_failed", "store_unwritable"])
def test_a_folder_that_takes_no_lock(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(RunError, match=r"job a: lock file .*file/job\.lock cannot be written") as caught,
        locked(tmp_path / "file" / JOB_LOCK, "job a", kind),
    ):
        pass
    assert caught.value.kind == kind


def test_a_full_disk(full_disk: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(RunError, match="No space left on device") as caught, locked(full_disk / "state" / JOB_LOCK, "job"):
        pass
    assert caught.value.kind == "ledger_failed"
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_stores_lock_is_beside_it_whatever_it_is_called(tmp_path: Path) -> None:
    store = tmp_path / "data" / "store.zarr"
    store.mkdir(parents=True)
    (tmp_path / "link").symlink_to(store)
    (tmp_path / "folder").symlink_to(store.parent)
    expected = store.parent / ".store.zarr.lock"
    assert {store_lock(path) for path in (store, tmp_path / "link", tmp_path / "folder" / "store.zarr")} == {expected}
