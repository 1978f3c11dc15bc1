"""The dump directory: what arrives, what the capture side says of itself, and a folder that goes away under hsx."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.capture.counter import Counter
from hsx.capture.dumpwriter import DumpWriter
from hsx.core.dump import encode_header
from hsx.core.epoch import (
    LOCK_NAME,
    RECORD_NAME,
    REFUSAL_NAME,
    REPORT_NAME,
    STATE_NAME,
    CaptureReport,
    EpochRecord,
    report_name,
    state_name,
    to_json,
)
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.directory import DumpDirectory
from hsx.errors import EngineError, RunError, SampleError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

EPOCH, OTHER = "11111111-2222-4333-8444-555555555555", "66666666-7777-4888-8999-aaaaaaaaaaaa"
SPEC, WIDTH = CaptureSpec((1,), "post_norm"), 8
MARKER = Marker("0a0b0c0d", 7, 1, 5)
LONG_S = 60.0


def server(dump_dir: Path, epoch: str = EPOCH) -> Path:
    """The folder of an epoch, as a server leaves it once its model is loaded."""
    folder = dump_dir / epoch
    folder.mkdir(parents=True)
    record = EpochRecord(epoch, "b", 1, 1, "", ("x",), "m", "", (1,), "post_norm", "reference", "1", "1", "127.0.0.1", 1)
    report = CaptureReport(epoch, (1,), "post_norm", WIDTH, 4, 100, 1e-6, "", "1", "1", 1, 1, 0, "M", "model", 1.0, "bfloat16")
    (folder / RECORD_NAME).write_text(to_json(record))
    (folder / REPORT_NAME).write_text(to_json(report))
    return folder


def publish(folder: Path, marker: Marker = MARKER, model: str = "model") -> None:
    writer = DumpWriter(folder, folder.name, SPEC, WIDTH, model, "test 1")
    writer.begin(marker)
    states = np.ones((marker.tokens, SPEC.states, WIDTH), np.uint16)
    writer.write(marker, 0, states, np.zeros(marker.tokens, np.int32))
    writer.publish(marker)


@pytest.fixture
def dump_dir(tmp_path: Path) -> Path:
    server(tmp_path / "dumps")
    return tmp_path / "dumps"


@pytest.fixture
def folder(dump_dir: Path) -> Path:
    return dump_dir / EPOCH


@pytest.fixture
def dumps(dump_dir: Path) -> Iterator[DumpDirectory]:
    directory = DumpDirectory(dump_dir, lambda record: record.epoch == EPOCH)
    directory.enter(EPOCH)
    yield directory
    directory.close()


@asynccontextmanager
async def watching(dumps: DumpDirectory) -> AsyncIterator[None]:
    task = asyncio.create_task(dumps.watch())
    try:
        yield
    finally:
        task.cancel()


async def waiting(dumps: DumpDirectory, marker: Marker = MARKER) -> asyncio.Task[None]:
    """A waiter that has looked once, in vain."""
    task = asyncio.create_task(dumps.arrival(marker))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def kind_of(task: asyncio.Task[None]) -> str:
    async with asyncio.timeout(LONG_S):
        with pytest.raises((EngineError, SampleError)) as caught:
            await task
    return caught.value.kind


# --- what the capture side says of itself


def test_state_is_none_until_the_capture_side_counts(dumps: DumpDirectory, folder: Path) -> None:
    assert dumps.states() == {}
    counter = Counter(folder, EPOCH)
    counter.add(sequence=3, published=3, foreign=1)
    counter.save()
    assert dumps.states() == {0: counter.state}
    counter.close()


def test_each_rank_has_a_state_and_a_report_of_its_own(dumps: DumpDirectory, folder: Path) -> None:
    counters = [Counter(folder, EPOCH, rank) for rank in (0, 11)]
    counters[1].add(sequence=5, published=5)
    counters[1].save()
    assert dumps.states() == {0: counters[0].state, 11: counters[1].state}
    report = dumps.report()
    assert report is not None
    assert dumps.report(11) is None
    (folder / report_name(11)).write_text(to_json(replace(report, rank=11)))
    assert dumps.report(11) == replace(report, rank=11)
    for counter in counters:
        counter.close()
    shutil.copy(folder / state_name(11), folder / state_name(2))
    with pytest.raises(EngineError, match=f"counter.2.json is of epoch {EPOCH}, rank 11; expected {EPOCH}, rank 2"):
        dumps.states()


def test_a_broken_state_file_and_one_of_another_epoch_are_errors(dumps: DumpDirectory, dump_dir: Path, folder: Path) -> None:
    (folder / STATE_NAME).write_text("{")
    with pytest.raises(EngineError, match="cannot be read") as caught:
        dumps.states()
    assert caught.value.kind == "epoch_unknown"
    counter = Counter(server(dump_dir, OTHER), OTHER)
    counter.close()
    shutil.copy(dump_dir / OTHER / STATE_NAME, folder / STATE_NAME)
    with pytest.raises(EngineError, match=f"is of epoch {OTHER}, rank 0; expected {EPOCH}") as caught:
        dumps.states()
    assert caught.value.kind == "epoch_unknown"


def test_an_unreadable_record_is_an_error(dumps: DumpDirectory, folder: Path) -> None:
    (folder / STATE_NAME).mkdir()
    with pytest.raises(EngineError, match="Is a directory") as caught:
        dumps.states()
    assert caught.value.kind == "epoch_unknown"


def test_a_refusal_counts_even_beside_a_report(dumps: DumpDirectory, folder: Path) -> None:
    assert dumps.refusal() is None
    report = dumps.report()
    assert report is not None
    assert report.epoch == EPOCH
    (folder / REFUSAL_NAME).write_text("pid 7 already captures into this epoch\n")
    assert dumps.refusal() == "pid 7 already captures into this epoch"
    with pytest.raises(EngineError, match="pid 7 already captures") as caught:
        dumps.report()
    assert caught.value.kind == "capture_off"


def test_peek_reads_the_header_alone(dumps: DumpDirectory, folder: Path) -> None:
    assert dumps.peek(MARKER) is None
    publish(folder)
    header = dumps.peek(MARKER)
    assert header is not None
    assert (header.marker, header.epoch, header.sequence) == (MARKER, EPOCH, 1)


def test_peek_reads_a_header_of_several_pages(dumps: DumpDirectory, folder: Path) -> None:
    publish(folder, model="m" * 9000)
    header = dumps.peek(MARKER)
    assert header is not None
    assert len(encode_header(header)) == 3 * 4096


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 5000, (4088).to_bytes(8, "little") + b" " * 4088])
def test_peek_at_what_is_no_dump_gives_nothing(dumps: DumpDirectory, folder: Path, content: bytes) -> None:
    (folder / f"{MARKER}.safetensors").write_bytes(content)
    assert dumps.peek(MARKER) is None


def test_peek_at_a_torn_dump_gives_nothing(dumps: DumpDirectory, folder: Path) -> None:
    publish(folder)
    os.truncate(folder / f"{MARKER}.safetensors", 4096)
    assert dumps.peek(MARKER) is None


# --- the folder goes away


def test_intact_is_the_folder_that_was_entered(dump_dir: Path, folder: Path) -> None:
    dumps = DumpDirectory(dump_dir, lambda _: True)
    assert not dumps.intact()
    dumps.enter(EPOCH)
    assert dumps.intact()
    publish(folder)
    assert dumps.intact()
    dumps.close()
    assert not dumps.intact()
    dumps.close()


def test_a_folder_deleted_or_replaced_is_not_intact(dumps: DumpDirectory, dump_dir: Path, folder: Path) -> None:
    """A new folder of the same name, with the same record in it, is still not the one that was entered."""
    folder.rename(dump_dir / "moved")
    assert not dumps.intact()
    server(dump_dir)
    assert not dumps.intact()
    shutil.rmtree(dump_dir)
    assert not dumps.intact()
    server(dump_dir)
    assert not dumps.intact()
    dumps.enter(EPOCH)
    assert dumps.intact()


def test_a_folder_without_its_record_is_not_intact(dumps: DumpDirectory, folder: Path) -> None:
    (folder / RECORD_NAME).unlink()
    assert not dumps.intact()


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced", "parent"])
async def test_waiters_hear_that_the_folder_is_gone(dumps: DumpDirectory, dump_dir: Path, folder: Path, how: str) -> None:
    async with watching(dumps):
        task = await waiting(dumps)
        if how == "deleted":
            shutil.rmtree(folder)
        elif how == "parent":
            shutil.rmtree(dump_dir)
        else:
            os.rename(folder, dump_dir / "moved")  # noqa: PTH104 - ruff takes Path.rename for a slow call in a coroutine
        if how == "replaced":
            publish(server(dump_dir))
        assert await kind_of(task) == "staging_gone"


async def test_the_rescan_alone_finds_a_folder_gone(dumps: DumpDirectory, folder: Path) -> None:
    """A record deleted by name raises no event for the folder itself."""
    async with watching(dumps):
        task = await waiting(dumps)
        (folder / RECORD_NAME).unlink()
        assert await kind_of(task) == "staging_gone"


def test_a_dump_that_went_with_its_folder_is_not_the_samples_fault(dumps: DumpDirectory, folder: Path) -> None:
    with pytest.raises(SampleError) as missing:
        dumps.open(MARKER)
    assert missing.value.kind == "dump_invalid"
    shutil.rmtree(folder)
    with pytest.raises(EngineError, match="was deleted or replaced") as gone:
        dumps.open(MARKER)
    assert gone.value.kind == "staging_gone"
    assert dumps.names() == []
    assert dumps.states() == {}
    assert dumps.peek(MARKER) is None
    dumps.remove(MARKER)


async def test_another_epoch_can_be_entered_once_the_folder_is_gone(dumps: DumpDirectory, dump_dir: Path, folder: Path) -> None:
    """With the kernel's last words about the old folder still unread, and again after they were read."""
    shutil.rmtree(folder)
    server(dump_dir, OTHER)
    dumps.enter(OTHER)
    async with watching(dumps):
        task = await waiting(dumps)
        publish(dump_dir / OTHER)
        async with asyncio.timeout(LONG_S):
            await task
        shutil.rmtree(dump_dir / OTHER)
        assert await kind_of(asyncio.create_task(dumps.arrival(MARKER))) == "staging_gone"
        publish(server(dump_dir))
        dumps.enter(EPOCH)
        async with asyncio.timeout(LONG_S):
            await dumps.arrival(MARKER)


def test_a_missing_folder_cannot_be_entered(dumps: DumpDirectory) -> None:
    with pytest.raises(RunError, match="cannot be watched") as caught:
        dumps.enter(OTHER)
    assert caught.value.kind == "staging_failed"
    assert dumps.intact()


def test_entering_takes_no_descriptor_for_good(dumps: DumpDirectory, dump_dir: Path) -> None:
    server(dump_dir, OTHER)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        dumps.enter(OTHER)
        dumps.enter(EPOCH)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# --- arrivals


async def test_arrival_before_during_and_after(dumps: DumpDirectory, folder: Path) -> None:
    publish(folder)
    await dumps.arrival(MARKER)
    second = Marker("0a0b0c0d", 8, 1, 5)
    async with watching(dumps):
        task = await waiting(dumps, second)
        publish(folder, second)
        async with asyncio.timeout(LONG_S):
            await task
    assert dumps.names() == [str(MARKER), str(second)]


@pytest.mark.parametrize(("errno", "kind"), [(0, "dump_failed"), (28, "staging_full")])
async def test_error_files_end_the_wait(dumps: DumpDirectory, folder: Path, errno: int, kind: str) -> None:
    writer = DumpWriter(folder, EPOCH, SPEC, WIDTH, "model", "test 1")
    async with watching(dumps):
        task = await waiting(dumps)
        writer.fail(MARKER, "why", errno)
        assert await kind_of(task) == kind


async def test_an_empty_note_means_that_not_even_the_reason_had_room(dumps: DumpDirectory, folder: Path) -> None:
    (folder / f"{MARKER}.error").write_bytes(b"")
    with pytest.raises(EngineError, match="nor could the reason") as caught:
        await dumps.arrival(MARKER)
    assert caught.value.kind == "staging_full"


# --- sweeping


def test_folders_of_dead_servers_vanish_with_their_records(dumps: DumpDirectory, dump_dir: Path) -> None:
    dead = server(dump_dir, OTHER)
    Counter(dead, OTHER).close()
    Counter(dead, OTHER, 3).close()
    assert {path.name for path in dead.iterdir()} >= {LOCK_NAME, STATE_NAME}
    (dead / f"{STATE_NAME}.part").write_text("killed before the rename")
    publish(dead, Marker("ffffffff", 1, 1, 3))
    assert dumps.sweep_other_epochs(EPOCH, "0a0b0c0d") == 1
    assert not dead.exists()


def test_what_no_server_wrote_keeps_its_folder(dumps: DumpDirectory, dump_dir: Path) -> None:
    dead = server(dump_dir, OTHER)
    (dead / "notes.txt").write_text("mine")
    publish(dead)
    assert dumps.sweep_other_epochs(EPOCH, "0a0b0c0d") == 1
    assert (dead / "notes.txt").exists()


def test_a_living_server_loses_this_runs_dumps_only(dump_dir: Path, folder: Path) -> None:
    dumps = DumpDirectory(dump_dir, lambda _: True)
    counter = Counter(folder, EPOCH)
    other = Marker("ffffffff", 1, 1, 3)
    publish(folder)
    publish(folder, other)
    assert dumps.sweep_other_epochs(OTHER, MARKER.run) == 1
    assert (folder / f"{other}.safetensors").exists()
    assert (folder / STATE_NAME).exists()
    counter.close()
    dumps.close()
