"""Commands on a job that has been run: plan, show, verify, quarantine; as text and as JSON."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.commands.output import Ticker, emit, emit_json
from hsx.config_load import load
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, locked
from hsx.prepare import prepare
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.jobs import write_job
from hsx.testing.left_job import LeftJob, leave_job
from hsx.testing.stores import EPOCH

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def left(tmp_path: Path) -> LeftJob:
    return leave_job(tmp_path)


class Screen:
    """What a command printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def text(self) -> str:
        return self._capsys.readouterr().out

    def json(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.text())
        return document

    def error(self) -> str:
        return self._capsys.readouterr().err


@pytest.fixture
def screen(capsys: pytest.CaptureFixture[str]) -> Screen:
    return Screen(capsys)


def test_plan_of_a_job_that_has_not_begun(tmp_path: Path, screen: Screen) -> None:
    job = write_job(tmp_path)
    assert main(["plan", str(job), "--json", "--rate", "5"]) == ExitCode.DONE
    document = screen.json()
    assert (document["samples"], document["tokens"], document["longest"]) == (5, 15, 5)
    assert document["bytes_per_token"] == 3 * 64 * 2
    assert document["payload_bytes"] == 15 * 384
    assert (document["hours"], document["rate_source"], document["fits"]) == (15 / 5 / 3600, "given", True)
    assert not (tmp_path / "store.zarr").exists()
    assert main(["plan", str(job)]) == ExitCode.DONE
    text = screen.text()
    assert "samples    5, the longest 5 tokens" in text
    assert "time       unknown: give --rate" in text
    assert text.endswith("it fits\n")


def test_plan_of_a_job_that_was_begun_tells_what_is_left(left: LeftJob, screen: Screen) -> None:
    assert main(["plan", left.file, "--json"]) == ExitCode.DONE
    document = screen.json()
    assert (document["samples"], document["tokens"], document["committed"]) == (1, 5, 3)
    assert main(["plan", left.file]) == ExitCode.DONE
    assert "committed  3 samples; what follows is what is left" in screen.text()


def test_plan_of_a_job_that_does_not_fit(tmp_path: Path, screen: Screen) -> None:
    disk = "900TiB"
    job = write_job(tmp_path, {"roots": [{"name": "a", "path": "root-a", "reserve": disk}]})
    assert main(["plan", str(job)]) == ExitCode.REFUSED
    assert "roots[0].reserve" in screen.error()


def test_plan_lists_bad_rows(tmp_path: Path, screen: Screen) -> None:
    job = write_job(tmp_path)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write('{"id": "x"}\nnot json\n' + '{"id": "y", "input_ids": [900]}\n' * 30)
    assert main(["plan", str(job)]) == ExitCode.REFUSED
    error = screen.error()
    assert error.startswith(f"hsx: error [dataset_rejected] {tmp_path}/rows.jsonl has 32 bad rows; on_bad_row = 'skip'")
    assert "line 6, id 'x': missing_field" in error
    assert "line 7: not_json" in error
    assert "... and 12 more" in error
    assert main(["plan", str(write_skipping(tmp_path)), "--json"]) == ExitCode.DONE


def write_skipping(folder: Path) -> Path:
    rows = (folder / "rows.jsonl").read_text(encoding="utf-8")
    job = write_job(folder, {"dataset": {"on_bad_row": "skip"}})
    (folder / "rows.jsonl").write_text(rows, encoding="utf-8")
    return job


def test_plan_counts_rows_that_are_skipped(tmp_path: Path, screen: Screen) -> None:
    write_job(tmp_path)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write("nonsense\n")
    assert main(["plan", str(write_skipping(tmp_path))]) == ExitCode.DONE
    assert "; 1 bad row is left out" in screen.text()


def test_plan_of_a_dataset_without_rows(tmp_path: Path, screen: Screen) -> None:
    job = write_job(tmp_path, {"dataset": {"format": "tokens"}})
    (tmp_path / "rows.jsonl").write_text("", encoding="utf-8")
    assert main(["plan", str(job)]) == ExitCode.REFUSED
    assert "hsx: error [dataset_empty]" in screen.error()


def test_show_a_sample_by_index_and_by_id(left: LeftJob, screen: Screen) -> None:
    assert main(["show", left.file, "row-1", "--json"]) == ExitCode.DONE
    document = screen.json()
    assert (document["index"], document["tokens"], document["first_ids"], document["root"]) == (1, 2, [1, 2], "a")
    assert [state["name"] for state in document["states"]] == ["h_1", "h_3", "post_norm"]
    assert main(["show", left.file, "1"]) == ExitCode.DONE
    text = screen.text()
    assert f"crc32c {document['crc32c']:08x}" in text
    assert document["marker"] in text
    assert "post_norm" in text


def test_show_says_which_sample_was_meant(tmp_path: Path, screen: Screen) -> None:
    """Ids that are numbers, and not those of the rows: a dataset that was shuffled has them."""
    job = write_job(tmp_path)
    lines = [{"id": name, "input_ids": [1] * (place + 1)} for place, name in enumerate([2, 1, 0, "9" * 900])]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    prepare(load(job), lambda *_: None)

    def shown(*options: str) -> str:
        assert main(["show", str(job), *options]) == ExitCode.DONE
        return screen.text()

    doubted = shown("0")
    assert doubted.startswith(
        "note      0 is taken as an id, and is an index, too: --index shows that sample\nsample    2 (0)\n"
    )
    assert shown("0", "--id").startswith("sample    2 (0)\n")
    assert shown("0", "--index").startswith("sample    0 (2)\n")
    assert shown("1").startswith("sample    1 (1)\n")  # both are one sample
    assert shown("3").startswith("sample    3 (9999")  # an index alone
    assert shown("9" * 900).startswith("sample    3 (9999")
    assert json.loads(shown("0", "--json"))["index_passed_over"] == 0
    assert json.loads(shown("1", "--json"))["index_passed_over"] is None
    for wrong, kind in ((("3", "--id"), "sample_unknown"), (("x", "--index"), "usage"), (("4", "--index"), "sample_unknown")):
        assert main(["show", str(job), *wrong]) == ExitCode.REFUSED
        assert screen.error().startswith(f"hsx: error [{kind}] ")
    assert main(["show", str(job), "8" * 5000]) == ExitCode.REFUSED
    assert screen.error().startswith("hsx: error [sample_unknown] ")


def test_no_terminal_obeys_an_id(left: LeftJob, screen: Screen) -> None:
    assert main(["show", left.file, "x\x1b[31m\u202e"]) == ExitCode.REFUSED
    assert screen.error() == "hsx: error [sample_unknown] no sample has the id 'x\\x1b[31m\\u202e'\n"
    emit("a\x1b]0;title\x07\x9b31m\u202e\té\nb")
    assert screen.text() == r"a\x1b]0;title\x07\x9b31m\u202e" + "\té\nb\n"
    emit_json({"id": "a\x9b\x1b"})
    assert screen.json() == {"id": "a\x9b\x1b"}


def test_show_a_sample_that_is_not_committed(left: LeftJob, screen: Screen) -> None:
    assert main(["show", left.file, "4"]) == ExitCode.DONE
    assert screen.text().endswith("state     not committed\nledger    pending after 1 attempt\n")
    assert main(["show", left.file, "3"]) == ExitCode.DONE
    assert "ledger    quarantined after 1 attempt; the last failure: finite: 4 values are NaN" in screen.text()
    assert main(["show", left.file, "3", "--json"]) == ExitCode.DONE
    document = screen.json()
    assert (document["state"], document["reason"], document["revocations"]) == ("quarantined", "finite", [])


def test_show_a_sample_that_was_revoked(left: LeftJob, screen: Screen) -> None:
    async def revoke() -> None:
        ledger = SqliteLedger(left.loaded.state_dir / FILE_NAME)
        await ledger.revoke(EPOCH, "fingerprint", "other states")
        await ledger.close()

    asyncio.run(revoke())
    assert main(["show", left.file, "1"]) == ExitCode.DONE
    assert f"revoked   fingerprint: other states (epoch {EPOCH})\nledger    pending after 1 attempt\n" in screen.text()
    assert main(["show", left.file, "1", "--json"]) == ExitCode.DONE
    (revocation,) = screen.json()["revocations"]
    assert (revocation["invariant"], revocation["samples"]) == ("fingerprint", [0, 1, 2])


def test_show_an_unknown_sample(left: LeftJob, screen: Screen) -> None:
    assert main(["show", left.file, "nobody"]) == ExitCode.REFUSED
    assert screen.error().startswith("hsx: error [sample_unknown] ")


def test_verify_a_whole_store(left: LeftJob, screen: Screen) -> None:
    assert main(["verify", left.file, "--json"]) == ExitCode.DONE
    document = screen.json()
    assert (document["ok"], document["committed"], document["read"], document["tokens"]) == (True, 3, 3, 6)
    assert main(["verify", "--store", str(left.loaded.store)]) == ExitCode.DONE
    assert "result     whole" in screen.text()


def test_verify_a_damaged_store(left: LeftJob, screen: Screen) -> None:
    shard = left.shard(1)
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    left.shard(2).unlink()
    assert main(["verify", left.file]) == ExitCode.DAMAGED
    text = screen.text()
    assert "result     2 damages" in text
    assert "missing" in text
    assert main(["verify", left.file, "--json"]) == ExitCode.DAMAGED
    assert {damage["index"] for damage in screen.json()["damage"]} == {1, 2}
    assert main(["verify", "--store", str(left.loaded.store)]) == ExitCode.DAMAGED
    assert screen.error().startswith(f"hsx: error [store_damaged] store {left.loaded.store} has 2 damages")


def test_verify_with_another_jobs_ledger(left: LeftJob, screen: Screen) -> None:
    path = left.loaded.store / "zarr.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["attributes"]["hsx"]["run"] = "0000000f"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["verify", left.file]) == ExitCode.REFUSED
    assert "belongs to the ledger of run 0000000f" in screen.error()


def test_verify_without_a_ledger_or_a_store(tmp_path: Path, screen: Screen) -> None:
    job = str(write_job(tmp_path))
    (tmp_path / "store.zarr").mkdir()
    assert main(["verify", job]) == ExitCode.RUN_ERROR
    assert "expected the job's ledger, or use --store" in screen.error()
    assert main(["verify", "--store", str(tmp_path)]) == ExitCode.RUN_ERROR
    assert screen.error().startswith("hsx: error [store_invalid] ")


def test_quarantine_is_listed_with_its_reasons(left: LeftJob, screen: Screen) -> None:
    assert main(["quarantine", "list", left.file, "--json"]) == ExitCode.DONE
    (row,) = screen.json()["quarantined"]
    assert (row["index"], row["reason"], row["evidence"], row["attempts"]) == (3, "finite", "4 values are NaN", 1)
    assert main(["quarantine", "list", left.file, "--rejected"]) == ExitCode.DONE
    text = screen.text()
    assert "4 values are NaN" in text
    assert text.endswith("no row of the dataset was rejected\n")


def test_rejected_rows_are_counted_and_listed(tmp_path: Path, screen: Screen) -> None:
    write_job(tmp_path)
    with (tmp_path / "rows.jsonl").open("a", encoding="utf-8") as rows:
        rows.write("nonsense\n")
    job = str(write_skipping(tmp_path))
    prepare(load(job), lambda _rows, _tokens: None)
    assert main(["quarantine", "list", job]) == ExitCode.DONE
    assert screen.text() == (
        "no sample is quarantined\n\n1 row of the dataset was rejected and is no sample; --rejected lists them\n"
    )
    assert main(["quarantine", "list", job, "--rejected"]) == ExitCode.DONE
    assert "not_json" in screen.text()
    assert main(["quarantine", "list", job, "--rejected", "--json"]) == ExitCode.DONE
    document = screen.json()
    assert (document["quarantined"], document["rejected"]) == ([], 1)
    assert [(row["line"], row["reason"]) for row in document["rejected_rows"]] == [(6, "not_json")]


@pytest.mark.parametrize("choice", [["3"], ["--all"]])
def test_quarantined_samples_get_another_chance(left: LeftJob, screen: Screen, choice: list[str]) -> None:
    assert main(["quarantine", "requeue", left.file, *choice]) == ExitCode.DONE
    assert screen.text() == "1 sample is free again; the next `hsx run` tries it\n"
    assert main(["quarantine", "list", left.file]) == ExitCode.DONE
    assert screen.text() == "no sample is quarantined\n"
    assert main(["plan", left.file, "--json"]) == ExitCode.DONE
    assert screen.json()["samples"] == 2


def test_requeue_of_a_sample_that_is_not_quarantined_changes_nothing(left: LeftJob, screen: Screen) -> None:
    assert main(["quarantine", "requeue", left.file, "3", "0"]) == ExitCode.REFUSED
    assert screen.error().startswith("hsx: error [sample_unknown] sample 0 is not quarantined; see")
    assert main(["quarantine", "requeue", left.file, "1", "0"]) == ExitCode.REFUSED
    assert "samples 0, 1 are not quarantined; see" in screen.error()
    assert main(["quarantine", "list", left.file, "--json"]) == ExitCode.DONE
    assert len(screen.json()["quarantined"]) == 1


def test_requeue_waits_for_no_running_job(left: LeftJob, screen: Screen) -> None:
    with locked(left.loaded.state_dir / JOB_LOCK, "job"):
        assert main(["quarantine", "requeue", left.file, "--all"]) == ExitCode.LOCKED
    assert screen.error().startswith("hsx: error [job_locked] job tiny is held by ")


@pytest.mark.parametrize("command", [["verify"], ["quarantine", "list"], ["quarantine", "requeue"], ["show"]])
def test_a_job_that_never_ran(tmp_path: Path, screen: Screen, command: list[str]) -> None:
    job = str(write_job(tmp_path))
    assert main([*command, job, *(["0"] if command[-1] in ("requeue", "show") else [])]) == ExitCode.REFUSED
    words = f"hsx: error [not_run_yet] this job has not been run yet; start it with hsx run {job} "
    assert screen.error().startswith(words)


def test_verify_against_a_model_that_is_no_folder(left: LeftJob, screen: Screen) -> None:
    assert main(["verify", left.file, "--against-hf", "/nope"]) == ExitCode.REFUSED
    words = "hsx: error [model_unreadable] /nope does not exist; expected a local model folder with config.json\n"
    assert screen.error() == words
    assert main(["verify", left.file, "--against-hf", left.file]) == ExitCode.REFUSED
    assert "is not a folder; expected a local model folder" in screen.error()
    assert main(["verify", left.file, "--against-hf", str(left.loaded.state_dir)]) == ExitCode.REFUSED
    assert "has no config.json; expected a local model folder" in screen.error()


def test_plan_advises_ids_where_no_row_has_one(tmp_path: Path, screen: Screen) -> None:
    job = write_job(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1]}\n{"id": null, "input_ids": [2]}\n', encoding="utf-8")
    assert main(["plan", str(job)]) == ExitCode.REFUSED
    first = screen.error().splitlines()[0]
    assert "has 2 bad rows; no row has an 'id': name the field" in first
    assert "on_bad_row" not in first
    assert main(["plan", str(write_skipping(tmp_path))]) == ExitCode.REFUSED
    assert "expected at least one; no row has an 'id'" in screen.error()


def test_quarantine_of_a_store_without_its_ledger(tmp_path: Path, screen: Screen) -> None:
    job = str(write_job(tmp_path))
    (tmp_path / "store.zarr").mkdir()
    assert main(["quarantine", "list", job]) == ExitCode.RUN_ERROR
    assert "expected the ledger of a job that has been run" in screen.error()


def test_progress_is_said_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    """Off a terminal each is a line of its own; one that is not due is not even made."""
    Ticker(0).say(lambda: "samples 1/2")
    Ticker(3600).say(lambda: pytest.fail("was asked too early"))
    assert capsys.readouterr().err == "samples 1/2\n"


def test_a_job_file_that_was_changed_is_told_before_the_run(left: LeftJob, tmp_path: Path, screen: Screen) -> None:
    """Not only by the run itself, when everything else is up."""
    write_job(tmp_path, {"storage": {"chunk_tokens": 16}, "capture": {"layers": [0, 1]}})
    assert main(["plan", left.file]) == ExitCode.REFUSED
    said = screen.error()
    assert "[job_changed]" in said
    assert "storage.chunk_tokens: the job was started with '64', now it is '16'" in said
    assert "capture.layers: the job was started with" in said
    assert main(["check", left.file]) == ExitCode.REFUSED
    assert "error: storage.chunk_tokens: the job was started with '64', now it is '16'" in screen.error()
