"""`hsx verify` that goes on and looks at what is new, and `hsx seal`, on a job that has been run."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.commands.reading_view import PLAIN_S, ReadingView, line
from hsx.commands.since import since
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, MOVE_LOCK, locked, store_lock
from hsx.stores.group import open_store
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME, connect
from hsx.testing.idle_server import record_of
from hsx.testing.left_job import LeftJob, leave_job
from hsx.testing.stores import EPOCH
from hsx.verify import Reading, verify
from hsx.verify.state import FILE_NAME as STATE
from hsx.verify.state import MARGIN_S, VerifyState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def left(tmp_path: Path) -> LeftJob:
    """Samples 0 to 2 are committed, 3 is quarantined, 4 is pending."""
    return leave_job(tmp_path)


@pytest.fixture
def done(left: LeftJob) -> LeftJob:
    """The same job at its end: sample 4 is quarantined as well, and a canary stands behind the rest."""
    asyncio.run(_finish(left))
    return left


async def _finish(left: LeftJob) -> None:
    ledger = SqliteLedger(left.loaded.state_dir / FILE_NAME)
    for lease in await ledger.acquire(1):
        marker = Marker(ledger.run, lease.sample.index, lease.attempt, lease.sample.tokens)
        await ledger.fail(lease, marker, EPOCH, "finite", "a NaN", quarantine=True)
    await ledger.epoch_began(record_of(1, EPOCH))
    await ledger.vouch(EPOCH, 100)
    await ledger.close()


def damage(left: LeftJob, index: int) -> None:
    content = bytearray(left.shard(index).read_bytes())
    content[5] ^= 1
    left.shard(index).write_bytes(content)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What a command prints with --json, whatever its exit code."""
    capsys.readouterr()
    main([*arguments, "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) != ExitCode.DONE
    return capsys.readouterr().err


def test_only_what_was_committed_since_the_last_sound_one(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert "[usage] --since last: no verification" in error(capsys, "verify", left.file, "--since", "last")
    with closing(connect(left.loaded.state_dir / FILE_NAME)) as db:
        # Two are from before; the other may have been on its way when the verification began.
        db.execute("UPDATE samples SET committed_at = committed_at - ? WHERE idx < 2", (2 * MARGIN_S,))
    assert report(capsys, "verify", left.file)["committed"] == 3
    assert report(capsys, "verify", left.file, "--since", "last")["committed"] == 1
    assert report(capsys, "verify", left.file, "--since", "1h")["committed"] == 3
    damage(left, 1)
    assert report(capsys, "verify", left.file, "--since", "1h")["damaged"] == 1
    before = json.loads((left.loaded.state_dir / STATE).read_text())["sound_until"]
    assert report(capsys, "verify", left.file)["damaged"] == 1
    assert json.loads((left.loaded.state_dir / STATE).read_text())["sound_until"] == before


class Cut(Exception):  # noqa: N818 - what a kill would be
    """Ends a verification."""


def test_one_that_was_cut_short_goes_on(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    def watch(reading: Reading) -> None:
        if reading.samples == 2:
            raise Cut

    path, info = left.loaded.state_dir / STATE, open_store(left.loaded.store)
    with (
        pytest.raises(Cut),
        LedgerReader(left.loaded.state_dir / FILE_NAME) as reader,
        VerifyState(path, info, resume=False) as state,
    ):
        verify(info.path, reader, state=state, watch=watch, threads=1)
    found = report(capsys, "verify", left.file, "--resume")
    assert (found["ok"], found["committed"], found["resumed"], found["read"]) == (True, 3, 2, 1)
    assert main(["verify", left.file, "--resume"]) == ExitCode.DONE
    assert "read       3 shards" in capsys.readouterr().out


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("arguments", "hint"), [((), True), (("--fraction", "0.9999"), False)])
def test_ctrl_c_says_how_to_go_on(
    left: LeftJob, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], hint: bool
) -> None:
    """It comes as the first shard is opened."""
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(left.shard(0)), "-e", "inject=openat:signal=INT:when=1"]
    command = [*inject, sys.executable, "-m", "hsx", "verify", left.file, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == ExitCode.INTERRUPTED, done.stderr
    assert f"[interrupted] the verification of store {left.loaded.store} was stopped" in done.stderr
    assert ("the same command with --resume goes on" in done.stderr) == hint
    found = report(capsys, "verify", left.file, "--resume")
    assert (found["ok"], found["committed"], found["resumed"] + found["read"]) == (True, 3, 3)


@pytest.mark.usefixtures("strace")
def test_ctrl_c_again_and_again_crashes_nothing(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    """It comes whenever the first shard is opened: also while the readers are being waited for."""
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(left.shard(0)), "-e", "inject=openat:signal=INT"]
    done = subprocess.run([*inject, sys.executable, "-m", "hsx", "verify", left.file], check=False, capture_output=True)
    assert done.returncode in (ExitCode.INTERRUPTED, -signal.SIGINT), done.stderr.decode()
    assert report(capsys, "verify", left.file, "--resume")["ok"]


def test_a_store_is_verified_again_from_beside_it(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(left.loaded.store)
    assert report(capsys, "verify", "--store", store, "--resume", "--cold", "--threads", "1")["read"] == 3
    assert left.loaded.store.with_name(f".{left.loaded.store.name}.{STATE}").exists()


@pytest.mark.parametrize("content", [None, b"not a ledger"])
def test_a_seal_is_taken_away_so_that_a_lost_ledger_can_be_built_again(
    done: LeftJob, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    assert main(["seal", done.file]) == ExitCode.DONE
    path = done.loaded.state_dir / FILE_NAME
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert "[ledger_failed]" in error(capsys, "seal", done.file)
    assert "[store_sealed]" in error(capsys, "repair", done.file, "--rebuild-ledger")
    assert main(["seal", done.file, "--undo"]) == ExitCode.DONE
    assert report(capsys, "repair", done.file, "--rebuild-ledger")["committed"] == 3


def test_a_share_is_read_beside_a_whole_one(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(left.loaded.state_dir / f"{STATE}.lock", "the verification"):
        assert "[job_locked] the verification of store" in error(capsys, "verify", left.file)
        assert report(capsys, "verify", left.file, "--fraction", "0.5")["ok"] is True


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--resume", "--fraction", "0.5"], "--resume goes on with a verification of all samples"),
        (["--since", "yesterday"], "--since is 'yesterday'; expected a span such as 90m"),
    ],
)
def test_arguments_that_make_no_sense(
    left: LeftJob, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert f"hsx: error [usage] {words}" in error(capsys, "verify", left.file, *arguments)


def test_without_a_ledger_nothing_says_when(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert "[usage] --since needs the ledger" in error(capsys, "verify", "--store", str(left.loaded.store), "--since", "1h")


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("90s", 910.0),
        ("1.5m", 910.0),
        ("0h", 1000.0),
        ("1970-01-01T00:10:00Z", 600.0),
        ("1970-01-01T01:10:00+01:00", 600.0),
        ("last", 5.0),
    ],
)
def test_moments(text: str, moment: float) -> None:
    assert since(text, 1000.0, 5.0) == moment


def test_a_date_is_local() -> None:
    assert since("2026-11-30", 0.0, None) == time.mktime((2026, 11, 30, 0, 0, 0, 0, 0, -1))


@pytest.mark.parametrize("text", ["", "3", "3y", "-3d", "2026-13-01", "Last"])
def test_what_is_no_moment(text: str) -> None:
    with pytest.raises(RunError, match="--since is") as refused:
        since(text, 0.0, None)
    assert refused.value.kind == "usage"


def test_the_reading_is_shown_now_and_then() -> None:
    times = iter([0.0, 1.0, PLAIN_S, PLAIN_S + 1])
    stream = io.StringIO()
    view = ReadingView(stream, lambda: next(times))
    reading = Reading(10, 40, 1_000_000_000, 4_000_000_000, 2, 2.0)
    for _ in range(3):
        view(reading)
    assert stream.getvalue() == "shards 10/40, 1 GB of 4 GB, 500 MB/s, damages 2, left 6 s\n"
    assert line(Reading(0, 1, 0, 10, 0, 0.0)) == "shards 0/1, 0 bytes of 10 bytes, 0 bytes/s"


# --- seal


def test_a_finished_job_is_sealed_and_verified_without_its_ledger(done: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    sealed = report(capsys, "seal", done.file)
    assert (sealed["sealed"], sealed["committed"], sealed["left_out"], sealed["verified"]) == (True, 3, 2, True)
    assert report(capsys, "seal", done.file)["at"] == sealed["at"]
    alone = report(capsys, "verify", "--store", str(done.loaded.store))
    assert (alone["ok"], alone["sealed"], alone["committed"], alone["read"]) == (True, True, 3, 3)
    assert report(capsys, "verify", done.file)["ok"] is True
    assert main(["seal", done.file]) == ExitCode.DONE
    assert "is sealed since" in capsys.readouterr().out
    assert main(["verify", done.file]) == ExitCode.DONE
    assert "sealed" in capsys.readouterr().out


def test_a_sealed_store_is_verified_wherever_its_roots_are(
    done: LeftJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["seal", done.file]) == ExitCode.DONE
    done.loaded.roots[0].path.rename(tmp_path / "elsewhere")
    store = str(done.loaded.store)
    lost = {damage["kind"] for damage in report(capsys, "verify", "--store", store)["damage"]}
    assert lost == {"root", "missing", "manifest"}
    found = report(capsys, "verify", "--store", store, "--root", f"a={tmp_path / 'elsewhere'}")
    assert (found["ok"], found["read"]) == (True, 3)
    assert report(capsys, "verify", done.file, "--root", f"a={tmp_path / 'elsewhere'}")["ok"] is True
    assert "[root_unusable] root 'b' is given" in error(capsys, "verify", "--store", store, "--root", f"b={tmp_path}")
    with pytest.raises(SystemExit):
        main(["verify", "--store", store, "--root", "elsewhere"])


@pytest.mark.parametrize("arguments", [["run"], ["quarantine", "requeue", "--all"]])
def test_a_sealed_job_is_refused(done: LeftJob, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["seal", done.file]) == ExitCode.DONE
    assert main([*arguments, done.file]) == ExitCode.REFUSED
    assert "hsx: error [store_sealed] store " in capsys.readouterr().err
    assert main(["seal", done.file, "--undo"]) == ExitCode.DONE
    assert "is not sealed" in capsys.readouterr().out
    assert main(["quarantine", "requeue", "--all", done.file]) == ExitCode.DONE


def test_what_is_not_finished_is_sealed_only_when_told_so(left: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["seal", left.file]) == ExitCode.INCOMPLETE
    assert f"[incomplete] no canary stands behind the last samples of epochs {EPOCH}" in capsys.readouterr().err
    asyncio.run(_vouch(left))
    assert main(["seal", left.file]) == ExitCode.INCOMPLETE
    assert "[incomplete] 1 of 5 samples are pending" in capsys.readouterr().err
    assert open_store(left.loaded.store).sealed is None
    sealed = report(capsys, "seal", left.file, "--partial", "--no-verify")
    assert (sealed["sealed"], sealed["committed"], sealed["left_out"], sealed["verified"]) == (True, 3, 2, False)


async def _vouch(left: LeftJob) -> None:
    ledger = SqliteLedger(left.loaded.state_dir / FILE_NAME)
    await ledger.epoch_began(record_of(1, EPOCH))
    await ledger.vouch(EPOCH, 100)
    await ledger.close()


def test_a_damaged_store_is_not_sealed(done: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    damage(done, 1)
    assert main(["seal", done.file]) == ExitCode.DAMAGED
    printed = capsys.readouterr()
    assert "[store_damaged] store" in printed.err
    assert "result     1 damage" in printed.out
    assert report(capsys, "seal", done.file)["damage"]["damaged"] == 1
    assert open_store(done.loaded.store).sealed is None


@pytest.mark.parametrize(
    "lock",
    [
        lambda left: left.loaded.state_dir / JOB_LOCK,
        lambda left: left.loaded.state_dir / MOVE_LOCK,
        lambda left: store_lock(left.loaded.store),
    ],
)
def test_a_store_that_somebody_changes_is_not_sealed(
    done: LeftJob, capsys: pytest.CaptureFixture[str], lock: Callable[[LeftJob], Path]
) -> None:
    with locked(lock(done), "it"):
        assert main(["seal", done.file]) == ExitCode.LOCKED
    assert "[job_locked]" in capsys.readouterr().err


def test_a_job_without_a_ledger_is_not_sealed(done: LeftJob, capsys: pytest.CaptureFixture[str]) -> None:
    (done.loaded.state_dir / FILE_NAME).unlink()
    assert main(["seal", done.file]) == ExitCode.RUN_ERROR
    assert "[ledger_failed]" in capsys.readouterr().err
