"""`hsx move` as it is called, and what `hsx run` says of roots that came or went."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, MOVE_LOCK, locked
from hsx.stores.draining import DRAINING, is_draining
from hsx.stores.group import open_store
from hsx.testing.jobs import write_job
from hsx.testing.left_job import LeftJob, leave_job

if TYPE_CHECKING:
    from pathlib import Path

A, B, C = ({"name": name, "path": f"root-{name}", "reserve": "0B"} for name in "abc")


@pytest.fixture
def left(tmp_path: Path) -> LeftJob:
    """Samples 0 to 2 are committed on root a; the job file names b, too, which is new."""
    job = leave_job(tmp_path)
    write_job(tmp_path, {"roots": [A, B]})
    return job


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any, str]:
    """Exit code, the JSON printed (None where there is none) and standard error of a command."""
    code = main([arguments[0], *arguments[1:], "--json"])
    captured = capsys.readouterr()
    return code, json.loads(captured.out) if captured.out else None, captured.err


def test_a_job_at_rest_is_moved_to_a_new_root(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = call(capsys, "move", left.file, "a")
    assert (code, report["drained"], report["moved"], report["left"]) == (ExitCode.DONE, True, 3, 0)
    assert list(left.loaded.roots[0].path.glob("*/c.*")) == []
    code, report, _ = call(capsys, "verify", left.file)
    assert (code, report["ok"], report["read"]) == (ExitCode.DONE, True, 3)
    assert list(open_store(left.loaded.store).roots) == ["a", "b"]


def test_a_drained_root_that_left_the_job_file_is_forgotten(
    left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.DONE
    write_job(tmp_path, {"roots": [B]})
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.DONE
    assert list(open_store(left.loaded.store).roots) == ["b"]
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.REFUSED


def test_a_root_that_left_the_job_file_too_early_can_be_moved(
    left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, {"roots": [B]})
    assert call(capsys, "move", left.file, "a")[1]["moved"] == 3
    assert list(open_store(left.loaded.store).roots) == ["b"]
    assert call(capsys, "verify", left.file)[0] == ExitCode.DONE


def test_a_root_that_a_run_has_still_is_not_forgotten(
    left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, {"roots": [B]})
    with locked(left.loaded.state_dir / JOB_LOCK, "the job"):  # it began before, and may yet commit there
        assert call(capsys, "move", left.file, "a")[1]["drained"]
    assert list(open_store(left.loaded.store).roots) == ["a", "b"]
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.DONE
    assert list(open_store(left.loaded.store).roots) == ["b"]


def test_text_for_people(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["move", left.file, "a"]) == ExitCode.DONE
    said = capsys.readouterr().out
    assert "moved  3 samples" in said
    assert "it is empty: take it out of the job file" in said
    assert main(["move", left.file, "a", "--cancel"]) == ExitCode.DONE
    assert "root a takes shards again" in capsys.readouterr().out
    assert main(["move", left.file, "a", "--cancel"]) == ExitCode.DONE
    assert "root a is not being drained" in capsys.readouterr().out
    assert main(["move", left.file, "a", "--dry-run"]) == ExitCode.DONE
    assert "root a holds 0 committed samples" in capsys.readouterr().out


def test_a_dry_run_changes_nothing(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    code, report, _ = call(capsys, "move", left.file, "a", "--dry-run")
    assert (code, report["samples"], report["fits"], list(report["room"])) == (ExitCode.DONE, 3, True, ["b"])
    assert not is_draining(left.shard(0).parent)
    assert list(open_store(left.loaded.store).roots) == ["a"]


def test_a_dry_run_says_what_is_missing(left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_job(tmp_path, {"roots": [A, {**B, "reserve": "900000TB"}]})
    assert main(["move", left.file, "a", "--dry-run"]) == ExitCode.DONE
    assert "they do not fit: " in capsys.readouterr().out
    code, report, said = call(capsys, "move", left.file, "a")
    assert (code, report) == (ExitCode.RUN_ERROR, None)
    assert "[roots_full] no root can take a shard of" in said


def test_cancel_gives_the_root_back_and_sweeps(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    folder = left.shard(0).parent
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.DONE
    assert (folder / DRAINING).exists()
    stale = folder / "c.0.0.0.0.hsx1-deadbeef-0-1-1.moving.partial"
    stale.touch()
    with locked(left.loaded.state_dir / MOVE_LOCK, "a move"):
        assert call(capsys, "move", left.file, "a", "--cancel")[1] == {"root": "a", "cancelled": True}
        assert stale.exists(), "it may belong to the move that is under way"
    assert call(capsys, "move", left.file, "a", "--cancel")[1] == {"root": "a", "cancelled": False}
    assert not stale.exists()


def test_one_move_at_a_time(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(left.loaded.state_dir / MOVE_LOCK, "a move"):
        code, _, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.LOCKED
    assert "[job_locked] moving shards of job tiny is held by" in said


def test_damage_is_told_and_the_rest_is_moved(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    left.shard(1).write_bytes(b"")
    code, report, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.DAMAGED
    assert (report["moved"], report["left"], report["damaged"], report["damage"][0][0]) == (2, 1, 1, 1)
    assert "1 sample on root a cannot be moved: missing or damaged; hsx repair" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "has no root 'nowhere'; it has a"),
        (["b"], "has no root 'b'; it has a"),
        (["a", "--to", "x"], "--to names root 'x'; expected other roots of the job file: b"),
        (["a", "--to", "a"], "--to names root 'a'; expected other roots of the job file: b"),
        (["a", "--cancel", "--dry-run"], "--cancel takes neither --to nor --dry-run"),
    ],
)
def test_wrong_roots_are_refused(
    left: LeftJob, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    code, _, said = call(capsys, "move", left.file, *arguments)
    assert code == ExitCode.REFUSED
    assert "[usage]" in said
    assert expected in said


def test_a_root_inside_the_one_that_is_drained_is_refused(
    left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path, {"roots": [A, {**B, "path": "root-a/inner"}]})
    code, _, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.REFUSED
    assert "is not beside root 'a'" in said
    assert left.shard(0).exists()


def test_a_root_that_is_drained_takes_nothing(left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "move", left.file, "a")[0] == ExitCode.DONE
    code, _, said = call(capsys, "move", left.file, "b", "--to", "a")
    assert code == ExitCode.REFUSED
    assert "--to names root 'a', which is being drained itself" in said
    code, _, said = call(capsys, "move", left.file, "b")
    assert code == ExitCode.REFUSED
    assert "there is no root to move to; expected another one than 'b'" in said
    write_job(tmp_path, {"roots": [A, B, C]})
    assert call(capsys, "move", left.file, "b")[1]["moved"] == 3
    assert len(list((tmp_path / "root-c").glob("*/c.*"))) == 3


def test_a_target_that_is_not_mounted_is_refused(left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "root-b").rmdir()
    code, _, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.RUN_ERROR
    assert "[root_unusable] root b" in said
    assert not is_draining(left.shard(0).parent)


def test_a_job_that_was_never_run_has_nothing_to_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_job(tmp_path)
    code, _, said = call(capsys, "move", str(file), "a")
    assert code == ExitCode.REFUSED
    assert "[not_run_yet]" in said
    (tmp_path / "store.zarr").mkdir()
    code, _, said = call(capsys, "move", str(file), "a")
    assert code == ExitCode.RUN_ERROR
    assert "[ledger_failed]" in said


def test_another_jobs_ledger_is_refused(left: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.mkdir()
    theirs = leave_job(other)
    (theirs.loaded.state_dir / "ledger.sqlite").replace(left.loaded.state_dir / "ledger.sqlite")
    code, _, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.REFUSED
    assert "[job_changed]" in said


def test_a_sealed_store_is_not_moved(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "seal", left.file, "--partial")[0] == ExitCode.DONE
    code, _, said = call(capsys, "move", left.file, "a")
    assert code == ExitCode.REFUSED
    assert "[store_sealed]" in said
    assert not is_draining(left.shard(0).parent)
    assert call(capsys, "seal", left.file, "--undo")[0] == ExitCode.DONE
    assert call(capsys, "move", left.file, "a")[1]["moved"] == 3
