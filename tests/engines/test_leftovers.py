"""What is removed from /dev/shm, and above all what is not: with real semaphores of processes that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from hsx.core.epoch import SHM_NAME
from hsx.engines.leftovers import SHARED, remember, sweep_epoch, sweep_shared_memory
from hsx.engines.process import descendants, process_alive
from hsx.testing.idle_server import record_of, write_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from hsx.core.epoch import EpochRecord

# Holds a semaphore and a shared memory, as a server does; names them, and waits to be killed. Its tracker, which would unlink
# them, is killed with it: that is what happens to a server's.
HOLDER = """
import multiprocessing, sys, time
from multiprocessing import resource_tracker, shared_memory
lock = multiprocessing.get_context("spawn").Lock()
memory = shared_memory.SharedMemory(create=True, size=4096)
print("sem." + lock._semlock.name.lstrip("/"), memory.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(3600)
"""


class Holder:
    """A process with files in /dev/shm.

    Attributes:
        process: it.
        names: its files.
        folder: its epoch's folder, with a record that was written before the files were made.
        record: what stands there.
    """

    def __init__(self, dump_dir: Path) -> None:
        # The shell's pid is the holder's: the record is written between the two, as hsx serve does.
        self.process = subprocess.Popen(
            ["sh", "-c", 'read go; exec "$0" -c "$1"', sys.executable, HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.record: EpochRecord = record_of(self.process.pid, str(uuid4()))
        self.folder = write_record(dump_dir, self.record)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        *self.names, tracker = self.process.stdout.readline().decode().split()
        self._tracker = int(tracker)

    def path(self, name: str) -> Path:
        return SHARED / name

    def left(self) -> list[str]:
        """Those of its files that are still there."""
        return [name for name in self.names if self.path(name).exists()]

    def remember(self) -> None:
        remember(self.folder, [self.process.pid, *descendants(self.process.pid)])

    def kill(self) -> None:
        """The tracker first: it would clear up after its parent."""
        for pid in (self._tracker, self.process.pid):
            if self.process.returncode is None:
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Leaves nothing of it, whatever the test has found."""
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()
        for name in self.names:
            self.path(name).unlink(missing_ok=True)


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Callable[[], Holder]]:
    """Starts holders below `tmp_path / "dumps"`."""
    with ExitStack() as stack:

        def start() -> Holder:
            holder = Holder(tmp_path / "dumps")
            stack.callback(holder.close)
            return holder

        yield start


def rewrite(holder: Holder, **changes: Any) -> None:
    """Changes the record, at the time that it had."""
    before = (holder.folder / "server.json").stat()
    write_record(holder.folder.parent, replace(holder.record, **changes))
    os.utime(holder.folder / "server.json", ns=(before.st_atime_ns, before.st_mtime_ns))


def test_the_leftovers_of_a_killed_server_go(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """Nothing goes while it lives; all of it, and the record of it, when it has been killed."""
    holder = hold()
    holder.remember()
    known = json.loads((holder.folder / SHM_NAME).read_text())["files"]
    assert sorted(file["name"] for file in known) == sorted(holder.names)
    assert sweep_shared_memory(tmp_path / "dumps") == 0
    assert holder.left() == holder.names
    holder.kill()
    assert holder.left() == holder.names
    assert sweep_shared_memory(tmp_path / "dumps") == 2
    assert holder.left() == []
    assert not (holder.folder / SHM_NAME).exists()
    assert sweep_shared_memory(tmp_path / "dumps") == 0


def test_what_another_process_holds_stays_until_it_is_gone(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """A file that a living process has open or mapped is not removed, and not forgotten either."""
    holder = hold()
    holder.remember()
    holder.kill()
    with holder.path(holder.names[0]).open("rb"):
        assert sweep_shared_memory(tmp_path / "dumps") == 1
        assert holder.left() == holder.names[:1]
        assert (holder.folder / SHM_NAME).exists()
    assert sweep_shared_memory(tmp_path / "dumps") == 1
    assert holder.left() == []


def test_what_nobody_remembered_stays(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """Names alone prove nothing: two servers, of which one was looked at."""
    seen, unseen = hold(), hold()
    seen.remember()
    for holder in (seen, unseen):
        holder.kill()
    assert sweep_shared_memory(tmp_path / "dumps") == 2
    assert (seen.left(), unseen.left()) == ([], unseen.names)


def test_another_file_under_the_name_stays(hold: Callable[[], Holder]) -> None:
    """The inode, and the time of its last change, have to be those that were seen."""
    holder = hold()
    holder.remember()
    holder.kill()
    replaced, touched = map(holder.path, holder.names)
    # Made under another name first: a freed inode may be given to the next file.
    other = replaced.with_name(f"hsx-test-{uuid4().hex}")
    other.write_bytes(b"")
    other.rename(replaced)
    touched.chmod(0o640)
    assert sweep_epoch(holder.folder) == 0
    assert holder.left() == holder.names
    assert not (holder.folder / SHM_NAME).exists()


def test_after_a_start_of_the_host_nothing_is_removed(hold: Callable[[], Holder]) -> None:
    """/dev/shm was emptied then, and numbers may repeat."""
    holder = hold()
    holder.remember()
    holder.kill()
    rewrite(holder, boot_id="another")
    assert sweep_epoch(holder.folder) == 0
    assert holder.left() == holder.names
    assert not (holder.folder / SHM_NAME).exists()


def test_what_the_server_found_there_is_not_its_own(hold: Callable[[], Holder]) -> None:
    """A file that is older than the record was made by somebody else, whoever has mapped it."""
    holder = hold()
    write_record(holder.folder.parent, holder.record)
    later = (holder.path(holder.names[0]).stat().st_ctime_ns + 10**9,) * 2
    os.utime(holder.folder / "server.json", ns=later)
    holder.remember()
    assert not (holder.folder / SHM_NAME).exists()


@contextmanager
def opened(name: str) -> Iterator[None]:
    """A file in /dev/shm that this process has open."""
    path = SHARED / name
    try:
        with path.open("wb"):
            yield
    finally:
        path.unlink()


def test_files_of_people_are_never_looked_at(tmp_path: Path) -> None:
    """A model that was copied to /dev/shm is held by the server, and is not of a kind that servers make."""
    record = record_of(os.getpid(), str(uuid4()))
    folder = write_record(tmp_path, record)
    ours, theirs = f"psm_{uuid4().hex[:8]}", f"hsx-test-{uuid4().hex}.safetensors"
    with opened(ours), opened(theirs):
        remember(folder, [os.getpid()])
    names = [file["name"] for file in json.loads((folder / SHM_NAME).read_text())["files"]]
    assert ours in names
    assert theirs not in names


def test_a_list_that_was_tampered_with_reaches_nothing_else(tmp_path: Path, hold: Callable[[], Holder]) -> None:
    """Names that lead out of /dev/shm or are of another kind are passed over, whatever numbers stand beside them."""
    holder = hold()
    holder.kill()
    outside = tmp_path / "sem.mp-outside"
    outside.write_text("")
    person = SHARED / f"hsx-test-{uuid4().hex}"
    person.write_text("")
    try:
        files = []
        for path, name in ((outside, f"sem.mp-/../../..{outside}"), (person, person.name)):
            found = path.stat()
            files.append({"name": name, "device": found.st_dev, "inode": found.st_ino, "ctime_ns": found.st_ctime_ns})
        (holder.folder / SHM_NAME).write_text(json.dumps({"files": files}))
        assert sweep_epoch(holder.folder) == 0
        assert outside.exists()
        assert person.exists()
    finally:
        person.unlink()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"files": [1]}', '{"files": [{"name": "psm_1"}]}', '{"files": 3}'])
def test_a_broken_list_is_no_list(hold: Callable[[], Holder], text: str) -> None:
    """It is dropped, and nothing else happens; so are its partial files."""
    holder = hold()
    (holder.folder / SHM_NAME).write_text(text)
    (holder.folder / f"{SHM_NAME}.7.part").write_text(text)
    assert sweep_epoch(holder.folder) == 0
    assert (holder.folder / SHM_NAME).exists()
    holder.kill()
    assert not process_alive(holder.record)
    assert sweep_epoch(holder.folder) == 0
    assert sorted(path.name for path in holder.folder.iterdir()) == ["server.json"]
    assert holder.left() == holder.names


def test_a_folder_that_is_gone_is_no_matter(tmp_path: Path) -> None:
    """Neither look nor sweep raises."""
    remember(tmp_path / "none", [os.getpid()])
    assert sweep_epoch(tmp_path / "none") == 0
    assert sweep_shared_memory(tmp_path / "none") == 0
    assert list(tmp_path.iterdir()) == []
