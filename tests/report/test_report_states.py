"""A page can be made of a job in every state it may be in, and says so; nothing of it disturbs a run."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, holder_pid, locked
from hsx.prepare import prepare
from hsx.stores.ledger_summary import STEPS, slice_seconds
from hsx.testing.jobs import write_job
from hsx.testing.kept_job import KeptJob, keep_job
from hsx.testing.left_job import leave_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.config_load import LoadedConfig


def sentences(document: dict[str, Any]) -> list[str]:
    """The findings, with their levels."""
    return [f"{found['level']}: {found['text']}" for found in document["findings"]]


@pytest.fixture
def job(tmp_path: Path) -> KeptJob:
    kept = keep_job(tmp_path)
    kept.extract()
    return kept


def open_job(loaded: LoadedConfig) -> None:
    prepare(loaded, lambda _rows, _tokens: None)


def test_an_empty_store_has_a_page(tmp_path: Path, report: Callable[..., Any]) -> None:
    kept = keep_job(tmp_path)
    open_job(kept.loaded)
    page = report(kept.file)
    found = page.document()
    assert (found["state"], found["timeline"], found["states"]["read"], found["states"]["layers"]) == ("empty", None, 0, [])
    assert found["lengths"]["bins"]["pending"] == [1] * 12
    assert "warn: Nothing is committed yet, of 12 samples." in sentences(found)
    assert page.values()["committed"] == "0"


def test_a_job_that_was_never_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert main(["report", str(job), "-o", str(tmp_path / "r.html")]) == ExitCode.REFUSED
    assert "hsx: error [not_run_yet]" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_page_is_made_beside_a_run_and_takes_no_lock(job: KeptJob, document: Callable[..., Any]) -> None:
    lock = job.loaded.state_dir / JOB_LOCK
    program = (
        "import sys, time; from pathlib import Path; from hsx.locks import locked\n"
        f"with locked(Path({str(lock)!r}), 'job'):\n    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"held\n"
        with closing(sqlite3.connect(job.ledger, isolation_level=None)) as writer:
            writer.execute("BEGIN IMMEDIATE")  # what a run does at each commit
            writer.execute("UPDATE samples SET state = 'pending' WHERE idx = 3")
            found = document(job.file)
            writer.execute("COMMIT")
        assert run.pid == holder_pid(lock)
        run.communicate()
    assert found["state"] == "running"
    assert found["progress"]["committed"] == 12
    assert holder_pid(lock) == 0
    with locked(lock, "job"):  # and none is left
        assert document(job.file)["progress"]["committed"] == 11


def test_a_job_whose_last_server_failed_says_so(tmp_path: Path, document: Callable[..., Any]) -> None:
    left = leave_job(tmp_path)
    with closing(sqlite3.connect(left.loaded.state_dir / "ledger.sqlite")) as db:
        db.execute("INSERT INTO epochs (epoch, began, ended, reason, evidence, record) VALUES ('e', 1, 2, 'alive', 'x', '{}')")
        db.commit()
    assert "bad: The last server was voided (alive), and no other one came after it." in sentences(document(left.file))


def test_a_sealed_store_has_a_page(job: KeptJob, document: Callable[..., Any]) -> None:
    assert main(["seal", str(job.file), "--partial"]) == ExitCode.DONE
    found = document(job.file)
    assert (found["state"], found["states"]["read"]) == ("sealed", 12)
    assert found["job"]["store"]["sealed"]


def test_a_root_that_is_not_there_is_named(job: KeptJob, document: Callable[..., Any]) -> None:
    (job.file.parent / "root-b").rename(job.file.parent / "away")
    found = document(job.file)
    assert {root["name"]: root["there"] for root in found["roots"]} == {"a": True, "b": False}
    assert "bad: Root b is not there: 6 samples cannot be read until it is mounted again." in sentences(found)
    states = found["states"]
    assert sorted(states["drawn"]) == [0, 2, 4, 6, 8, 10]
    assert {one["kind"] for one in states["unreadable"]} == {"root_unusable"}


def test_a_damaged_shard_is_named_and_in_no_number(job: KeptJob, document: Callable[..., Any]) -> None:
    shard = job.shard(11)
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    found = document(job.file)
    states = found["states"]
    assert sorted(states["drawn"]) == list(range(11))
    assert [(one["index"], one["kind"]) for one in states["unreadable"]] == [(11, "store_invalid")]
    assert "bad: 1 of the samples that were drawn could not be read: hsx verify reads all of them." in sentences(found)


def test_without_ledger_or_without_store_the_rest_is_shown(job: KeptJob, document: Callable[..., Any]) -> None:
    aside = job.file.parent / "aside"
    for beside in job.ledger.parent.glob("ledger.sqlite*"):
        beside.rename(aside.with_name(f"aside{beside.name}"))
    found = document(job.file)
    assert (found["state"], found["progress"], found["states"]["read"]) == ("no ledger", None, 12)
    assert found["lengths"]["bins"]["committed"] == [1] * 12
    aside.with_name("asideledger.sqlite").rename(job.ledger)
    shutil.move(job.loaded.store, aside)
    found = document(job.file)
    assert (found["progress"]["committed"], found["states"]) == (12, None)
    assert any(text.startswith("bad: The store cannot be read: store_invalid") for text in sentences(found))


HOSTILE = ("</script><script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "<!--", "&lt;b&gt; \u202e\x1b[31m", "]]>'")


def test_what_others_wrote_can_only_be_text(tmp_path: Path, report: Callable[..., Any]) -> None:
    kept = keep_job(tmp_path)
    rows = [{"id": f"{HOSTILE[i % 5]}{i}", "input_ids": list(range(1, i + 2))} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    kept.extract(only=set(range(6)))
    with closing(sqlite3.connect(kept.ledger)) as db:
        for index in range(6, 12):
            text = HOSTILE[index % 5]
            db.execute("UPDATE samples SET state = 'quarantined', reason = ?, evidence = ? WHERE idx = ?", (text, text, index))
        db.execute("INSERT INTO violations (at, epoch, invariant, evidence) VALUES (1, 'e', ?, ?)", (HOSTILE[0], HOSTILE[1]))
        db.execute(
            "INSERT INTO epochs (epoch, began, ended, reason, evidence, record) VALUES (?, 1, 2, ?, ?, '{}')", HOSTILE[:3]
        )
        db.commit()
    page = report(kept.file)
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1
    assert tags.count("img") == 0
    assert [a for _, attributes in page.elements for a in attributes if a.startswith("on")] == []
    quarantine = page.document()["quarantine"]
    assert [row["id"] for row in quarantine["first"]] == [row["id"] for row in rows[6:]]
    assert all(row["evidence"] in HOSTILE for row in quarantine["first"])
    assert HOSTILE[0] in page.text
    assert "\\u202e\\x1b[31m" in page.text


def test_without_matplotlib_it_says_what_to_install(job: KeptJob) -> None:
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"  # what a package that is not there looks like to importlib
        f"from hsx.cli import main; sys.exit(main(['report', {str(job.file)!r}]))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=job.file.parent)
    assert run.returncode == ExitCode.REFUSED
    assert run.stderr.startswith("hsx: error [dependency_missing] hsx report draws with matplotlib, which is not installed")
    assert "hsx[report]" in run.stderr


def test_the_page_is_there_whole_or_not_at_all(job: KeptJob, capsys: pytest.CaptureFixture[str]) -> None:
    folder = job.file.parent
    os.mkfifo(folder / "pipe")  # as a device, but one that anybody can make
    unfit = {folder / "none" / "r.html": "to be a folder", folder: "it is a folder", folder / "pipe": "it is a device"}
    unfit[folder / ("x" * 300)] = "File name too long"
    for output, problem in unfit.items():
        assert main(["report", str(job.file), "-o", str(output)]) == ExitCode.RUN_ERROR
        error = capsys.readouterr().err
        assert f"hsx: error [report_unwritable] report {output} cannot be written" in error
        assert problem in error
    assert (folder / "pipe").is_fifo()
    output = folder / "r.html"
    output.write_text("an older one")
    assert main(["report", str(job.file), "-o", str(output), "--samples", "3", "--seed", "5"]) == ExitCode.DONE
    assert capsys.readouterr().out == f"report     {output}\n"
    written = output.read_text(encoding="utf-8")
    assert written.startswith("<!doctype html>")
    assert written.endswith("</html>\n")
    assert list(folder.glob(".r.html*")) == []


@pytest.mark.parametrize("given", ["0", "4097", "-1"])
def test_samples_has_its_bounds(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "job.toml", f"--samples={given}"])
    assert f"is {given}; expected 1 to 4096" in capsys.readouterr().err


@pytest.mark.parametrize(("samples", "most"), [(1, 24), (400, 50), (10**6, 240)])
@pytest.mark.parametrize("span", [0.0, 1.0, 3601.0, 86400.0 * 7, 86400.0 * 400])
def test_slices_are_few_and_round(span: float, samples: int, most: int) -> None:
    step = slice_seconds(span, samples)
    assert span / step <= most
    assert step in STEPS or step % 86400 == 0


MILLION = """
WITH RECURSIVE numbers (idx) AS (SELECT 0 UNION ALL SELECT idx + 1 FROM numbers WHERE idx < 999999)
INSERT INTO samples (idx, tokens, state, attempts, marker, epoch, sequence, root, nbytes, crc32c,
    committed_at)
SELECT idx, 1 + idx * 7919 % 8192, 'committed', 1, 'hsx1-00000000-' || idx, 'e' || (idx / 250000), idx, 'r' || (idx % 4), 4096,
    0, 1e9 + idx FROM numbers;
UPDATE totals SET samples = 1000000, tokens = (SELECT sum(tokens) FROM samples), nbytes = 4096000000 WHERE state = 'committed';
UPDATE totals SET samples = 0, tokens = 0 WHERE state = 'pending';
INSERT INTO epochs (epoch, began, record, vouched) SELECT 'e' || value, 1e9, '{}', 900000 FROM json_each('[0, 1, 2, 3]');
"""


@pytest.mark.slow
def test_a_million_samples_are_added_up_in_bounded_memory(tmp_path: Path) -> None:
    kept = keep_job(tmp_path)
    open_job(kept.loaded)
    with closing(sqlite3.connect(kept.ledger)) as db:
        db.executescript(f"PRAGMA synchronous = OFF; DELETE FROM samples; {MILLION}")
    program = textwrap.dedent(
        f"""
        import json, resource
        from hsx.config_load import load
        from hsx.report.gather import gather
        from hsx.report import page
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = gather(load({str(kept.file)!r}), 8, 0).document
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(json.dumps([grown, found["progress"]["total"], found["lengths"]["samples"], found["roots"], found["timeline"],
            found["canaries"]["unvouched"]]))
        """
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    grown, total, counted, roots, timeline, unvouched = json.loads(run.stdout)
    assert total == counted == 1_000_000
    assert unvouched == 1_000_000 - 900_001
    assert {root["name"]: root["samples"] for root in roots if root["samples"]} == dict.fromkeys(
        ("r0", "r1", "r2", "r3"), 250_000
    )
    assert sum(entry["samples"] for entry in timeline["slices"]) == 1_000_000
    assert len(timeline["slices"]) <= 241
    assert grown < 64 << 10, "KiB"  # a million rows held would be a hundred MiB and more
