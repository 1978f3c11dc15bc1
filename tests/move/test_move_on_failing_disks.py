"""Disks that fail under a move, by errors that strace puts into system calls: what was not moved stays where it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.stores.draining import DRAINING, begin_draining, is_draining
from hsx.testing.jobs import write_job
from hsx.testing.left_job import leave_job
from hsx.testing.mounts import mount, obstacle, private_mounts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hsx.testing.moving import MoveBench

PROGRAM = """
import json, sys
from pathlib import Path
from hsx.errors import RunError
from hsx.testing.moving import MoveBench

bench = MoveBench(Path(sys.argv[1]), new=False)
try:
    report = bench.move("a", sys.argv[2:], batch=1)
    print(json.dumps({"moved": report.moved, "damage": report.damage}))
except RunError as error:
    print(json.dumps({"error": error.kind, "message": error.message}))
"""


@pytest.fixture
def bench(bench: MoveBench, strace: None) -> MoveBench:
    """The store, where system calls can be made to fail."""
    del strace
    return bench


def move_with(bench: MoveBench, inject: str, *targets: str, paths: Sequence[str] = ()) -> dict[str, Any]:
    """Moves root a in a process whose system calls fail as `inject` says; on some paths only, where any are given."""
    trace = bench.folder / "trace"
    command = [
        "strace",
        "-f",
        "-qq",
        "-o",
        str(trace),
        *(word for path in paths for word in ("-P", path)),
        "-e",
        f"inject={inject}",
    ]
    program = [sys.executable, "-B", "-c", PROGRAM, str(bench.folder), *targets]
    done = subprocess.run([*command, *program], check=True, capture_output=True, text=True)
    assert "(INJECTED)" in trace.read_text(), "nothing failed"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def marked(bench: MoveBench, index: int, root: str) -> str:
    """Path of the copy that a move makes of a sample on a root."""
    row = bench.rows()[index]
    return str(bench.info.folder(root) / f"c.{index}.0.0.0.{row.marker}.moving.partial")


def test_a_file_system_without_hard_links(bench: MoveBench) -> None:
    assert move_with(bench, "linkat,link:error=EPERM", "b", "c")["moved"] == 3
    bench.in_order()


def test_a_file_system_without_o_direct(bench: MoveBench) -> None:
    found = move_with(bench, "openat:error=EINVAL:when=1", "b", paths=[marked(bench, 0, "b")])
    assert found["moved"] == 3
    bench.in_order()


def test_an_original_that_cannot_be_read_stays(bench: MoveBench) -> None:
    found = move_with(bench, "preadv,preadv2:error=EIO", "b", paths=[str(bench.info.folder("a") / "c.3.0.0.0")])
    assert (found["moved"], [index for index, _ in found["damage"]]) == (2, [3])
    assert "Input/output error" in found["damage"][0][1]
    assert bench.homes_now()[3] == "a"
    bench.in_order()


@pytest.mark.parametrize("call", ["fallocate", "pwritev,pwritev2", "fdatasync"])
def test_a_target_that_fails_takes_no_more_and_the_others_do(bench: MoveBench, call: str) -> None:
    """The targets share a file system: which of them is asked first is not told, but of three shards one is placed on b."""
    found = move_with(bench, f"{call}:error=EIO", "b", "c", paths=[marked(bench, index, "b") for index in (0, 3, 6)])
    assert found["moved"] == 3
    bench.in_order()


def test_a_target_without_inodes_takes_no_more(bench: MoveBench) -> None:
    found = move_with(bench, "openat:error=ENOSPC", "b", paths=[marked(bench, 0, "b")])
    assert found["error"] == "roots_full"
    assert "root b: no space for" in found["message"]
    assert bench.shards("a") == [0, 3, 6]
    bench.in_order()


def test_names_that_cannot_be_made_durable_end_the_move(bench: MoveBench) -> None:
    found = move_with(bench, "fsync:error=EIO", "b", paths=[str(bench.info.folder("b"))])
    assert found["error"] == "root_unusable"
    assert bench.homes_now() == {index: "abc"[index % 3] for index in range(9)}
    bench.nothing_lost()
    assert bench.move("a", ["c"]).moved == 3  # and the copy that was left on b goes
    bench.in_order()


def test_samples_are_moved_off_a_disk_that_turned_read_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if reason := obstacle():
        assert os.environ.get("CI") != "true", f"CI runs every test: {reason}"
        pytest.skip(reason)
    job = leave_job(tmp_path)
    roots = [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in "ab"]
    write_job(tmp_path, {"roots": roots})
    folder = tmp_path / "root-a"
    with private_mounts():
        mount("--bind", folder, folder)
        mount("-o", "remount,bind,ro", folder)
        code = main(["move", job.file, "a", "--json"])
        captured = capsys.readouterr()
        report = json.loads(captured.out)
        assert (code, report["moved"], report["left"], report["kept"]) == (ExitCode.DONE, 3, 0, 3)
        assert "EROFS" in captured.err
        assert main(["verify", job.file, "--json"]) == ExitCode.DONE
    assert len(list(folder.glob("*/c.*"))) == 3
    capsys.readouterr()
    # Where the disk can be written again, the originals go.
    assert main(["move", job.file, "a"]) == ExitCode.DONE
    assert list(folder.glob("*/c.*")) == []


def test_a_source_that_does_not_say_whether_it_is_drained_still_is_drained_on(bench: MoveBench) -> None:
    mark = bench.info.folder("a") / DRAINING
    # The first looks of a thread are those that mark the root and begin the move.
    found = move_with(bench, "newfstatat,stat,statx:error=EIO:when=3+", "b", paths=[str(mark)])
    assert found == {"moved": 3, "damage": []}
    bench.in_order()


def test_a_root_that_cannot_be_marked_is_unusable(bench: MoveBench) -> None:
    mark = bench.info.folder("a") / DRAINING
    found = move_with(bench, "newfstatat,stat,statx:error=EIO", "b", paths=[str(mark)])
    assert found["error"] == "root_unusable"
    assert str(mark) in found["message"]
    bench.in_order()


def test_a_ledger_that_cannot_be_written_changes_nothing(bench: MoveBench) -> None:
    found = move_with(bench, "pwrite64:error=EIO", "b", paths=[f"{bench.ledger_path}-wal"])
    assert found["error"] == "ledger_failed"
    assert bench.homes_now() == {index: "abc"[index % 3] for index in range(9)}
    bench.nothing_lost()
    bench.move("a")
    bench.in_order()


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("name", ["INT", "TERM"])
def test_a_signal_ends_a_move_in_good_order(tmp_path: Path, name: str) -> None:
    """It comes as the root is marked, before the first sample is looked at."""
    job = leave_job(tmp_path)
    write_job(tmp_path, {"roots": [{"name": name, "path": f"root-{name}", "reserve": "0B"} for name in "ab"]})
    mark = job.shard(0).with_name("hsx-draining")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(mark), "-e", f"inject=openat:signal={name}"]
    done = subprocess.run([*command, sys.executable, "-m", "hsx", "move", job.file, "a"], check=False, capture_output=True)
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr.decode()
    assert b"[interrupted] stopped with 3 samples left on root a; the same command goes on" in done.stderr
    assert main(["move", job.file, "a"]) == ExitCode.DONE
    assert main(["verify", job.file]) == ExitCode.DONE


def test_a_disk_that_is_full_to_the_last_block_can_be_marked(full_disk: Path) -> None:
    begin_draining(full_disk, "a")
    assert is_draining(full_disk)
