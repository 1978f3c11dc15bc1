"""`hsx repair` where a disk takes no writes, is not mounted, or is gone for good."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.locks import at_rest
from hsx.repair import repair
from hsx.stores.group import open_store
from hsx.stores.ledger_reader import LedgerReader
from hsx.testing.kept_job import SAMPLES, KeptJob, keep_job
from hsx.testing.mounts import remount, tmpfs, unmount
from hsx.verify import verify

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def job(tmp_path: Path) -> Iterator[KeptJob]:
    """A job all of which is committed, with root b on a disk of its own."""
    with tmpfs(tmp_path / "root-b", "size=16m"):
        job = keep_job(tmp_path)
        job.extract()
        yield job


def whole(job: KeptJob) -> bool:
    with LedgerReader(job.ledger) as reader:
        return verify(job.loaded.store, reader).ok and job.wrong() == [] and not job.state()["pending"]


def test_a_disk_that_takes_no_writes_keeps_nothing_from_being_taken_back(job: KeptJob) -> None:
    with job.shard(1).open("r+b") as file:
        file.write(b"\xff" * 64)
    (job.shard(1).parent / "c.3.0.0.0.hsx1-00000000-3-1-4.partial").write_bytes(b"x")
    remount(job.file.parent / "root-b", "ro")
    with at_rest(job.loaded):
        report = repair(job.loaded)
    assert (report.requeued, report.left) == (1, 0)
    assert "EROFS" in report.untidy["b"]
    assert job.state()["pending"] == [1]
    assert job.shard(1).exists()  # but nothing shows it
    assert job.wrong() == []
    remount(job.file.parent / "root-b", "rw")
    with at_rest(job.loaded):
        again = repair(job.loaded)
    assert (again.strays, again.partials, again.untidy) == (1, 1, {})
    assert job.extract() == [1]
    assert whole(job)


def test_a_disk_that_is_not_mounted_takes_nothing_back_until_it_is_said_to_be_lost(job: KeptJob) -> None:
    unmount(job.file.parent / "root-b")
    with at_rest(job.loaded), pytest.raises(RunError, match="mount its disk, or say --lost b") as caught:
        repair(job.loaded)
    assert caught.value.kind == "root_unusable"
    assert len(job.state()["committed"]) == SAMPLES
    with at_rest(job.loaded):
        report = repair(job.loaded, lost=["b"])
    assert report.lost == {"b": SAMPLES // 2}
    assert list(open_store(job.loaded.store).roots) == ["a"]
    with tmpfs(job.file.parent / "root-b", "size=16m"):  # a new disk
        assert job.extract() == list(range(1, SAMPLES, 2))
        assert whole(job)
