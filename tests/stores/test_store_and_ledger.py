"""A store and a ledger that do not belong together: lost, moved and second ledgers, and first runs that were cut short."""

from __future__ import annotations

import asyncio
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from hsx.app import run_job
from hsx.config_load import LoadedConfig, load
from hsx.errors import RunError
from hsx.locks import locked, store_lock
from hsx.prepare import OpenJob, prepare
from hsx.stores.attach import attach_roots
from hsx.stores.group import open_store
from hsx.stores.ledger_reader import LedgerReader
from hsx.testing.jobs import write_job
from hsx.testing.left_job import LeftJob, leave_job

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def left(tmp_path: Path) -> LeftJob:
    return leave_job(tmp_path)


def opened(loaded: LoadedConfig) -> OpenJob:
    return prepare(loaded, lambda _rows, _tokens: None)


def rewrite(folder: Path, rows: list[list[int]]) -> None:
    lines = [json.dumps({"id": f"new-{number}", "input_ids": ids}) for number, ids in enumerate(rows)]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file and link below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = str(path.readlink()).encode()
        elif path.is_file():
            found[str(path)] = path.read_bytes()
    return found


def refused(loaded: LoadedConfig, words: str) -> None:
    """The job does not open, and nothing of store and roots is touched."""
    folders = [loaded.store, *(root.path for root in loaded.roots)]
    before = [contents(folder) for folder in folders]
    with pytest.raises(RunError, match=words) as caught:
        opened(loaded)
    assert caught.value.kind == "job_changed"
    assert [contents(folder) for folder in folders] == before


def test_store_and_ledger_carry_one_run(left: LeftJob) -> None:
    job = opened(left.loaded)
    with LedgerReader(job.ledger) as ledger:
        assert job.store.run == ledger.run
    assert len(job.store.run) == 8


@pytest.mark.parametrize("rows", [[[9], [9, 9], [9] * 3, [9] * 4, [9] * 5], [[1, 2], [3]]], ids=["same shape", "other shape"])
def test_a_lost_ledger_does_not_give_old_states_to_new_tokens(left: LeftJob, tmp_path: Path, rows: list[list[int]]) -> None:
    run = open_store(left.loaded.store).run
    shutil.rmtree(left.loaded.state_dir)
    rewrite(tmp_path, rows)
    refused(left.loaded, rf"belongs to the ledger of run {run}, and this job has no ledger yet: .*put the state folder")


@pytest.mark.parametrize("gone", ["view", "root", "both"])
def test_shards_are_found_in_the_view_or_on_a_root(left: LeftJob, gone: str) -> None:
    """A root that is not mounted may have some: it counts as occupied."""
    shutil.rmtree(left.loaded.state_dir)
    if gone in ("view", "both"):
        shutil.rmtree(left.loaded.store / "hidden_states")
    if gone in ("root", "both"):
        shutil.rmtree(left.loaded.roots[0].path)
        left.loaded.roots[0].path.mkdir()
    refused(left.loaded, "it may have shards elsewhere" if gone == "both" else r"c\.[0-9]\.0\.0\.0 is there")


def test_a_second_job_file_cannot_take_the_store(left: LeftJob, tmp_path: Path) -> None:
    second = load(write_job(tmp_path, {"job": {"state_dir": "elsewhere"}}))
    refused(second, "and this job has no ledger yet")
    opened(left.loaded)


def test_a_ledger_moved_away_and_back_goes_on(left: LeftJob, tmp_path: Path) -> None:
    left.loaded.state_dir.rename(tmp_path / "aside")
    refused(left.loaded, "no ledger yet")
    left.loaded.state_dir.rmdir() if left.loaded.state_dir.exists() else None
    (tmp_path / "aside").rename(left.loaded.state_dir)
    assert opened(left.loaded).samples.count == 5


def test_the_ledger_of_another_job_is_refused(left: LeftJob, tmp_path: Path) -> None:
    """Two jobs with the same settings and dataset: only the run id tells their ledgers apart."""
    (tmp_path / "other").mkdir()
    other = leave_job(tmp_path / "other")
    for suffix in ("", "-wal", "-shm"):
        (left.loaded.state_dir / f"ledger.sqlite{suffix}").unlink(missing_ok=True)
    shutil.copy(other.loaded.state_dir / "ledger.sqlite", left.loaded.state_dir / "ledger.sqlite")
    refused(left.loaded, f"is of run {open_store(other.loaded.store).run}; expected them to be of one job")


@pytest.mark.parametrize("roots", [False, True], ids=["at once", "after its roots were made"])
def test_a_first_run_that_was_cut_short_begins_again(tmp_path: Path, roots: bool) -> None:
    """Store, but no ledger and no shard: even with another dataset nothing is lost."""
    loaded = load(write_job(tmp_path))
    before = opened(loaded)
    if roots:
        attach_roots(before.store, {"a": loaded.roots[0].path})
    shutil.rmtree(loaded.state_dir)
    rewrite(tmp_path, [[7, 8, 9]])
    job = opened(loaded)
    assert (job.samples.count, job.store.layout.samples, job.store.layout.max_tokens) == (1, 1, 3)
    assert job.store.run != before.store.run
    with LedgerReader(job.ledger) as ledger:
        assert ledger.run == job.store.run
    assert opened(loaded) is not None


def test_a_job_whose_empty_store_another_has_taken_is_refused(tmp_path: Path) -> None:
    """The second job may begin anew in an empty store; the first one then must not come back to it."""
    first = load(write_job(tmp_path))
    opened(first)
    opened(load(write_job(tmp_path, {"job": {"state_dir": "elsewhere"}})))
    refused(first, "expected them to be of one job")


def test_a_store_without_a_run_has_no_ledger(left: LeftJob) -> None:
    path = left.loaded.store / "zarr.json"
    document: dict[str, Any] = json.loads(path.read_bytes())
    del document["attributes"]["hsx"]["run"]
    path.write_text(json.dumps(document))
    assert open_store(left.loaded.store).run == ""
    refused(left.loaded, "belongs to the ledger of run unknown")


def test_two_jobs_do_not_run_on_one_store(left: LeftJob) -> None:
    with locked(store_lock(left.loaded.store), "store"), pytest.raises(RunError, match=r"store .* is held by pid") as caught:
        asyncio.run(run_job(left.loaded))
    assert caught.value.kind == "job_locked"
    assert not store_lock(left.loaded.store).is_relative_to(left.loaded.store)
