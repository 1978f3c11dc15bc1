"""`hsx repair --rebuild-ledger`: the shards and the copies of the ledger are enough."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from hsx.cli import main
from hsx.config_load import load
from hsx.core.epoch import EpochRecord
from hsx.core.marker import Marker, parse
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import at_rest
from hsx.prepare import prepare
from hsx.rebuild import RebuildReport, rebuild
from hsx.repair import repair
from hsx.stores.group import open_store, record_run
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_backup import BACKUP_NAME, backup
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import SCHEMA_VERSION
from hsx.testing.kept_job import SAMPLES, KeptJob
from hsx.testing.stores import EPOCH, payload
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

ALL = list(range(SAMPLES))
LATER = "00000000-0000-4000-8000-000000000002"
RECORD = EpochRecord(EPOCH, "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)


def back_up(job: KeptJob) -> None:
    store = open_store(job.loaded.store)

    async def work() -> None:
        ledger = SqliteLedger(job.ledger)
        assert set((await ledger.backup({name: store.folder(name) for name in store.roots})).values()) == {None}
        await ledger.close()

    asyncio.run(work())


def change(job: KeptJob, statement: str) -> None:
    with closing(sqlite3.connect(job.ledger)) as db:
        db.execute(statement)
        db.commit()


def rebuilt(job: KeptJob, lost: tuple[str, ...] = ()) -> RebuildReport:
    with at_rest(job.loaded):
        return rebuild(job.loaded, lost=lost)


def whole(job: KeptJob) -> bool:
    with LedgerReader(job.ledger) as reader:
        report = verify(job.loaded.store, reader)
    return report.ok and report.uncommitted == 0 and job.wrong() == []


def test_shards_alone_are_enough(job: KeptJob) -> None:
    with LedgerReader(job.ledger) as reader:
        before = list(reader.committed())
        fingerprint, run = reader.fingerprint, reader.run
    shutil.rmtree(job.loaded.state_dir)
    report = rebuilt(job)
    assert (report.committed, report.pending, report.shards, report.refused, report.copy) == (SAMPLES, 0, SAMPLES, 0, None)
    assert (report.previous_run, report.kept) == (run, None)
    with LedgerReader(job.ledger) as reader:
        assert list(reader.committed()) == before
        assert reader.fingerprint == fingerprint
        assert reader.run == open_store(job.loaded.store).run == report.run != run
        assert reader.counts().tokens_committed == sum(i + 1 for i in ALL)
        (epoch,) = reader.epochs()
        assert (epoch.epoch, epoch.vouched, epoch.reason) == (EPOCH, 0, "ledger_rebuilt")
    assert whole(job)
    assert job.extract() == []
    # Copies of the new ledger are there at once: those of the old one would have been of another run.
    for root in ("a", "b"):
        with LedgerReader(job.shard(0, root).with_name(BACKUP_NAME)) as copy:
            assert copy.run == report.run


def test_no_canary_vouches_for_what_was_rebuilt_and_no_server_goes_on(job: KeptJob) -> None:
    folder = job.loaded.dump_dir / LATER
    folder.mkdir(parents=True)
    (folder / "server.json").write_text(json.dumps({"epoch": LATER}))
    with LedgerReader(job.ledger) as reader:
        run = reader.run
    (folder / f"hsx1-{run}-3-1-4.safetensors").write_bytes(b"a dump of the run that is no more")
    (folder / "hsx1-0000ffff-3-1-4.safetensors").write_bytes(b"another's")
    job.ledger.unlink()
    rebuilt(job)
    assert [path.name for path in sorted(folder.iterdir())] == ["hsx1-0000ffff-3-1-4.safetensors", "server.json"]

    async def look() -> None:
        ledger = SqliteLedger(job.ledger)
        assert await ledger.unvouched() == [EPOCH]
        assert set(await ledger.voided_epochs()) == {EPOCH, LATER}
        assert [row.index for row in await ledger.last_doubtful(EPOCH, 2)] == [11, 10]
        await ledger.vouch(EPOCH, SAMPLES)
        assert await ledger.unvouched() == []
        await ledger.close()

    asyncio.run(look())


def test_a_copy_gives_the_history(tmp_path: Path) -> None:
    from hsx.testing.kept_job import keep_job

    job = keep_job(tmp_path)
    job.extract(only=set(range(6)))

    async def history() -> None:
        ledger = SqliteLedger(job.ledger)
        await ledger.epoch_began(RECORD)
        await ledger.vouch(EPOCH, 4)
        await ledger.remember("some", "fact")
        (lease,) = await ledger.acquire(1, {7})
        marker = Marker(ledger.run, 7, lease.attempt, 8)
        await ledger.fail(lease, marker, EPOCH, "finite", "a NaN", quarantine=True)
        await ledger.violation(EPOCH, marker, "finite", "a NaN")
        await ledger.close()

    asyncio.run(history())
    back_up(job)
    job.extract(epoch=LATER, only={6, 8})  # after the copy
    with LedgerReader(job.ledger) as reader:
        before = list(reader.committed())
        committed_at = reader.sample(0).committed_at
    job.ledger.write_bytes(b"x" * 5000)
    report = rebuilt(job)
    assert report.copy is not None
    assert report.kept is not None
    assert (report.committed, report.pending, report.quarantined, report.missing) == (8, 3, 1, 0)
    with LedgerReader(job.ledger) as reader:
        assert list(reader.committed()) == before
        assert (reader.sample(7).state, reader.sample(7).reason, reader.sample(7).attempts) == ("quarantined", "finite", 1)
        assert reader.sample(0).committed_at == committed_at
        assert reader.sample(0).timings == {"request": 0.1}
        assert reader.violations_by_invariant() == {"finite": 1}
        assert {epoch.epoch: epoch.vouched for epoch in reader.epochs()} == {EPOCH: 4, LATER: 0}
        assert reader.fact("some") == "fact"
        assert reader.fact("backed_up") is None
        assert reader.counts().committed == 8
    assert whole(job)
    assert job.extract() == [9, 10, 11]


def test_the_broken_ledger_and_its_log_are_put_aside(job: KeptJob) -> None:
    job.ledger.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    for ending in ("-wal", "-shm"):
        job.ledger.with_name(job.ledger.name + ending).write_bytes(b"of the broken one")
    report = rebuilt(job)
    aside = sorted(path.name.partition(".broken-")[0] for path in job.loaded.state_dir.glob("*.broken-*"))
    assert aside == ["ledger.sqlite", "ledger.sqlite-shm", "ledger.sqlite-wal"]
    assert report.kept is not None
    assert whole(job)


def test_damaged_foreign_and_misplaced_shards_are_not_taken(job: KeptJob) -> None:
    with job.shard(1).open("r+b") as file:
        file.write(b"\xff" * 100)
    shutil.copyfile(job.shard(11), job.shard(9))
    job.shard(4).unlink()
    job.shard(0).with_name("c.77.0.0.0").write_bytes(job.shard(0).read_bytes())
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.refused, report.missing) == (SAMPLES - 3, 3, 0)
    assert {(damage.index, damage.kind) for damage in report.refusals} >= {(9, "record"), (77, "record")}
    assert job.state()["pending"] == [1, 4, 9]
    assert job.extract() == [1, 4, 9]
    job.shard(0).with_name("c.77.0.0.0").unlink()
    assert whole(job)


def test_commits_of_a_copy_without_a_sound_shard_are_pending(job: KeptJob) -> None:
    back_up(job)
    job.shard(4).unlink()
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.missing) == (SAMPLES - 1, 1)
    with LedgerReader(job.ledger) as reader:
        (entry,) = reader.revocations()
        assert (entry.invariant, entry.samples) == ("ledger_rebuilt", (4,))
    assert job.extract() == [4]
    assert whole(job)


def test_the_newest_attempt_wins_and_what_was_revoked_stays_so(job: KeptJob) -> None:
    old = job.shard(2).read_bytes()
    revoked = job.shard(3).read_bytes()

    async def history() -> None:
        ledger = SqliteLedger(job.ledger)
        await ledger.requeue_damaged([2], "chunk", "a bit")
        await ledger.epoch_began(RECORD)
        await ledger.vouch(EPOCH, 3)
        await ledger.vouch(EPOCH, 12)
        await ledger.close()

    asyncio.run(history())
    assert job.extract(epoch=LATER, root="b") == [2]
    job.shard(2, "a").write_bytes(old)  # a stray of the first attempt
    change(
        job,
        "INSERT INTO revocations (at, epoch, invariant, evidence, samples) VALUES "
        f"(1.0, '{EPOCH}', 'twins', 'rows were mixed', '[3]')",
    )
    change(job, "UPDATE samples SET state = 'pending', marker = NULL, epoch = NULL, root = NULL, nbytes = NULL WHERE idx = 3")
    back_up(job)
    assert job.shard(3).read_bytes() == revoked  # its root was out of service when it was revoked
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.superseded, report.strays) == (SAMPLES - 1, 2, 2)
    with LedgerReader(job.ledger) as reader:
        row = reader.row(2)
        assert row is not None
        marker = parse(row.marker)
        assert marker is not None
        assert (row.root, row.epoch, marker.attempt) == ("b", LATER, 2)
        assert reader.sample(2).attempts == 2
    assert not job.shard(2, "a").exists()
    assert not job.shard(3).exists()
    assert job.extract() == [3]
    assert whole(job)


def test_two_copies_of_one_attempt_are_one_commit(job: KeptJob) -> None:
    shutil.copyfile(job.shard(2), job.shard(2, "b"))  # a move was cut short
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.superseded, report.strays) == (SAMPLES, 1, 1)
    assert whole(job)


def test_a_sound_ledger_is_not_rebuilt(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    before = job.ledger.read_bytes()
    assert main(["repair", str(job.file), "--rebuild-ledger"]) == ExitCode.REFUSED
    assert "is sound" in capsys.readouterr().err
    record_run(open_store(job.loaded.store), "0000beef")
    assert main(["repair", str(job.file), "--rebuild-ledger"]) == ExitCode.REFUSED
    assert "where the store is of run 0000beef" in capsys.readouterr().err
    assert job.ledger.read_bytes() == before


def test_a_ledger_of_a_newer_hsx_is_not_broken(job: KeptJob) -> None:
    change(job, f"PRAGMA user_version = {SCHEMA_VERSION + 1:d}")
    with pytest.raises(RunError, match="of a newer hsx") as caught:
        rebuilt(job)
    assert caught.value.kind == "ledger_failed"


def test_a_rebuild_that_was_cut_short_at_the_end_is_finished(job: KeptJob) -> None:
    run = open_store(job.loaded.store).run
    job.ledger.unlink()
    report = rebuilt(job)
    record_run(open_store(job.loaded.store), run)  # as it was before the last step
    with pytest.raises(RunError, match=r"belongs to the ledger of run.* --rebuild-ledger once more, which finishes it"):
        prepare(job.loaded, lambda _rows, _tokens: None)
    again = rebuilt(job)
    assert (again.run, again.committed, again.shards) == (report.run, SAMPLES, 0)
    assert open_store(job.loaded.store).run == report.run
    assert job.extract() == []
    assert whole(job)


def test_a_lost_root_and_a_lost_ledger(job: KeptJob) -> None:
    back_up(job)
    shutil.rmtree(job.file.parent / "root-b")
    job.ledger.unlink()
    with pytest.raises(RunError, match="--lost b"):
        rebuilt(job)
    report = rebuilt(job, lost=("b",))
    assert (report.committed, report.missing) == (6, 6)
    assert list(open_store(job.loaded.store).roots) == ["a"]
    (job.file.parent / "root-b").mkdir()
    assert job.extract() == [1, 3, 5, 7, 9, 11]
    assert whole(job)


def test_unsound_and_foreign_copies_are_refused(job: KeptJob) -> None:
    back_up(job)
    job.shard(0).with_name(BACKUP_NAME).write_bytes(b"noise" * 1000)
    with closing(sqlite3.connect(job.shard(1).with_name(BACKUP_NAME))) as db:
        db.execute("UPDATE samples SET tokens = 99 WHERE idx = 5")
        db.commit()
    job.ledger.unlink()
    report = rebuilt(job)
    assert report.copy is None
    assert set(report.copies_refused) == {"a", "b"}
    assert "of other samples than the store: sample 5" in report.copies_refused["b"]
    assert report.committed == SAMPLES


def test_without_a_copy_the_job_file_has_to_be_the_stores(job: KeptJob) -> None:
    job.ledger.unlink()
    rows = job.loaded.config.dataset.path
    path = job.file.parent / rows
    path.write_text(path.read_text() + json.dumps({"id": "more", "input_ids": [1]}) + "\n")
    with pytest.raises(RunError, match="made by a job with other settings") as caught:
        rebuilt(job)
    assert caught.value.kind == "job_changed"
    assert not job.ledger.exists()


@pytest.mark.parametrize(
    ("storage", "told"),
    [
        ('codec = "zstd"', "storage.codec: the store has none; the job file has zstd"),
        ("chunk_tokens = 16", "storage.chunk_tokens: the store has 64; the job file has 16"),
        ('tokens = "loss"', "storage.tokens: the store has all; the job file has loss"),
    ],
)
def test_without_a_copy_storage_has_to_be_the_stores(job: KeptJob, storage: str, told: str) -> None:
    job.ledger.unlink()
    job.file.write_text(f"{job.file.read_text()}\n[storage]\n{storage}\n")
    with pytest.raises(RunError, match=told) as caught:
        rebuilt(replace(job, loaded=load(job.file)))
    assert caught.value.kind == "job_changed"
    assert not job.ledger.exists()


def test_a_run_without_its_ledger_points_to_the_rebuild(job: KeptJob) -> None:
    job.ledger.unlink()
    with pytest.raises(RunError, match="--rebuild-ledger"):
        prepare(job.loaded, lambda _rows, _tokens: None)


def test_a_copy_that_was_put_back_by_hand_is_no_ledger(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(job.loaded.store)
    asyncio.run(take_back(job, [0]))
    assert backup(job.ledger, {"a": store.folder("a")}) == {"a": None}
    assert job.extract() == [0], "which the copy does not know"
    shutil.copyfile(store.folder("a") / BACKUP_NAME, job.ledger)
    for name in ("-wal", "-shm"):
        job.ledger.with_name(job.ledger.name + name).unlink(missing_ok=True)
    with pytest.raises(RunError, match="is a copy of how it was at") as caught:
        prepare(job.loaded, lambda _rows, _tokens: None)
    assert caught.value.kind == "ledger_failed"
    for command in (["repair"], ["move", "a"], ["seal"]):
        assert main([command[0], str(job.file), *command[1:]]) != ExitCode.DONE
        assert "[ledger_failed]" in capsys.readouterr().err
    report = rebuilt(job)
    assert (report.committed, report.copy) == (SAMPLES, str(store.folder("a") / BACKUP_NAME))
    assert job.wrong() == []
    prepare(job.loaded, lambda _rows, _tokens: None)


async def take_back(job: KeptJob, indices: list[int]) -> None:
    ledger = SqliteLedger(job.ledger)
    await ledger.requeue_damaged(indices, "missing", "for the test")
    await ledger.close()


def test_the_command_prints_what_it_was_made_of(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    job.ledger.unlink()
    assert main(["repair", str(job.file), "--rebuild-ledger"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "12 of 12" in shown
    assert "no root has a sound copy" in shown
    job.ledger.unlink()
    assert main(["repair", str(job.file), "--rebuild-ledger", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["committed"], document["copy"] is not None) == (12, True)


def test_a_shard_of_another_store_is_not_taken(job: KeptJob) -> None:
    store = open_store(job.loaded.store)
    from hsx.stores.root import ShardRoot

    other = ShardRoot("a", store.folder("a"), replace(store, store_id="00000000-0000-4000-8000-00000000ffff"))
    marker = Marker(store.run, 0, 9, 1)
    other.write(payload(marker, job.truth(0)))
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.refused) == (SAMPLES - 1, 1)
    assert report.refusals[0].kind == "record"


def first_format(job: KeptJob) -> None:
    """Makes the store one of the first format, whose shards have no records that anybody looks at."""
    document = job.loaded.store / "zarr.json"
    found = json.loads(document.read_text())
    found["attributes"]["hsx"] |= {"format": "hsx-store-1"}
    del found["attributes"]["hsx"]["codec"]
    document.write_text(json.dumps(found))


def test_a_store_without_records_goes_as_far_as_its_copy(job: KeptJob) -> None:
    back_up(job)
    first_format(job)
    with job.shard(4).open("r+b") as file:
        file.write(b"\xff" * 64)
    job.ledger.unlink()
    report = rebuilt(job)
    assert (report.committed, report.refused, report.missing) == (SAMPLES - 1, 1, 1)
    assert job.state()["pending"] == [4]
    assert job.wrong() == []


def test_a_store_without_records_and_copies_cannot_be_rebuilt(job: KeptJob) -> None:
    first_format(job)
    job.ledger.unlink()
    with pytest.raises(RunError, match="have no records") as caught:
        rebuilt(job)
    assert caught.value.kind == "ledger_failed"


def test_a_sealed_store_is_not_touched(job: KeptJob) -> None:
    document = job.loaded.store / "zarr.json"
    found = json.loads(document.read_text())
    found["attributes"]["hsx"]["sealed"] = {"at": "2026-01-01T00:00:00Z"}
    document.write_text(json.dumps(found))
    for work in (rebuild, repair):
        with at_rest(job.loaded), pytest.raises(RunError, match="is sealed") as caught:
            work(job.loaded)
        assert caught.value.kind == "store_sealed"


def test_a_rebuild_that_was_cut_short_before_it_had_a_ledger_begins_again(job: KeptJob) -> None:
    job.ledger.rename(job.ledger.with_name("ledger.sqlite.broken-20260101T000000Z"))
    for left in ("ledger.rebuild", "ledger.rebuild-wal", "ledger.rebuild-journal", "ledger.new", "ledger.sqlite-wal"):
        (job.loaded.state_dir / left).write_bytes(b"left by the one that was killed")
    report = rebuilt(job)
    assert report.committed == SAMPLES
    assert job.extract() == []
    assert whole(job)
    names = [path.name for path in job.loaded.state_dir.iterdir()]
    assert not [name for name in names if name.startswith(("ledger.rebuild", "ledger.new"))]
