"""The pool and the writer thread: order, room, failures and ends, with a writer that does what a test tells it."""

from __future__ import annotations

import errno
import gc
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from hsx.capture.calls import DumpsHere
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.model import CaptureRefusedError
from hsx.capture.pool import Pool
from hsx.capture.session import Session
from hsx.capture.staging import SAVE_EVERY_S, Staging
from hsx.core.epoch import LOCK_NAME, STATE_NAME, CaptureState, state_from_json
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.reader import MappedDump
from hsx.testing.mounts import filled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

SPEC = CaptureSpec((1, 3), "post_norm")
WIDTH = 64
ROW = SPEC.states * WIDTH * 2
FOREVER_S = 300.0
LONG, SHORT = Marker("0a0b0c0d", 0, 1, 40), Marker("0a0b0c0d", 1, 1, 3)
SLABS = 4
SLAB_BYTES = 4096
"""Ten tokens each."""


class Slow(DumpWriter):
    """A writer that waits, before each write, until it is let through."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "epoch", SPEC, WIDTH, "model", "test 1")
        self.gate = threading.Semaphore(0)
        self.waiting = threading.Event()
        self.error: OSError | None = None

    def let_through(self, writes: int = 1 << 20) -> None:
        self.gate.release(writes)

    def write(self, marker: Marker, offset: int, states: NDArray[np.uint16], input_ids: NDArray[np.int32]) -> None:
        self.wait()
        super().write(marker, offset, states, input_ids)

    def write_whole(self, marker: Marker, states: NDArray[np.uint16], input_ids: NDArray[np.int32]) -> int:
        self.wait()
        return super().write_whole(marker, states, input_ids)

    def wait(self) -> None:
        self.waiting.set()
        assert self.gate.acquire(timeout=FOREVER_S)
        if self.error is not None:
            raise self.error


class Bench:
    """A session on a pool of `SLABS` slabs, and its writer."""

    def __init__(self, folder: Path, when_full: str = "block", patience_s: float = FOREVER_S) -> None:
        self.folder = folder
        self.counter = Counter(folder, "epoch")
        self.writer = Slow(folder)
        self.pool = Pool(SLABS * SLAB_BYTES, SPEC.states, WIDTH, torch.bfloat16)
        self.staging = Staging(DumpsHere(self.writer), self.counter, self.pool)
        self.session = Session(self.staging, len(SPEC.layers), "fail" if when_full == "fail" else "block", patience_s)

    def run(self, *chunks: tuple[Marker, int, int], seed: int = 0) -> None:
        """One forward: of each marker, so many tokens from an offset on."""
        ids = torch.cat([ids_of(marker, seed)[offset : offset + count] for marker, offset, count in chunks])
        rids, offsets, counts = [str(m) for m, _, _ in chunks], [o for _, o, _ in chunks], [n for _, _, n in chunks]
        batch = self.session.begin(rids, offsets, counts, ids)
        if batch is not None:
            residual = states_of(ids)
            self.session.tensors(batch, residual[:-1], residual[-1])
            for part in residual:
                part += 1000  # the model uses its memory again
            self.session.finish(batch)
        self.session.save(1000)

    def settle(self) -> CaptureState:
        assert self.staging.flush(FOREVER_S)
        return self.state

    @property
    def state(self) -> CaptureState:
        return state_from_json((self.folder / STATE_NAME).read_text())

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name not in (LOCK_NAME, STATE_NAME))

    def note(self, marker: Marker) -> tuple[str, int]:
        note = json.loads((self.folder / f"{marker}.error").read_text())
        return str(note["reason"]), int(note["errno"])

    def check(self, marker: Marker, seed: int = 0) -> int:
        """The dump of `marker` is right; returns its number."""
        dump = MappedDump(self.folder / f"{marker}.safetensors")
        ids = ids_of(marker, seed)
        assert dump.input_ids.tolist() == ids.tolist()
        found = torch.from_numpy(dump.states.copy()).view(torch.bfloat16)
        assert torch.equal(found, torch.stack(states_of(ids), 1).to(torch.bfloat16))
        number = dump.header.sequence
        dump.close()
        return number


def ids_of(marker: Marker, seed: int = 0) -> torch.Tensor:
    return torch.arange(marker.tokens) + 50 * marker.index + 7 * seed


def states_of(ids: torch.Tensor) -> list[torch.Tensor]:
    """Three states that tell token and layer apart."""
    return [ids.float()[:, None].repeat(1, WIDTH) * (place + 1) for place in range(SPEC.states)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def one(folder: Path = tmp_path, when_full: str = "block", patience_s: float = FOREVER_S) -> Bench:
        benches.append(Bench(folder, when_full, patience_s))
        return benches[-1]

    yield one
    for bench in benches:
        bench.writer.let_through()
        bench.staging.close()
        bench.counter.close()


def test_a_forward_returns_before_anything_is_written(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.run((SHORT, 0, 3))
    bench.writer.waiting.wait(FOREVER_S)
    assert bench.names() == []
    assert bench.state.published == 0
    assert bench.pool.staged_bytes == SLAB_BYTES
    bench.writer.let_through()
    state = bench.settle()
    assert bench.check(SHORT) == 1
    assert (state.sequence, state.published, state.forwards, state.forward_us) == (1, 1, 1, 1)
    assert (state.staged_bytes, state.staged_peak_bytes, state.blocked_us) == (0, SLAB_BYTES, 0)


def test_dumps_are_published_in_the_order_of_capture(make: Callable[..., Bench]) -> None:
    bench = make()
    markers = [Marker("0a0b0c0d", index, 1, 2) for index in range(SLABS)]
    for marker in markers:
        bench.run((marker, 0, 2))
    assert bench.names() == []
    bench.writer.let_through()
    bench.settle()
    assert [bench.check(marker) for marker in markers] == [1, 2, 3, 4]


def test_a_prompt_in_one_piece_follows_the_first_chunk_of_an_earlier_go(make: Callable[..., Bench]) -> None:
    """The partial file of the first go, which had other tokens, is written over from its beginning."""
    bench = make()
    bench.writer.let_through()
    marker = Marker("0a0b0c0d", 3, 1, 9)
    bench.run((marker, 0, 4), seed=1)
    bench.settle()
    assert bench.names() == [f"{marker}.part"]
    bench.run((marker, 0, 9))
    state = bench.settle()
    assert bench.check(marker) == 1
    assert bench.names() == [f"{marker}.safetensors"]
    assert (state.published, state.failed, state.incomplete, state.staged_bytes) == (1, 0, 0, 0)
    bench.run((marker, 0, 9), seed=1)  # its request runs again: what has its name is left as it is
    bench.settle()
    assert bench.check(marker) == 1


def test_a_prompt_in_one_piece_is_no_dump_before_its_forward_is_over(make: Callable[..., Bench]) -> None:
    """The writer is woken within a forward where slabs get scarce: what is whole by then may yet be void."""
    bench = make()
    bench.writer.let_through()
    ids = torch.cat([ids_of(SHORT), ids_of(LONG)])
    batch = bench.session.begin([str(SHORT), str(LONG)], [0, 0], [SHORT.tokens, LONG.tokens - 15], ids)
    assert batch is not None
    residual = states_of(ids)
    bench.session.tensors(batch, residual[:-1], residual[-1])
    bench.settle()  # everything that was handed over is written
    assert bench.names() == sorted([f"{LONG}.part", f"{SHORT}.part"])
    # The forward raises: nobody says that it is over.
    bench.run((LONG, LONG.tokens - 15, 15))
    state = bench.settle()
    assert bench.names() == sorted([f"{LONG}.error", f"{SHORT}.error"])
    assert (state.published, state.failed, state.staged_bytes) == (0, 2, 0)


def test_a_chunk_larger_than_the_pool_goes_through_in_slices(make: Callable[..., Bench]) -> None:
    bench = make()
    huge = Marker("0a0b0c0d", 2, 1, 10 * bench.pool.capacity)
    bench.writer.let_through()
    bench.run((SHORT, 0, 3), (huge, 0, huge.tokens))
    state = bench.settle()
    assert {bench.check(SHORT), bench.check(huge)} == {1, 2}
    assert 0 < state.staged_peak_bytes <= SLABS * SLAB_BYTES  # all of it, unless the writer is the faster one
    assert state.staged_bytes == 0


def test_a_full_pool_holds_the_forward_up_until_there_is_room(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.run((LONG, 0, LONG.tokens))
    running = threading.Thread(target=bench.run, args=((SHORT, 0, 3),))
    running.start()
    bench.writer.waiting.wait(FOREVER_S)
    time.sleep(0.01)  # it may be waiting by now; it cannot have gone on
    assert running.is_alive()
    bench.writer.let_through()
    running.join(FOREVER_S)
    state = bench.settle()
    assert [bench.check(LONG), bench.check(SHORT)] == [1, 2]
    assert state.staged_peak_bytes == SLABS * SLAB_BYTES


def test_a_disk_that_hangs_fails_dumps_and_holds_nobody_up_twice(make: Callable[..., Bench]) -> None:
    bench = make(patience_s=0.05)
    bench.run((LONG, 0, LONG.tokens))
    others = [Marker("0a0b0c0d", index, 1, 3) for index in range(2, 6)]
    bench.run((others[0], 0, 3))
    blocked = bench.pool.blocked_ns
    assert blocked >= 0.05e9
    for other in others[1:]:
        bench.run((other, 0, 3))
    assert bench.pool.blocked_ns == blocked
    bench.writer.let_through()
    state = bench.settle()
    assert (state.published, state.failed, state.staged_bytes) == (1, 4, 0)
    reason, code = bench.note(others[0])
    assert reason == f"no room in the pool of {SLABS * SLAB_BYTES} bytes (capture.staging_bytes) within 0 s"
    assert code == errno.ENOBUFS
    bench.run((SHORT, 0, 3))
    bench.settle()
    assert bench.check(SHORT) == 2


def test_when_full_may_fail_the_dump(make: Callable[..., Bench]) -> None:
    bench = make(when_full="fail")
    bench.run((LONG, 0, LONG.tokens))
    bench.run((SHORT, 0, 3))
    assert bench.pool.blocked_ns < FOREVER_S * 1e9
    bench.writer.let_through()
    state = bench.settle()
    assert (state.published, state.failed, state.staged_bytes) == (1, 1, 0)
    assert bench.note(SHORT) == (
        f"no room in the pool of {SLABS * SLAB_BYTES} bytes (capture.staging_bytes) at once",
        errno.ENOBUFS,
    )
    assert bench.names() == sorted([f"{LONG}.safetensors", f"{SHORT}.error"])


def test_a_chunk_larger_than_the_pool_is_nobody_elses_fault(make: Callable[..., Bench]) -> None:
    """Whatever is tried again, it finds no room: no error of the operating system, which would be tried for ever."""
    bench = make(when_full="fail")
    huge = Marker("0a0b0c0d", 2, 1, bench.pool.capacity + 1)
    bench.run((huge, 0, huge.tokens))
    bench.writer.let_through()
    bench.settle()
    reason, code = bench.note(huge)
    assert "when_full is 'fail'" in reason
    assert code == 0


def test_aborted_requests_free_their_staging_at_once(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.run((SHORT, 0, 3))
    assert bench.writer.waiting.wait(FOREVER_S)
    bench.run((LONG, 0, 20))
    assert bench.pool.staged_bytes == 3 * SLAB_BYTES
    for turn in range(17):
        bench.session.begin([f"other-{turn}"], [0], [1], torch.zeros(1))
        bench.session.save()
    assert bench.pool.staged_bytes == SLAB_BYTES  # the writer still sits on the first dump
    bench.writer.let_through()
    state = bench.settle()
    assert (state.published, state.incomplete, state.failed, state.staged_bytes) == (1, 1, 0, 0)
    assert bench.names() == [f"{SHORT}.safetensors"]


def test_a_request_that_begins_again_while_it_is_queued(make: Callable[..., Bench]) -> None:
    """One of its pieces is being written, one waits; the second go has other tokens and is what is published."""
    bench = make()
    bench.run((LONG, 0, 20), seed=1)
    assert bench.writer.waiting.wait(FOREVER_S)
    assert bench.pool.staged_bytes == 2 * SLAB_BYTES
    bench.run((LONG, 0, 5))
    assert bench.pool.staged_bytes == 2 * SLAB_BYTES
    bench.writer.let_through()
    bench.run((LONG, 5, LONG.tokens - 5))
    state = bench.settle()
    assert bench.check(LONG) == 1
    assert (state.published, state.incomplete, state.staged_bytes) == (1, 0, 0)


def test_a_write_that_fails_costs_its_marker_alone(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.run((LONG, 0, 30), (SHORT, 0, 3))
    bench.writer.error = OSError(errno.EIO, "Input/output error")
    bench.writer.let_through(1)
    while bench.counter.state.failed == 0:
        time.sleep(0.001)
    bench.writer.error = None
    bench.writer.let_through()
    bench.settle()
    bench.run((LONG, 30, 10))  # its request goes on in the server
    bench.run((LONG, 0, LONG.tokens))  # and may even begin again
    state = bench.settle()
    assert bench.check(SHORT) == 1
    assert bench.note(LONG) == ("OSError: [Errno 5] Input/output error", errno.EIO)
    assert (state.published, state.failed, state.incomplete, state.staged_bytes) == (1, 1, 0, 0)
    assert bench.names() == sorted([f"{LONG}.error", f"{SHORT}.safetensors"])


def test_a_go_that_begins_before_the_failure_is_known_is_void_too(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.run((LONG, 0, 10))
    assert bench.writer.waiting.wait(FOREVER_S)
    bench.run((LONG, 0, 10))
    bench.run((LONG, 10, 10))
    bench.writer.error = OSError(errno.EIO, "Input/output error")
    bench.writer.let_through(1)
    bench.settle()
    bench.writer.error = None
    bench.writer.let_through()
    bench.run((LONG, 20, 20))
    state = bench.settle()
    assert (state.published, state.failed, state.staged_bytes) == (0, 1, 0)
    assert bench.names() == [f"{LONG}.error"]


def test_a_full_disk_fails_dumps_and_holds_no_staging(full_disk: Path, make: Callable[..., Bench]) -> None:
    (full_disk / "filler").unlink()
    bench = make(full_disk)
    bench.writer.let_through()
    size = 1 << 19
    fits, not_two = (Marker("0a0b0c0d", index, 1, size // ROW) for index in (5, 6))
    for marker in (fits, not_two):
        bench.run((marker, 0, marker.tokens))
    state = bench.settle()
    assert (state.published, state.failed, state.staged_bytes) == (1, 1, 0)
    assert bench.note(not_two) == ("OSError: [Errno 28] No space left on device", errno.ENOSPC)
    (full_disk / f"{fits}.safetensors").unlink()
    again = Marker("0a0b0c0d", 6, 2, size // ROW)
    bench.run((again, 0, again.tokens))
    bench.settle()
    assert bench.check(again) == 2


def test_a_disk_that_is_full_to_the_last_block(small_disk: Path, make: Callable[..., Bench]) -> None:
    """Not even the state file can be written; it tells of everything once it can."""
    bench = make(small_disk)
    bench.writer.let_through()
    filled(small_disk)
    bench.run((LONG, 0, LONG.tokens))
    assert bench.staging.flush(FOREVER_S)
    assert bench.pool.staged_bytes == 0
    assert (bench.state.failed, bench.counter.state.failed) == (0, 1)
    (small_disk / "filler").unlink()
    bench.run((SHORT, 0, 3))
    state = bench.settle()
    assert (state.published, state.failed) == (1, 1)
    assert bench.check(SHORT) == 1


def test_the_state_is_saved_in_time_and_not_with_each_forward(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.writer.let_through()
    save, saves, forwards, began = bench.counter.save, 0, 40, time.monotonic()

    def counted() -> bool:
        nonlocal saves
        saves += 1
        return save()

    bench.counter.save = counted  # type: ignore[method-assign] # counts the calls of the real one
    for index in range(forwards):
        bench.run((Marker("0a0b0c0d", index, 1, 3), 0, 3))
        time.sleep(0.01)
    while bench.state.published < forwards:  # nobody asks for it
        time.sleep(0.01)
    assert 0 < saves <= 2 + (time.monotonic() - began) / SAVE_EVERY_S
    assert bench.state.staged_bytes == 0
    assert bench.state == bench.counter.state


def test_the_state_is_saved_while_a_long_forward_is_written(make: Callable[..., Bench]) -> None:
    """Its end is far away: whoever looks meanwhile sees what has been published."""
    bench = make()
    bench.run((SHORT, 0, 3))
    bench.writer.let_through(1)
    while bench.counter.state.published == 0:
        time.sleep(0.001)
    bench.run((LONG, 0, LONG.tokens))
    for _ in range(SLABS):
        time.sleep(SAVE_EVERY_S)
        bench.writer.let_through(1)
    while bench.state.published == 0:
        time.sleep(0.001)
    bench.writer.let_through()
    assert bench.settle().published == 2


def test_a_state_that_cannot_be_written_is_written_later(make: Callable[..., Bench]) -> None:
    bench = make()
    bench.settle()
    obstacle = bench.folder / f"{STATE_NAME}.part"
    obstacle.mkdir()
    bench.writer.let_through()
    bench.run((SHORT, 0, 3))
    assert bench.staging.flush(FOREVER_S)  # nobody waits for a disk that takes nothing
    assert (bench.state.published, bench.counter.state.published) == (0, 1)
    obstacle.rmdir()
    while bench.state.published == 0:  # and nothing else has to happen
        time.sleep(0.001)
    obstacle.mkdir()
    bench.run((LONG, 0, LONG.tokens))
    bench.staging.close()  # tries once, and ends
    assert (bench.state.published, bench.counter.state.published) == (1, 2)


def test_the_state_is_never_ahead_of_the_dumps(make: Callable[..., Bench]) -> None:
    bench = make()
    publish, write_whole, seen = bench.writer.publish, bench.writer.write_whole, []

    def looked_at(name: Callable[[], int]) -> int:
        before = bench.state.sequence
        number = name()
        seen.append((before, number, bench.state.sequence))
        return number

    # Looks at the moment of the rename, on the real one.
    bench.writer.publish = lambda marker: looked_at(lambda: publish(marker))  # type: ignore[method-assign]
    bench.writer.write_whole = lambda *given: looked_at(lambda: write_whole(*given))  # type: ignore[method-assign]
    bench.writer.let_through()
    for index in range(10):
        bench.run((Marker("0a0b0c0d", 2 * index, 1, 3), 0, 3))
        for offset in range(3):
            bench.run((Marker("0a0b0c0d", 2 * index + 1, 1, 3), offset, 1))
    assert bench.settle().sequence == 20
    assert [number for _, number, _ in seen] == list(range(1, 21))
    assert all(before < number and after < number for before, number, after in seen)


def test_a_pool_without_room_for_a_token_is_refused() -> None:
    with pytest.raises(CaptureRefusedError, match=r"capture\.staging_bytes is 100; expected at least 512"):
        Pool(100, SPEC.states, WIDTH, torch.bfloat16)
    assert Pool(512, SPEC.states, WIDTH, torch.bfloat16).capacity == 1


@pytest.mark.parametrize("nbytes", [4096, 10_000, 1 << 20, (1 << 30) - 1])
def test_a_pool_takes_no_more_than_it_may(nbytes: int) -> None:
    pool = Pool(nbytes, 4, 128, torch.bfloat16)
    assert pool.slab_bytes & (pool.slab_bytes - 1) == 0
    assert nbytes / 2 < pool.limit_bytes <= nbytes
    slab = pool.take(0)
    assert slab is not None
    slab.ids[:] = torch.arange(pool.rows)
    slab.states[:] = 1.0
    assert np.array_equal(slab.ids_array, np.arange(pool.rows))
    assert (slab.bits == 0x3F80).all()


@pytest.mark.parametrize("error", [0, 2])
def test_a_pinned_pool_is_registered(error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a device: what CUDA would be asked, and what is done where it refuses."""
    asked: list[tuple[int, int, int]] = []
    launched: list[str] = []

    class Runtime:
        def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            asked.append((pointer, nbytes, flags))
            return error

    def launch(*_size: int, device: str) -> None:
        """The runtime keeps an error for whoever asks next."""
        launched.append(device)
        raise RuntimeError("CUDA error: operation not supported")

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", launch)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _self: True)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, pin_memory: empty(*size, dtype=dtype))
    before = len(shared_memories())
    pool = Pool(SLABS * SLAB_BYTES, SPEC.states, WIDTH, torch.bfloat16, pinned=True)
    slabs = [pool.take(0) for _ in range(SLABS)]
    begins = sorted(slab.states.data_ptr() for slab in slabs if slab is not None)
    ((pointer, nbytes, flags),) = asked
    assert (nbytes, flags) == (SLABS * SLAB_BYTES, 0)
    if error:
        assert pool.memory is None
        assert f"capture.memory_unshared bytes={nbytes} reason=cudaHostRegister: error 2" in caplog.text
        assert pointer not in begins
        assert launched == ["cuda"]
        assert len(shared_memories()) == before
    else:
        assert len(shared_memories()) > before
        assert begins == [pointer + number * SLAB_BYTES for number in range(SLABS)]
    assert len(set(begins)) == SLABS
    assert pool.take(0) is None


def test_a_driver_that_knows_no_registration(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """torch raises then, and the pool is pinned as it was before there was a writer process."""

    def unknown() -> None:
        raise RuntimeError("no such call")

    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", unknown)
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: blocking)
    monkeypatch.setattr(torch, "empty", lambda *size, dtype, pin_memory: empty(*size, dtype=dtype))
    pool = Pool(SLABS * SLAB_BYTES, SPEC.states, WIDTH, torch.bfloat16, pinned=True)
    assert pool.memory is None
    assert pool.take(0) is not None
    assert "reason=no such call" in caplog.text


def shared_memories() -> list[Path]:
    gc.collect()  # those of other tests
    return [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and "hsx-staging" in str(link.readlink())]


def test_closing_writes_what_is_queued_and_says_so(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.run((SHORT, 0, 3), (LONG, 0, 10))
    bench.writer.let_through()
    with caplog.at_level("INFO"):
        bench.session.close()
        bench.session.close()
    assert bench.check(SHORT) == 1
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("capture.closed")]
    assert line == (
        f"capture.closed forwards=1 chunks=2 us_per_chunk=0.5 us_per_forward=1.0 bytes={13 * ROW} peak_bytes={2 * SLAB_BYTES} "
        f"of={SLABS * SLAB_BYTES} blocked_us=0 published=1 failed=0 incomplete=0 left=0"
    )


def test_closing_waits_no_longer_than_it_may(make: Callable[..., Bench], caplog: pytest.LogCaptureFixture) -> None:
    bench = make()
    bench.run((LONG, 0, 30))
    assert bench.writer.waiting.wait(FOREVER_S)
    with caplog.at_level("INFO"):
        bench.staging.close(timeout_s=0.01)
    assert "left=3" in caplog.text
    bench.run((SHORT, 0, 3))  # a forward after the end finds nobody, and does no harm
    assert not bench.staging.flush(0.01)


def test_a_process_that_ends_writes_what_is_queued(tmp_path: Path) -> None:
    program = f"""
import atexit, sys, torch
from pathlib import Path
from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.pool import Pool
from hsx.capture.session import Session
from hsx.capture.staging import Staging
from hsx.capture.writer_process import DumpsElsewhere
from hsx.core.spec import CaptureSpec
folder = Path(sys.argv[1])
writer = DumpWriter(folder, "epoch", CaptureSpec((1, 3), "post_norm"), {WIDTH}, "model", "test 1")
counter, pool = Counter(folder, "epoch"), Pool(1 << 24, 3, {WIDTH}, torch.bfloat16)
staging = Staging(DumpsElsewhere(writer, pool.memory, counter.lock_fd), counter, pool)
session = Session(staging, 2)
atexit.register(staging.close, {FOREVER_S})  # as the session's own close, with more patience
for index in range(200):
    batch = session.begin([f"hsx1-0a0b0c0d-{{index}}-1-100"], [0], [100], torch.zeros(100))
    session.tensors(batch, [torch.ones(100, {WIDTH})] * 2, torch.ones(100, {WIDTH}))
    session.finish(batch)
    session.save()
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert state_from_json((tmp_path / STATE_NAME).read_text()).published == 200
    assert len(list(tmp_path.glob("*.safetensors"))) == 200
