"""`hsx invariants`: the tables by themselves, for a job file, and for a job that has been run."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

from hsx.cli import main
from hsx.commands.invariants import FOR_EPOCH, FOR_SAMPLE, JUDGED_BY, keys_of
from hsx.config_schema import keys
from hsx.core.epoch import EpochRecord
from hsx.core.invariants import INVARIANTS
from hsx.core.policy import POLICY
from hsx.errors import KINDS
from hsx.exit_codes import ExitCode
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.jobs import write_job
from hsx.testing.left_job import leave_job
from hsx.testing.stores import EPOCH

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

RECORD = EpochRecord(EPOCH, "boot", 1, 2, "", ("sglang",), "m", "", (1,), "post_norm", "sglang", "0.5.23", "0.1.0", "h", 1)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["invariants", *arguments, "--json"]) == ExitCode.DONE
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


async def _trouble(ledger: SqliteLedger) -> None:
    await ledger.epoch_began(RECORD)
    await ledger.violation(EPOCH, None, "fingerprint", "other states")
    await ledger.vouch(EPOCH, 1)
    await ledger.revoke(EPOCH, "fingerprint", "other states")
    await ledger.epoch_ended(EPOCH, "fingerprint", "other states", requeued=[4])
    await ledger.close()


def test_every_invariant_is_listed_with_what_follows(capsys: pytest.CaptureFixture[str]) -> None:
    document = listed(capsys)
    rows = {row["name"]: row for row in document["invariants"]}
    assert list(rows) == list(INVARIANTS)
    for name, row in rows.items():
        assert (row["group"], row["proves"]) == (INVARIANTS[name].group, INVARIANTS[name].proves)
        assert (row["sample"], row["epoch"], row["because"]) == (
            POLICY[name].sample,
            POLICY[name].epoch,
            POLICY[name].because,
        )
        assert row["fired"] is None
    assert rows["published"]["thresholds"] == {
        "pipeline.dump_deadline_s": 30.0,
        "pipeline.retries": 2,
        "watchdog.violations": 8,
        "watchdog.violation_window_s": 60.0,
    }
    assert {row["kind"] for row in document["error_kinds"]} == set(POLICY) - set(INVARIANTS)
    assert {row["kind"] for row in document["error_kinds"]} <= set(KINDS)
    assert (document["job"], document["restarts"], document["revocations"]) == (None, None, None)


def test_every_threshold_is_a_key_of_the_job_file() -> None:
    assert {key for name in POLICY for key in keys_of(name)} <= set(keys())
    assert set(JUDGED_BY) <= set(POLICY)
    assert {rule.sample for rule in POLICY.values()} <= set(FOR_SAMPLE)
    assert {rule.epoch for rule in POLICY.values()} <= set(FOR_EPOCH)


def test_every_threshold_of_the_watchdog_bears_on_something() -> None:
    backoff = {"watchdog.backoff_first_s", "watchdog.backoff_longest_s"}
    named = {key for name in POLICY for key in keys_of(name)}
    assert {key for key in keys() if key.startswith("watchdog.")} - backoff <= named


def test_a_job_file_puts_its_values_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = str(write_job(tmp_path, {"watchdog": {"violations": 3, "grace_s": 7.5}}))
    document = listed(capsys, job)
    assert document["job"] == "tiny"
    assert document["thresholds"]["watchdog.violations"] == 3
    (row,) = [row for row in document["invariants"] if row["name"] == "advancing"]
    assert (row["thresholds"]["watchdog.grace_s"], row["fired"]) == (7.5, None)
    assert main(["invariants", job]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert "3 within 60 s void the epoch" in text
    assert "watchdog.grace_s = 7.5" in text


def test_a_job_that_was_run_tells_how_often_each_fired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = leave_job(tmp_path)
    asyncio.run(_trouble(SqliteLedger(left.loaded.state_dir / FILE_NAME)))
    document = listed(capsys, left.file)
    fired = {row["name"]: row["fired"] for row in document["invariants"]}
    assert fired == {**dict.fromkeys(INVARIANTS, 0), "fingerprint": 1}
    assert {row["fired"] for row in document["error_kinds"]} == {0}
    (restart,) = document["restarts"]
    assert (restart["reason"], restart["requeued"], restart["vouched"]) == ("fingerprint", [4], 1)
    (revocation,) = document["revocations"]
    assert (revocation["invariant"], revocation["samples"]) == ("fingerprint", [1, 2])


def test_the_tables_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left = leave_job(tmp_path)
    asyncio.run(_trouble(SqliteLedger(left.loaded.state_dir / FILE_NAME)))
    assert main(["invariants", left.file]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    cells = [" ".join(line.split()) for line in lines]
    assert "fingerprint canary - void at once 1 watchdog.canary_every = 500, watchdog.canary_tolerance = 0.05" in cells
    assert "expected counter retry, then quarantine counted in the window 0 exact" in cells
    (ended,) = [cell for cell in cells if cell.endswith("fingerprint 1 other states")]
    assert ended.startswith("20")
    (revoked,) = [cell for cell in cells if cell.endswith("fingerprint 2 other states")]
    assert revoked.startswith("20")


def test_a_job_file_that_is_wrong_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invariants", str(tmp_path / "none.toml")]) == ExitCode.REFUSED
    assert "[config_unreadable]" in capsys.readouterr().err
