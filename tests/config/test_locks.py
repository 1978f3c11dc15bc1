"""Locks: who holds them, where they lie, and what a folder that takes none is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hsx.errors import RunError
from hsx.locks import JOB_LOCK, locked, store_lock


def test_a_lock_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "new" / JOB_LOCK
    with (
        locked(path, "job a"),
        pytest.raises(RunError, match=f"job a is held by pid {os.getpid()}") as caught,
        locked(path, "job a"),
    ):
        pass
    assert caught.value.kind == "job_locked"
    with locked(path, "job a"):
        assert path.read_text() == f"pid {os.getpid()}\n"


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
