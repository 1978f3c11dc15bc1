"""The writer process: what it writes, how it fails, and how it ends, alone and with the process that it writes for."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.capture import writer_process
from hsx.capture.calls import Call, DumpsHere, Outcome
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.memory import SharedMemory
from hsx.capture.model import CaptureRefusedError
from hsx.capture.writer_process import DumpsElsewhere
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.reader import MappedDump
from hsx.engines.process import descendants

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hsx.capture.calls import Dumps

SPEC = CaptureSpec((1, 3), "post_norm")
WIDTH = 16
EPOCH = "11111111-2222-4333-8444-555555555555"
TOKENS = 10


class Bench:
    """A writer process, or none, and a place in shared memory for one prompt's states."""

    def __init__(self, folder: Path, *, here: bool = False) -> None:
        self.folder = folder
        self.memory = SharedMemory(1 << 16)
        size = TOKENS * SPEC.states * WIDTH * 2
        self.states: NDArray[np.uint16] = self.memory.bytes[:size].view(np.uint16).reshape(TOKENS, SPEC.states, WIDTH)
        self.ids: NDArray[np.int32] = self.memory.bytes[size : size + 4 * TOKENS].view(np.int32)
        self.counter = Counter(folder, EPOCH)
        writer = DumpWriter(folder, EPOCH, SPEC, WIDTH, "model", "test 1")
        self.dumps: Dumps = DumpsHere(writer) if here else DumpsElsewhere(writer, self.memory, self.counter.lock_fd)

    @property
    def pid(self) -> int:
        assert isinstance(self.dumps, DumpsElsewhere)
        return self.dumps.pid

    def fill(self, index: int) -> None:
        self.states[:] = np.arange(self.states.size).reshape(self.states.shape) + index
        self.ids[:] = np.arange(TOKENS) + index

    def whole(self, index: int) -> Call:
        self.fill(index)
        return Call("whole", marker(index), 0, self.states, self.ids)

    def check(self, index: int) -> int:
        dump = MappedDump(self.folder / f"{marker(index)}.safetensors")
        assert np.array_equal(dump.states, np.arange(self.states.size).reshape(self.states.shape) + index)
        assert dump.input_ids.tolist() == (np.arange(TOKENS) + index).tolist()
        assert dump.header.epoch == EPOCH
        number = dump.header.sequence
        dump.close()
        return number

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith("hsx1"))


def marker(index: int) -> Marker:
    return Marker("0a0b0c0d", index, 1, TOKENS)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.dumps.close()
    bench.counter.close()


@pytest.fixture(params=["here", "elsewhere"])
def either(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Whoever does the calls, what comes of them is the same."""
    bench = Bench(tmp_path, here=request.param == "here")
    yield bench
    bench.dumps.close()
    bench.counter.close()


def test_it_writes_what_lies_in_the_memory_when_it_is_asked(either: Bench) -> None:
    for index in range(3):
        (outcome,) = either.dumps.do([either.whole(index)])
        assert (outcome.sequence, outcome.error) == (index + 1, "")
    assert [either.check(index) for index in range(3)] == [1, 2, 3]


def test_a_dump_in_pieces(either: Bench) -> None:
    either.fill(7)
    one = marker(7)
    calls = [
        Call("begin", one),
        Call("write", one, 4, either.states[4:], either.ids[4:]),
        Call("write", one, 0, either.states[:4], either.ids[:4]),
        Call("publish", one),
    ]
    assert [outcome.sequence for outcome in either.dumps.do(calls)] == [0, 0, 0, 1]
    assert either.check(7) == 1
    assert either.dumps.do([]) == []


def test_any_number_of_calls_and_words(either: Bench) -> None:
    """More than a socket's buffer takes, both ways."""
    either.fill(0)
    many = [Call("begin", marker(index)) for index in range(2000)]
    assert not any(outcome.error for outcome in either.dumps.do(many))
    assert len(either.names()) == len(many)
    either.dumps.do([Call("drop", call.marker) for call in many])
    assert either.names() == []
    for index in range(500):
        (either.folder / f"{marker(index)}.part").mkdir()
    assert [outcome.errno for outcome in either.dumps.do(many[:500])] == [errno.EISDIR] * 500
    reasons = [Call("fail", call.marker, reason="\N{PILE OF POO}" * 10_000) for call in many[500:510]]
    assert not any(outcome.error for outcome in either.dumps.do(reasons))


def test_nothing_is_published_behind_a_write_that_failed_however_far(either: Bench) -> None:
    either.fill(1)
    one = marker(1)
    either.dumps.do([Call("begin", one)])
    calls = [Call("write", one, 1, either.states, either.ids), *(Call("drop", marker(index)) for index in range(2, 300))]
    outcomes = either.dumps.do([*calls, Call("publish", one)])
    assert "tokens 1 to 11" in outcomes[0].error
    assert outcomes[-1] == outcomes[0]
    assert either.names() == [f"{one}.part"]


def test_a_call_that_fails_costs_its_marker_alone(either: Bench) -> None:
    (either.folder / f"{marker(1)}.part").mkdir()
    calls = [either.whole(1), Call("publish", marker(1)), Call("write", marker(2), 0, either.states, either.ids)]
    calls += [Call("publish", marker(2)), either.whole(3)]
    outcomes = either.dumps.do(calls)
    refused, never_begun = outcomes[0], outcomes[2]
    assert refused.errno == errno.EISDIR
    assert refused.error.startswith("IsADirectoryError: ")
    assert outcomes[1] == refused, "what follows was not tried"
    assert (never_begun.errno, never_begun.error.startswith("ValueError: ")) == (0, True)
    assert outcomes[3] == never_begun
    assert outcomes[4].sequence == 1
    assert either.check(3) == 1
    (either.folder / f"{marker(1)}.part").rmdir()
    (noted,) = either.dumps.do([Call("fail", marker(1), reason="x" * 100_000, errno=errno.EISDIR)])
    assert noted.error == ""
    assert either.names() == [f"{marker(1)}.error", f"{marker(3)}.safetensors"]


def test_states_that_lie_elsewhere_are_not_sent(bench: Bench) -> None:
    with pytest.raises(ValueError, match="expected a part of 65536 bytes"):
        bench.dumps.do([Call("whole", marker(1), 0, bench.states.copy(), bench.ids)])
    with pytest.raises(ValueError, match="in one piece"):
        bench.dumps.do([Call("whole", marker(1), 0, bench.states[::2], bench.ids[::2])])
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1


def test_where_it_is_killed_the_rest_is_written_here(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """What was asked and not answered has failed, by no fault of the sample; a number that may have been given is not used."""
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1
    bench.dumps.do([Call("begin", marker(2))])
    os.kill(bench.pid, signal.SIGKILL)
    outcomes = bench.dumps.do([bench.whole(3), Call("publish", marker(2))])
    assert {(outcome.error, outcome.errno) for outcome in outcomes} == {
        ("the writer process of the capture ended (signal 9)", errno.EPIPE)
    }
    assert f"capture.writer_died pid={bench.pid} ended='signal 9' given=1" in caplog.text
    assert bench.dumps.do([Call("write", marker(2), 0, bench.states, bench.ids)]) == outcomes[1:], "its beginning is lost"
    bench.dumps.do([Call("fail", m, reason="lost", errno=errno.EPIPE) for m in (marker(2), marker(3))])
    assert bench.dumps.do([bench.whole(4)])[0].sequence == 4
    assert bench.names() == [f"{marker(1)}.safetensors", f"{marker(2)}.error", f"{marker(3)}.error", f"{marker(4)}.safetensors"]
    calls = [Call("write", marker(5), 0, bench.states, bench.ids), Call("begin", marker(5)), Call("publish", marker(5))]
    assert [outcome.error[:10] for outcome in bench.dumps.do(calls)] == ["ValueError"] * 3, "nothing follows what failed"


def test_a_dump_that_it_published_before_it_could_say_so_is_one(bench: Bench) -> None:
    """It stands still with the call in its hands, does it, and is killed."""
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1
    os.kill(bench.pid, signal.SIGSTOP)
    # In its name: the same writer, as far as it came.
    dead = DumpWriter(bench.folder, EPOCH, SPEC, WIDTH, "model", "test 1")
    dead.go_on(1)
    bench.fill(2)
    dead.write_whole(marker(2), bench.states, bench.ids)
    dead.begin(marker(3))
    os.kill(bench.pid, signal.SIGKILL)
    calls = [bench.whole(2), Call("begin", marker(3)), Call("write", marker(3), 0, bench.states, bench.ids)]
    outcomes = bench.dumps.do([*calls, Call("publish", marker(3))])
    assert outcomes[0] == Outcome(2)
    assert {outcome.errno for outcome in outcomes[1:]} == {errno.EPIPE}
    bench.dumps.do([Call("fail", marker(3), reason="lost", errno=errno.EPIPE)])
    assert bench.dumps.do([bench.whole(4)])[0].sequence == 4, "3 may have been given"
    assert bench.names() == [f"{marker(n)}.{'error' if n == 3 else 'safetensors'}" for n in (1, 2, 3, 4)]
    assert [bench.check(index) for index in (1, 2, 4)] == [1, 2, 4]


@pytest.mark.parametrize("executable", ["/bin/true", "/bin/cat", ""])
def test_one_that_does_not_start_is_an_error_at_once(executable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(OSError, match=r"did not start \(status|with an interpreter"):
        Bench(tmp_path)


def test_it_is_started_by_the_main_thread_alone(tmp_path: Path) -> None:
    """The kernel would end it with the thread."""
    with ThreadPoolExecutor(1) as pool, pytest.raises(OSError, match="only be started by the main thread"):
        pool.submit(Bench, tmp_path).result()


def test_modules_of_the_current_folder_are_not_its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    bench = Bench(tmp_path)
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1
    bench.dumps.close()
    bench.counter.close()


def test_a_fork_of_the_server_holds_up_no_end(bench: Bench) -> None:
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(write)
        os.read(read, 1)  # until the test has gone on
        os._exit(0)
    os.close(read)
    bench.dumps.close()
    assert not is_running(bench.pid)
    os.close(write)
    os.waitpid(child, 0)


def test_memory_that_was_closed_is_given_back() -> None:
    memory = SharedMemory(1 << 16)
    memory.bytes[:] = 1
    part = memory.bytes[10:20]
    name = Path(f"/proc/self/fd/{memory.fd}")
    assert "hsx-staging" in str(name.readlink())
    memory.close()
    assert not name.exists()
    assert part.tolist() == [1] * 10
    with pytest.raises(ValueError, match="expected a part of 0 bytes"):
        memory.at(part)


def test_a_failure_is_noted_even_if_it_is_the_first_thing_asked_of_a_dead_one(bench: Bench) -> None:
    os.kill(bench.pid, signal.SIGKILL)
    (noted,) = bench.dumps.do([Call("fail", marker(1), reason="lost", errno=0)])
    assert noted.error == ""
    assert bench.names() == [f"{marker(1)}.error"]


def test_one_that_stands_still_holds_up_no_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1
    monkeypatch.setattr(writer_process, "END_S", 0.01)
    os.kill(bench.pid, signal.SIGSTOP)
    bench.dumps.close()
    assert is_running(bench.pid)
    os.kill(bench.pid, signal.SIGCONT)
    while is_running(bench.pid):
        time.sleep(0.001)


def test_it_keeps_the_capture_lock_while_it_lives(bench: Bench) -> None:
    """Else a second server could number dumps while this one still publishes."""
    bench.counter.close()
    with pytest.raises(CaptureRefusedError, match="already captures"):
        Counter(bench.folder, EPOCH)
    bench.dumps.close()
    bench.counter = Counter(bench.folder, EPOCH)


def test_ctrl_c_and_a_stop_of_the_group_are_not_for_it(bench: Bench) -> None:
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1  # it has started
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(bench.pid, number)
    assert bench.dumps.do([bench.whole(2)])[0].sequence == 2


def test_it_needs_no_torch(bench: Bench) -> None:
    """It would take a second to start, and a few hundred megabytes."""
    assert bench.dumps.do([bench.whole(1)])[0].sequence == 1
    with open(f"/proc/{bench.pid}/maps", encoding="utf-8") as maps:  # noqa: PTH123 - no Path needed for a name in /proc
        mapped = maps.read()
    assert "libtorch" not in mapped
    assert "memfd:hsx-staging" in mapped


@pytest.mark.parametrize("end", ["os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(0)"])
def test_it_ends_with_the_process_that_it_writes_for(tmp_path: Path, end: str) -> None:
    program = f"""
import os, signal, sys
from pathlib import Path
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.memory import SharedMemory
from hsx.capture.writer_process import DumpsElsewhere
from hsx.core.spec import CaptureSpec
writer = DumpWriter(Path(sys.argv[1]), "{EPOCH}", CaptureSpec((1, 3), "post_norm"), {WIDTH}, "model", "test 1")
dumps = DumpsElsewhere(writer, SharedMemory(4096), os.open(sys.argv[1], os.O_RDONLY))
print(dumps.pid, flush=True)
sys.stdin.read()
{end}
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert pid in descendants(parent.pid)
    parent.communicate()
    while is_running(pid):
        time.sleep(0.001)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:  # noqa: PTH123 - as above
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
