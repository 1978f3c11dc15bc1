"""`hsx preview`, and what `check` and `plan` tell of a dataset; masks that are all zero stop a job before it begins."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.prepare import MANIFEST_FILE, prepare
from hsx.preview import BAD_LISTED
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.jobs import write_job

if TYPE_CHECKING:
    from pathlib import Path

ROWS: list[dict[str, Any]] = [
    {"id": "a", "input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]},
    {"id": "b", "input_ids": [5], "loss_mask": [0]},
    {"id": "a", "input_ids": [6]},
    {"id": "c", "input_ids": [6, 600]},
]


def job_with(folder: Path, rows: list[dict[str, Any]], **dataset: Any) -> str:
    job = write_job(folder, {"dataset": dataset})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(job)


def test_preview_shows_what_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with(tmp_path, ROWS)
    assert main(["preview", job]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert "fields     id: text as id; input_ids: list as input_ids; loss_mask: list as loss_mask" in lines
    assert "rows       4 = 2 accepted + 1 duplicate_id + 1 out_of_vocabulary" in lines
    assert "tokens     5, of which 2 count for the loss (40.0 %); shortest 1, median 1, p95 4, longest 4" in lines
    assert "note       1 usable row without any token that counts" in lines
    assert lines[lines.index("--- 'a', line 1: 4 tokens, 2 count") + 1] == "1[[2 3]]4"
    assert main(["preview", job, "--color", "always", "--samples", "1"]) == ExitCode.DONE
    assert "1\x1b[30;42m2 3\x1b[0m4" in capsys.readouterr().out


def test_preview_as_json_and_of_some_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", job_with(tmp_path, ROWS), "--json", "--rows", "3"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["complete"], document["accepted"]) == (3, False, 2)
    assert document["rejected"] == {"duplicate_id": 1}
    assert document["samples"][0]["pieces"] == [
        {"text": "1", "counts": False},
        {"text": "2 3", "counts": True},
        {"text": "4", "counts": False},
    ]


def test_text_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hsx.testing.tiny_models import make_tokenizer

    job = job_with(tmp_path, [{"id": "a", "text": "x\x1b[2J\x07y"}], format="text")
    make_tokenizer(tmp_path / "model")
    assert main(["preview", job]) == ExitCode.DONE
    assert r"[[x\x1b[2J\x07y]]" in capsys.readouterr().out


def test_masks_that_are_all_zero_stop_everything_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": str(number), "input_ids": [1, 2], "prompt_length": 2} for number in range(3)]
    job = job_with(tmp_path, rows)
    for command in ("preview", "plan", "run"):
        assert main([command, job]) == ExitCode.REFUSED
        assert "[mask_empty] no token of 3 usable rows counts for the loss" in capsys.readouterr().err
    loaded = load(job)
    with pytest.raises(RunError) as caught:
        prepare(loaded, lambda *_: None)
    assert caught.value.kind == "mask_empty"
    assert not (loaded.state_dir / FILE_NAME).exists()
    allowed = job_with(tmp_path, rows, zero_masks="allow")
    assert main(["preview", allowed]) == ExitCode.DONE
    assert prepare(load(allowed), lambda *_: None).samples.count == 3
    manifest = json.loads((loaded.state_dir / MANIFEST_FILE).read_text(encoding="utf-8"))
    assert [(file["name"], file["lines"]) for file in manifest["files"]] == [("rows.jsonl", 3)]


def test_no_usable_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preview", job_with(tmp_path, [{"id": "a", "input_ids": []}])]) == ExitCode.REFUSED
    screen = capsys.readouterr()
    assert "bad row    line 1, id 'a': empty" in screen.out
    assert "[dataset_empty]" in screen.err


def test_bad_rows_are_counted_and_what_becomes_of_them_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [{"id": "a", "input_ids": [1]}, *({"id": str(number), "input_ids": []} for number in range(7))]
    for on_bad_row, said in (("refuse", True), ("skip", False)):
        assert main(["preview", job_with(tmp_path, rows, on_bad_row=on_bad_row)]) == ExitCode.DONE
        shown = capsys.readouterr().out
        assert shown.count("bad row    line ") == 5
        assert "bad row    and 2 more, see --bad\n" in shown
        assert ("note       plan and run refuse a dataset with bad rows" in shown) == said


def test_rows_by_their_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many: list[dict[str, Any]] = [{"id": number, "input_ids": [number % 500 + 1], "loss_mask": [1]} for number in range(1500)]
    job = job_with(tmp_path, [*many[:1200], {"id": "wrong", "input_ids": [600]}, *many[1200:]])
    assert main(["preview", job, "--id", "1400", "--id", "wrong", "--id", "7"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if line.startswith("---")] == [
        "--- '7', line 8",
        "--- '1400', line 1402",
    ]
    assert "bad row    line 1201, id 'wrong': out_of_vocabulary" in shown
    assert "rows       1402 = 1401 accepted + 1 out_of_vocabulary; there are more rows, see --rows" in shown
    assert main(["preview", job, "--id", "wrong", "--id", "nobody", "--id", "x\x1b", "--json"]) == ExitCode.REFUSED
    screen = capsys.readouterr()
    document = json.loads(screen.out)
    assert [(row["sample_id"], row["reason"]) for row in document["bad"]] == [("wrong", "out_of_vocabulary")]
    assert (document["samples"], document["missing"], document["complete"]) == ([], ["nobody", "x\x1b"], True)
    assert screen.err.endswith("rows.jsonl: none of 1501 rows has the id 'nobody', 'x\\x1b'\n")
    assert main(["preview", job, "--id", "1400", "--rows", "9"]) == ExitCode.REFUSED
    assert "[sample_unknown]" in capsys.readouterr().err
    # What it is shown for may be that nothing of it counts.
    job = job_with(tmp_path, [{"id": "a", "input_ids": [1], "loss_mask": [0]}, {"id": "b", "input_ids": []}])
    for name in ("a", "b"):
        assert main(["preview", job, "--id", name]) == ExitCode.DONE


def test_all_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good: list[dict[str, Any]] = [{"id": f"g{number}", "input_ids": [1]} for number in range(1200)]
    job = job_with(tmp_path, [*good, *({"id": f"b{number}", "input_ids": []} for number in range(BAD_LISTED + 2))])
    assert main(["preview", job, "--bad"]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert "bad row    line 1201, id 'b0': empty: the row has no tokens" in shown
    assert shown.count("bad row    line ") == BAD_LISTED
    assert "bad row    and 2 more\n" in shown
    assert "---" not in shown
    assert main(["preview", job, "--bad", "--samples", "1", "--id", f"b{BAD_LISTED + 1}", "--json"]) == ExitCode.DONE
    document = json.loads(capsys.readouterr().out)
    assert (len(document["bad"]), document["samples"]) == (BAD_LISTED + 1, [])
    assert main(["preview", job_with(tmp_path, good), "--bad"]) == ExitCode.DONE
    assert "note       no row is bad" in capsys.readouterr().out


def test_rows_that_count_whole_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row without a mask, among rows that have one, is easily overlooked."""
    masked = {"id": "a", "input_ids": [1, 2], "loss_mask": [0, 1]}
    without: list[dict[str, Any]] = [{"id": "b", "input_ids": [3, 4]}, {"id": "c", "input_ids": [5], "loss_mask": None}]

    def said(command: str, rows: list[dict[str, Any]]) -> list[str]:
        assert main([command, job_with(tmp_path, rows)]) == ExitCode.DONE
        return [line for line in capsys.readouterr().out.splitlines() if "every token" in line]

    for command in ("plan", "preview"):
        some = "note       every token of 2 of 3 usable rows counts for the loss: the mask is all ones, or there is none"
        assert said(command, [masked, *without]) == [some]
        assert said(command, [masked]) == []
        nowhere = (
            "note       the first row has no loss mask, labels or prompt length: every token of such a row counts for the loss"
        )
        assert said(command, without[:1]) == [nowhere]
        everywhere = "note       every token of every usable row counts for the loss: the mask is all ones, or there is none"
        assert said(command, without[1:]) == [everywhere]
        assert main([command, job_with(tmp_path, [masked, *without]), "--json"]) == ExitCode.DONE
        assert json.loads(capsys.readouterr().out)["whole"] == 2


def test_check_and_plan_tell_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_with(tmp_path, ROWS, on_bad_row="skip")
    assert main(["check", job]) == ExitCode.DONE
    assert "format     tokens, told from the first row" in capsys.readouterr().err
    assert main(["check", job, "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["dataset"]["used"]["loss_mask"] == "loss_mask"
    assert main(["plan", job]) == ExitCode.DONE
    assert "rows       4 = 2 accepted + 1 duplicate_id + 1 out_of_vocabulary" in capsys.readouterr().out
    (tmp_path / "rows.jsonl").write_bytes(b"\x1f\x8b\x08")
    assert main(["check", job]) == ExitCode.REFUSED
    assert "error: dataset.path" in capsys.readouterr().err
