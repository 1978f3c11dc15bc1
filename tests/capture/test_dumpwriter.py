"""The dump writer against the dump format: what it publishes, `decode_header` and safetensors read back."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.states import bf16_bits
from hsx.core.dump import decode_header
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

SPEC = CaptureSpec((2, 5), "post_norm")
WIDTH = 16
OWN_DESCRIPTORS = Path("/proc/self/fd")
EPOCH = "11111111-2222-4333-8444-555555555555"


def tensor_of(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, SPEC.states, WIDTH, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)


def states_of(tokens: int) -> NDArray[np.uint16]:
    return bf16_bits(tensor_of(tokens))


@pytest.fixture
def writer(tmp_path: Path) -> DumpWriter:
    return DumpWriter(tmp_path, EPOCH, SPEC, WIDTH, "model", "test 1")


def test_published_dump_reads_back(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    states, ids = states_of(10), np.arange(10, dtype=np.int32)
    writer.begin(marker)
    writer.write(marker, 4, states[4:], ids[4:])
    writer.write(marker, 0, states[:4], ids[:4])
    assert writer.publish(marker) == 1
    path = tmp_path / f"{marker}.safetensors"
    data = path.read_bytes()
    header, start = decode_header(data, len(data))
    assert (header.marker, header.epoch, header.sequence, header.spec) == (marker, EPOCH, 1, SPEC)
    assert start % 4096 == 0
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), tensor_of(10))
        assert file.get_tensor("input_ids").tolist() == ids.tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name]


def test_a_whole_dump_is_byte_for_byte_what_pieces_make(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    states, ids = states_of(10), np.arange(10, dtype=np.int32)
    writer.begin(marker)
    writer.write(marker, 0, states, ids)
    assert writer.publish(marker) == 1
    path = tmp_path / f"{marker}.safetensors"
    pieces = path.read_bytes()
    again = DumpWriter(tmp_path, EPOCH, SPEC, WIDTH, "model", "test 1")
    assert again.write_whole(marker, states, ids) == 1
    assert path.read_bytes() == pieces
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert again.write_whole(Marker("0a0b0c0d", 8, 1, 10), states, ids) == again.sequence == 2


def test_a_whole_dump_writes_over_what_had_begun(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    writer.begin(marker)
    writer.write(marker, 0, states_of(10), np.full(10, 9, np.int32))
    descriptors = len(list(OWN_DESCRIPTORS.iterdir()))
    writer.write_whole(marker, states_of(10), np.arange(10, dtype=np.int32))
    assert len(list(OWN_DESCRIPTORS.iterdir())) == descriptors - 1
    with safe_open(tmp_path / f"{marker}.safetensors", "pt") as file:
        assert file.get_tensor("input_ids").tolist() == list(range(10))
    assert [p.name for p in tmp_path.iterdir()] == [f"{marker}.safetensors"]


@pytest.mark.parametrize("limit", [0, 100, 4096, 5000, 8192])
def test_a_whole_dump_without_room_leaves_nothing(writer: DumpWriter, tmp_path: Path, limit: int) -> None:
    """A file size limit stands in for the full disk: a part of the call is written, the rest is refused."""
    marker = Marker("0a0b0c0d", 7, 1, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write_whole(marker, states_of(1000), np.zeros(1000, np.int32))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []
    assert writer.write_whole(marker, states_of(1000), np.zeros(1000, np.int32)) == 1


def test_a_call_that_writes_a_part_is_continued(writer: DumpWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does so with more than 2 GiB, or on a signal, neither of which a test can have: the real call, given less."""
    marker = Marker("0a0b0c0d", 7, 1, 100)
    real = os.pwritev
    asked: list[int] = []

    def some(fd: int, buffers: list[memoryview], offset: int) -> int:
        first = next(buffer for buffer in buffers if len(buffer))
        asked.append(offset)
        return real(fd, [first[:1000]], offset)

    monkeypatch.setattr(os, "pwritev", some)
    ids = np.arange(100, dtype=np.int32)
    writer.write_whole(marker, states_of(100), ids)
    monkeypatch.undo()
    assert len(asked) > 3
    with safe_open(tmp_path / f"{marker}.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("hidden_states"), tensor_of(100))
        assert file.get_tensor("input_ids").tolist() == ids.tolist()


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_close_refuses_is_no_dump(
    writer: DumpWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Some network file systems say only then that there was no room; there is none here, so that close is made to."""
    marker, ids = Marker("0a0b0c0d", 7, 1, 10), np.zeros(10, np.int32)
    real = os.close

    def refused(fd: int) -> None:
        real(fd)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    if not whole:
        writer.begin(marker)
        writer.write(marker, 0, states_of(10), ids)
    monkeypatch.setattr(os, "close", refused)
    with pytest.raises(OSError, match="quota"):
        _ = writer.write_whole(marker, states_of(10), ids) if whole else writer.publish(marker)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert writer.write_whole(marker, states_of(10), ids) == 1


def test_a_whole_dump_that_cannot_be_opened_leaves_nothing_of_what_had_begun(
    writer: DumpWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is free: a limit would hit the test runner's own files, so that the one call is refused."""
    marker, ids = Marker("0a0b0c0d", 7, 1, 10), np.zeros(10, np.int32)
    writer.begin(marker)

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(OSError, match="Too many open files"):
        writer.write_whole(marker, states_of(10), ids)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_prompt_is_no_whole_dump(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    with pytest.raises(ValueError, match="9 tokens; expected all 10"):
        writer.write_whole(marker, states_of(9), np.zeros(9, np.int32))
    assert list(tmp_path.iterdir()) == []


def test_sequence_rises_at_publication(writer: DumpWriter, tmp_path: Path) -> None:
    first, second = Marker("0a0b0c0d", 1, 1, 3), Marker("0a0b0c0d", 2, 1, 3)
    for marker in (first, second):
        writer.begin(marker)
        writer.write(marker, 0, states_of(3), np.zeros(3, np.int32))
    assert [writer.publish(second), writer.publish(first)] == [1, 2]
    data = (tmp_path / f"{first}.safetensors").read_bytes()
    assert decode_header(data, len(data))[0].sequence == 2
    assert writer.sequence == 2


def test_failed_publication_uses_no_number(writer: DumpWriter, tmp_path: Path) -> None:
    lost, kept = Marker("0a0b0c0d", 1, 1, 3), Marker("0a0b0c0d", 2, 1, 3)
    writer.begin(lost)
    (tmp_path / f"{lost}.part").unlink()
    with pytest.raises(FileNotFoundError):
        writer.publish(lost)
    writer.drop(lost)
    writer.begin(kept)
    assert writer.publish(kept) == 1


def test_header_keeps_its_room_at_a_page_border(tmp_path: Path) -> None:
    """The data is placed before the sequence is known; its digits must never move the data."""
    marker = Marker("0a0b0c0d", 1, 1, 2)
    for length in range(3440, 3660, 3):
        writer = DumpWriter(tmp_path, EPOCH, SPEC, WIDTH, "m" * length, "test 1")
        writer.begin(marker)
        writer.write(marker, 0, states_of(2), np.array([5, 6], np.int32))
        writer.publish(marker)
        data = (tmp_path / f"{marker}.safetensors").read_bytes()
        header, start = decode_header(data, len(data))
        assert data[start : start + header.states_bytes] == states_of(2).tobytes()


def test_fail_leaves_a_reason_and_no_part(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    writer.begin(marker)
    writer.fail(marker, "no room", errno.ENOSPC)
    assert [p.name for p in tmp_path.iterdir()] == [f"{marker}.error"]
    note = json.loads((tmp_path / f"{marker}.error").read_text())
    assert note == {"marker": str(marker), "epoch": EPOCH, "reason": "no room", "errno": errno.ENOSPC}


def test_drop_leaves_nothing(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    writer.begin(marker)
    writer.drop(marker)
    writer.drop(marker)
    assert list(tmp_path.iterdir()) == []


def test_part_is_reserved_at_begin(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 1000)
    writer.begin(marker)
    status = (tmp_path / f"{marker}.part").stat()
    assert status.st_size == 4096 + 1000 * (SPEC.states * WIDTH * 2 + 4)
    assert status.st_blocks * 512 >= status.st_size
    writer.drop(marker)


def test_no_room_is_an_error_at_begin(writer: DumpWriter, tmp_path: Path) -> None:
    """A file size limit stands in for the full disk: both fail in posix_fallocate."""
    marker = Marker("0a0b0c0d", 7, 1, 1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.begin(marker)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert list(tmp_path.iterdir()) == []


def test_what_has_not_begun_is_refused(writer: DumpWriter, tmp_path: Path) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    for act in (lambda: writer.write(marker, 0, states_of(10), np.zeros(10, np.int32)), lambda: writer.publish(marker)):
        with pytest.raises(ValueError, match="has not begun"):
            act()
    (tmp_path / f"{marker}.part").write_bytes(b"of a process that is gone")
    writer.fail(marker, "gone")
    assert [path.name for path in tmp_path.iterdir()] == [f"{marker}.error"]
    assert writer.sequence == 0


@pytest.mark.parametrize(
    ("offset", "states", "ids"),
    [
        (0, np.zeros((3, SPEC.states, WIDTH), np.float32), np.zeros(3, np.int32)),
        (0, np.zeros((3, SPEC.states, WIDTH), np.int16), np.zeros(3, np.int32)),
        (0, np.zeros((3, SPEC.states, WIDTH + 1), np.uint16), np.zeros(3, np.int32)),
        (0, np.zeros((3, SPEC.states, WIDTH), np.uint16), np.zeros(3, np.int64)),
        (0, np.zeros((3, SPEC.states, WIDTH), np.uint16), np.zeros(2, np.int32)),
        (8, np.zeros((3, SPEC.states, WIDTH), np.uint16), np.zeros(3, np.int32)),
        (-1, np.zeros((3, SPEC.states, WIDTH), np.uint16), np.zeros(3, np.int32)),
    ],
)
def test_wrong_pieces_are_refused(writer: DumpWriter, offset: int, states: np.ndarray, ids: np.ndarray) -> None:
    marker = Marker("0a0b0c0d", 7, 1, 10)
    writer.begin(marker)
    with pytest.raises(ValueError, match="expected"):
        writer.write(marker, offset, states, ids)
    writer.drop(marker)


def test_a_full_file_system_gets_an_empty_note(small_disk: Path) -> None:
    writer = DumpWriter(small_disk, EPOCH, SPEC, WIDTH, "model", "test 1")
    marker = Marker("0a0b0c0d", 1, 1, 3)
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize))
    with pytest.raises(OSError, match="No space left") as caught:
        writer.begin(marker)
    writer.fail(marker, str(caught.value), errno.ENOSPC)
    assert (small_disk / f"{marker}.error").read_bytes() == b""
