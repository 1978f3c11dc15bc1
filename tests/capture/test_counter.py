"""The state file and the lock of one epoch's capture side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hsx.capture.counter import Counter
from hsx.capture.model import CaptureRefusedError
from hsx.core.epoch import LOCK_NAME, STATE_NAME, state_from_json
from hsx.engines.process import start_ticks
from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.core.epoch import CaptureState

EPOCH = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def counter(tmp_path: Path) -> Iterator[Counter]:
    counter = Counter(tmp_path, EPOCH)
    yield counter
    counter.close()


def state(folder: Path) -> CaptureState:
    return state_from_json((folder / STATE_NAME).read_text())


def test_state_is_there_from_the_start_and_names_the_process(counter: Counter, tmp_path: Path) -> None:
    assert state(tmp_path) == counter.state
    assert (counter.state.epoch, counter.state.pid, counter.state.start_ticks) == (EPOCH, os.getpid(), start_ticks(os.getpid()))
    assert sorted(p.name for p in tmp_path.iterdir()) == [LOCK_NAME, STATE_NAME]


def test_counts_add_up_and_are_known_once_saved(counter: Counter, tmp_path: Path) -> None:
    counter.add(sequence=1, published=1, foreign=2)
    counter.add(failed=1, incomplete=3)
    assert state(tmp_path).published == 0
    counter.save()
    found = state(tmp_path)
    assert found == counter.state
    assert (found.sequence, found.published, found.failed, found.foreign, found.incomplete) == (1, 1, 1, 2, 3)


def test_nothing_is_written_where_nothing_changed(counter: Counter, tmp_path: Path) -> None:
    before = (tmp_path / STATE_NAME).stat().st_ino
    counter.add(foreign=0)
    counter.save()
    assert (tmp_path / STATE_NAME).stat().st_ino == before
    counter.add(foreign=1)
    counter.save()
    assert (tmp_path / STATE_NAME).stat().st_ino != before


def test_what_cannot_be_saved_is_saved_later(counter: Counter, tmp_path: Path) -> None:
    """Neither a lost folder nor a full file system reaches the server; a log line tells of the first of such failures."""
    shutil.rmtree(tmp_path)
    counter.add(sequence=1, published=1)
    counter.save()
    counter.save()
    tmp_path.mkdir()
    counter.save()
    assert state(tmp_path).published == 1


def test_only_one_captures_into_an_epoch(counter: Counter, tmp_path: Path) -> None:
    counter.add(published=1)
    counter.save()
    with pytest.raises(CaptureRefusedError, match=f"pid {os.getpid()} already captures into this epoch: a second server"):
        Counter(tmp_path, EPOCH)
    assert state(tmp_path).published == 1


def test_the_lock_dies_with_its_holder(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from hsx.capture.counter import Counter; Counter(Path(sys.argv[1]), 'e')"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
    assert state(tmp_path).pid != os.getpid()
    counter = Counter(tmp_path, EPOCH)
    assert state(tmp_path).pid == os.getpid()
    counter.close()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / STATE_NAME).mkdir()
    for _ in range(2):  # the lock is let go each time
        with pytest.raises(IsADirectoryError):
            Counter(tmp_path, EPOCH)
    with pytest.raises(FileNotFoundError):
        Counter(tmp_path / "none", EPOCH)


@pytest.mark.parametrize("change", ["", "{}", '{"format": 1}', "[]"])
def test_a_broken_state_file_is_no_state(change: str) -> None:
    with pytest.raises(EngineError, match=r"counter\.json cannot be read") as caught:
        state_from_json(change)
    assert caught.value.kind == "epoch_unknown"
