"""`hsx repair`: exactly what is damaged is extracted again, and nothing because a disk is not there."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest

from hsx.cli import main
from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, MOVE_LOCK, at_rest, locked, store_lock
from hsx.repair import RELINKED, data_lost, repair
from hsx.stores.group import open_store
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.view import UnionView
from hsx.testing.kept_job import SAMPLES, KeptJob
from hsx.verify import KINDS, OF_SHARDS, verify

ALL = list(range(SAMPLES))


def flip(path: Path, at: int = 10) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def files(job: KeptJob) -> list[str]:
    """What lies in the store and on its roots."""
    folders = (job.loaded.store, *(root.path for root in job.loaded.roots))
    return sorted(str(path) for folder in folders for path in folder.rglob("*"))


def mended(job: KeptJob) -> bool:
    """Extracts what is pending; whether everything is committed, right, and verified then."""
    job.extract()
    with LedgerReader(job.ledger) as reader:
        report = verify(job.loaded.store, reader)
    return report.ok and report.uncommitted == 0 and job.state()["committed"] == ALL and job.wrong() == []


def test_what_is_whole_is_left_alone(job: KeptJob) -> None:
    before = {index: job.shard(index).stat() for index in ALL}
    with at_rest(job.loaded):
        report = repair(job.loaded)
    assert (report.committed, report.read, report.damaged, report.requeued, report.left) == (SAMPLES, SAMPLES, 0, 0, 0)
    assert (report.relinked, report.strays, report.partials) == (0, 0, 0)
    assert {index: job.shard(index).stat().st_ino for index in ALL} == {i: s.st_ino for i, s in before.items()}
    assert job.state()["committed"] == ALL


def test_each_damage_is_extracted_again_and_nothing_else(job: KeptJob, tmp_path: Path) -> None:
    flip(job.shard(1))
    with job.shard(2).open("r+b") as file:
        file.truncate(100)
    job.shard(3).unlink()
    shutil.copyfile(job.shard(11), job.shard(9))  # another sample's shard over it
    with job.shard(6).open("r+b") as file:
        file.write(bytes(4096))
    listed = tmp_path / "report.jsonl"
    with at_rest(job.loaded):
        report = repair(job.loaded, report=listed)
    assert job.state()["pending"] == [1, 2, 3, 6, 9]
    assert report.requeued == 5
    assert report.by_kind.pop("missing") == 1
    assert report.by_kind.pop("record") == 1
    assert sum(report.by_kind.values()) == 3
    assert report.tokens == 2 + 3 + 4 + 7 + 10
    assert job.wrong() == []  # hidden as well
    assert [job.shard(index).exists() for index in (1, 2, 3, 6, 9)] == [False] * 5
    lines = [json.loads(line) for line in listed.read_text().splitlines()]
    assert {line["index"] for line in lines if line["fate"] == "requeued"} == {1, 2, 3, 6, 9}
    assert all(line["sample_id"] == f"row-{line['index']}" for line in lines)
    with LedgerReader(job.ledger) as reader:
        taken = sorted(index for entry in reader.revocations() for index in entry.samples)
        assert taken == [1, 2, 3, 6, 9]
        assert {entry.epoch for entry in reader.revocations()} == {""}
        assert reader.sample(1).attempts == 1
    assert mended(job)
    with LedgerReader(job.ledger) as reader:
        row = reader.row(1)
        assert row is not None
        assert row.marker.endswith("-1-2-2")  # another attempt: no marker is used twice


def test_a_dry_run_says_the_same_and_changes_nothing(job: KeptJob) -> None:
    flip(job.shard(1))
    job.shard(3).unlink()
    UnionView(open_store(job.loaded.store)).unlink(5)
    (job.shard(4).parent / f"{shard_key(4)}.hsx1-00000000-4-1-5.partial").write_bytes(b"x")
    before = files(job)
    with at_rest(job.loaded):
        report = repair(job.loaded, dry_run=True)
    assert (report.requeued, report.relinked, report.partials) == (2, 1, 0)
    assert job.state()["committed"] == ALL
    assert files(job) == before


def test_the_view_follows_the_ledger_and_leftovers_go(job: KeptJob) -> None:
    view = UnionView(open_store(job.loaded.store))
    view.unlink(5)
    view.link(4, "b")  # to nowhere
    partial = job.shard(4).parent / f"{shard_key(4)}.hsx1-00000000-4-1-5.partial"
    partial.write_bytes(b"x")
    shutil.copyfile(job.shard(7), job.shard(7, "a"))  # what a killed writer or move left
    with at_rest(job.loaded):
        report = repair(job.loaded)
    assert (report.requeued, report.relinked, report.strays, report.partials) == (0, 2, 1, 1)
    assert not partial.exists()
    assert not job.shard(7, "a").exists()
    assert job.wrong() == []
    assert mended(job)


def test_a_disk_that_is_not_there_takes_nothing_back(job: KeptJob) -> None:
    away = job.file.parent / "root-b"
    away.rename(job.file.parent / "elsewhere")
    with at_rest(job.loaded), pytest.raises(RunError, match="mount its disk, or say --lost b") as caught:
        repair(job.loaded)
    assert caught.value.kind == "root_unusable"
    away.mkdir()  # the mount point of a disk that is not mounted
    with at_rest(job.loaded), pytest.raises(RunError, match="not the root it was"):
        repair(job.loaded)
    assert job.state()["committed"] == ALL


def test_a_disk_that_goes_meanwhile_takes_nothing_back(job: KeptJob) -> None:
    flip(job.shard(0))

    def goes(_reading: object) -> None:
        shutil.rmtree(job.file.parent / "root-a", ignore_errors=True)
        shutil.rmtree(job.file.parent / "root-b", ignore_errors=True)

    with at_rest(job.loaded), pytest.raises(RunError, match="nothing more is taken back") as caught:
        repair(job.loaded, watch=goes)
    assert caught.value.kind == "root_unusable"
    assert job.state()["committed"] == ALL


def test_a_lost_root_is_given_up_and_the_job_goes_on_without_it(job: KeptJob) -> None:
    shutil.rmtree(job.file.parent / "root-b")
    with at_rest(job.loaded):
        planned = repair(job.loaded, lost=["b"], dry_run=True)
    assert (planned.lost, planned.requeued, planned.damaged) == ({"b": 6}, 0, 0)
    assert job.state()["committed"] == ALL
    flip(job.shard(0))
    with at_rest(job.loaded):
        report = repair(job.loaded, lost=["b"])
    assert (report.lost, report.requeued, report.committed) == ({"b": 6}, 1, 6)
    assert list(open_store(job.loaded.store).roots) == ["a"]
    assert job.state()["pending"] == [0, *range(1, SAMPLES, 2)]
    assert job.wrong() == []
    (job.file.parent / "root-b").mkdir()  # a new disk in its place
    assert mended(job)


def test_a_lost_root_that_comes_back_is_swept(job: KeptJob) -> None:
    there, away = job.file.parent / "root-b", job.file.parent / "away"
    there.rename(away)
    with at_rest(job.loaded):
        repair(job.loaded, lost=["b"])
    away.rename(there)
    job.extract(only={1})
    with at_rest(job.loaded):
        report = repair(job.loaded)
    # Its old shards are of samples that were taken back: all but the one that was written anew.
    assert report.strays == 5
    assert mended(job)


def test_a_root_that_is_there_is_not_lost(job: KeptJob) -> None:
    with at_rest(job.loaded), pytest.raises(RunError, match="expected it to be gone") as caught:
        repair(job.loaded, lost=["b"])
    assert caught.value.kind == "usage"
    with at_rest(job.loaded), pytest.raises(RunError, match="no such root; it has a, b") as caught:
        repair(job.loaded, lost=["c"])
    assert caught.value.kind == "usage"
    assert job.state()["committed"] == ALL


def test_what_repair_cannot_mend_is_left_and_said(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = job.loaded.store / "input_ids" / "c" / "0"
    flip(tokens)
    code = main(["repair", str(job.file)])
    assert code == ExitCode.DAMAGED
    shown = capsys.readouterr()
    assert "cannot be mended by repair" in shown.out
    assert "[store_damaged]" in shown.err
    assert job.state()["committed"] == ALL


def test_a_shard_that_may_not_be_read_is_not_lost(job: KeptJob) -> None:
    assert not data_lost(job.shard(0))
    assert not data_lost(job.shard(0).with_name("none"))
    if os.geteuid() != 0:
        job.shard(1).chmod(0)
        with at_rest(job.loaded):
            report = repair(job.loaded)
        assert (report.requeued, report.left) == (0, 1)


def test_every_kind_of_damage_has_its_fate() -> None:
    left = {"root", "ledger", "manifest"}
    assert set(KINDS) == OF_SHARDS | RELINKED | {"ids"} | left


@pytest.mark.parametrize("lock", ["job", "store", "move"])
def test_nothing_else_may_be_at_work(job: KeptJob, lock: str, capsys: pytest.CaptureFixture[str]) -> None:
    state = job.loaded.state_dir
    path = {"job": state / JOB_LOCK, "store": store_lock(job.loaded.store), "move": state / MOVE_LOCK}[lock]
    with locked(path, "the test"):
        assert main(["repair", str(job.file)]) == ExitCode.LOCKED
    assert "[job_locked]" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused(job: KeptJob, tmp_path: Path) -> None:
    with at_rest(job.loaded), pytest.raises(RunError, match="cannot be written") as caught:
        repair(job.loaded, report=tmp_path / "none" / "report.jsonl")
    assert caught.value.kind == "usage"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_report_that_fills_its_disk_keeps_nothing_from_being_mended(job: KeptJob) -> None:
    job.shard(3).unlink()
    with at_rest(job.loaded), pytest.raises(RunError, match="No space left on device; all was done") as caught:
        repair(job.loaded, report=Path("/dev/full"))
    assert caught.value.kind == "store_unwritable"
    assert job.state()["pending"] == [3]
    assert mended(job)


def test_a_root_that_is_said_to_be_lost_twice_is_lost_once(job: KeptJob) -> None:
    shutil.rmtree(job.file.parent / "root-b")
    with at_rest(job.loaded):
        assert repair(job.loaded, lost=["b", "b"]).lost == {"b": 6}


def test_the_command_prints_what_it_did(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.shard(3).unlink()
    assert main(["repair", str(job.file), "--dry-run"]) == ExitCode.DONE
    assert "1 sample would be pending again: missing 1" in capsys.readouterr().out
    assert main(["repair", str(job.file), "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["requeued"], document["by_kind"]) == (1, {"missing": 1})
    assert main(["repair", str(job.file)]) == ExitCode.DONE
    assert "nothing is to be extracted again" in capsys.readouterr().out


def test_without_a_ledger_repair_says_how_to_get_one(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.ledger.unlink()
    assert main(["repair", str(job.file)]) == ExitCode.RUN_ERROR
    assert "--rebuild-ledger" in capsys.readouterr().err
    assert main(["repair", str(job.file), "--rebuild-ledger", "--dry-run"]) == ExitCode.REFUSED


def test_a_repair_that_was_killed_after_its_transaction_is_finished_by_the_next(job: KeptJob) -> None:
    async def taken_back() -> None:
        ledger = SqliteLedger(job.ledger)
        await ledger.requeue_damaged([1, 2], "chunk", "a bit")
        await ledger.close()

    asyncio.run(taken_back())
    assert job.shard(1).exists()
    with at_rest(job.loaded):
        report = repair(job.loaded)
    assert (report.requeued, report.relinked, report.strays) == (0, 2, 2)
    assert not job.shard(1).exists()
    assert job.wrong() == []
    assert mended(job)
