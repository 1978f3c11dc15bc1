"""The power fails while a finished store is moved, repaired or sealed: nothing is lost, and the same command ends it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import pytest

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.stores.group import open_store
from hsx.testing.kept_job import SAMPLES, KeptJob, keep_job
from hsx.testing.power import Recording, recorded
from hsx.testing.promise import committed_rows, damages, shards

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.records import CommittedRow

pytestmark = pytest.mark.slow

LOOKS: Final = 8


def command(job: KeptJob, *words: str) -> None:
    """A command on the job, which must end well."""
    name, *rest = words
    assert main([name, str(job.file), *rest]) == ExitCode.DONE


def whole(job: KeptJob) -> None:
    """All is committed, right, shown, and there once."""
    assert damages(job.loaded) == []
    assert job.wrong() == []
    assert len(job.state()["committed"]) == SAMPLES
    assert shards(job.loaded) == sorted((row.index, row.root) for row in committed_rows(job.loaded).values())


def record(folder: Path, *words: str, damaged: tuple[int, ...] = ()) -> tuple[KeptJob, Recording, dict[int, CommittedRow]]:
    """A job all of which is committed, and one command on it; what the ledger said before.

    Args:
        folder: of everything.
        words: the command.
        damaged: samples whose shards are damaged before.
    """
    home = folder / "job"
    with recorded(folder / "power", {"home": home, "a": home / "root-a", "b": home / "root-b"}) as recording:
        job = keep_job(home)
        job.extract()
        before = committed_rows(job.loaded)
        for index in damaged:
            job.shard(index).write_bytes(b"damaged")
        recording.begin()
        command(job, *words)
        recording.end()
    return job, recording, before


def test_a_move_is_cut_short(tmp_path: Path) -> None:
    job, recording, before = record(tmp_path, "move", "b")
    for number, moment in enumerate(recording.moments(LOOKS)):
        with recording.cut(moment, random.Random(number) if number % 2 else None):
            rows = committed_rows(job.loaded)
            assert {index: row.marker for index, row in rows.items()} == {index: row.marker for index, row in before.items()}
            # A link may be ahead of the ledger: the copy that it leads to is as good.
            assert {damage.kind for damage in damages(job.loaded)} <= {"link"}, f"damaged by a cut at {moment}"
            assert job.wrong() == []
            command(job, "move", "b")
            whole(job)
            assert {row.root for row in committed_rows(job.loaded).values()} == {"a"}


def test_a_repair_is_cut_short(tmp_path: Path) -> None:
    damaged = (3, 4, 9)
    job, recording, before = record(tmp_path, "repair", damaged=damaged)
    for number, moment in enumerate(recording.moments(LOOKS)):
        with recording.cut(moment, random.Random(number) if number % 2 else None):
            rows = committed_rows(job.loaded)
            assert before.keys() - set(damaged) <= rows.keys()
            assert {damage.index for damage in damages(job.loaded)} <= set(damaged), f"damaged by a cut at {moment}"
            command(job, "repair")
            assert sorted(job.extract()) == sorted(damaged)
            whole(job)


def test_a_seal_is_cut_short(tmp_path: Path) -> None:
    job, recording, before = record(tmp_path, "seal", "--partial")
    for number, moment in enumerate(recording.moments(LOOKS)):
        with recording.cut(moment, random.Random(number) if number % 2 else None):
            assert committed_rows(job.loaded) == before
            assert damages(job.loaded) == [], f"damaged by a cut at {moment}"
            command(job, "seal", "--partial")
            assert open_store(job.loaded.store).sealed is not None
            command(job, "verify")
            assert main(["verify", "--store", str(job.loaded.store)]) == ExitCode.DONE
            whole(job)


def test_a_ledger_that_is_built_again_is_cut_short(tmp_path: Path) -> None:
    home = tmp_path / "job"
    with recorded(tmp_path / "power", {"home": home, "a": home / "root-a", "b": home / "root-b"}) as recording:
        job = keep_job(home)
        job.extract()
        before = committed_rows(job.loaded)
        for file in job.loaded.state_dir.glob("ledger.sqlite*"):
            file.unlink()
        recording.begin()
        command(job, "repair", "--rebuild-ledger")
        recording.end()
    for number, moment in enumerate(recording.moments(LOOKS)):
        with recording.cut(moment, random.Random(number) if number % 2 else None):
            # Where nothing is left to be done, it is refused: the ledger is sound.
            assert main(["repair", str(job.file), "--rebuild-ledger"]) in {ExitCode.DONE, ExitCode.REFUSED}
            rows = committed_rows(job.loaded)
            assert {index: row.marker for index, row in rows.items()} == {index: row.marker for index, row in before.items()}
            command(job, "repair")
            assert job.extract() == []
            whole(job)
