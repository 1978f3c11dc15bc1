"""The command line: arguments, errors, exit codes, completion. In this process, except where the process itself matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from typing import TYPE_CHECKING

import pytest

from hsx import __version__
from hsx.cli import build_parser, main
from hsx.config_load import decode, load
from hsx.errors import KINDS, RunError
from hsx.exit_codes import MEANINGS, ExitCode, of_error
from hsx.testing.jobs import write_job

if TYPE_CHECKING:
    from pathlib import Path

COMMANDS = ("run", "plan", "check", "serve", "verify", "show", "quarantine", "invariants", "completion")


def hsx(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hsx", *arguments], capture_output=True, text=True)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hsx {__version__}\n"


def test_the_help_lists_commands_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(command in text for command in COMMANDS)
    assert all(f"{code.value} {meaning[:30]}" in text for code, meaning in MEANINGS.items())


def test_an_unknown_argument_is_told_with_the_usage_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["preview", "job.toml", "c-4"])
    said = capsys.readouterr().err
    assert said.startswith("usage: hsx preview ")
    assert "unrecognized arguments: c-4" in said


def test_a_store_for_a_job_file_and_the_other_way_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    store = tmp_path / "some.zarr"
    store.mkdir()
    assert main(["show", str(store), "1"]) == ExitCode.REFUSED
    assert capsys.readouterr().err.endswith(f"{store}: is a folder; expected a job file\n")
    (store / "zarr.json").write_text("{}")
    assert main(["verify", str(store)]) == ExitCode.REFUSED
    assert "is a folder; expected a job file; of a store `hsx verify --store` and `hsx export`" in capsys.readouterr().err
    for wrong, what in ((job, "is a file"), (tmp_path / "nowhere", "does not exist")):
        assert main(["export", str(wrong), str(tmp_path / "out"), "--to", "specforge"]) == ExitCode.REFUSED
        assert f"[usage] {wrong} {what}; expected the folder of a store" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["run"],
        ["run", "job.toml", "--nonsense"],
        ["run", "job.toml", "--", "--tp-size", "2"],
        ["plan", "job.toml", "--rate", "0"],
        ["plan", "job.toml", "--rate", "fast"],
        ["verify", "--fraction", "0"],
        ["verify", "--fraction", "1.5"],
        ["verify", "--hf-samples", "0"],
        ["quarantine"],
        ["quarantine", "requeue", "job.toml", "-1"],
        ["completion", "cmd.exe"],
    ],
)
def test_wrong_arguments_are_refused_with_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == ExitCode.REFUSED
    assert capsys.readouterr().err.startswith("usage: hsx")


@pytest.mark.parametrize(
    "arguments",
    [["check"], ["verify"], ["verify", "job.toml", "--store", "s"], ["quarantine", "requeue", "JOB"]],
)
def test_arguments_that_make_no_sense_together(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = str(write_job(tmp_path))
    (tmp_path / "store.zarr.job").mkdir()
    (tmp_path / "store.zarr.job" / "ledger.sqlite").touch()
    assert main([job if argument == "JOB" else argument for argument in arguments]) == ExitCode.REFUSED
    assert capsys.readouterr().err.startswith("hsx: error [usage] hsx ")


def test_one_fault_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"pipeline": {"retry": 1}})
    assert main(["check", str(job)]) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"hsx: error [config_invalid] {job}: pipeline.retry = 1: unknown key; did you mean pipeline.retries?\n"
    )


def test_several_faults_are_one_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"job": {"name": "a b"}, "status": {"port": -1}})
    assert main(["run", str(job)]) == ExitCode.REFUSED
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "hsx: error [config_invalid] 2 problems:"
    assert [line.startswith(f"  {job}: ") for line in rest] == [True, True]


def test_a_traceback_is_shown_to_who_asks_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.toml")
    assert main(["check", missing, "-v"]) == ExitCode.REFUSED
    assert "Traceback" not in capsys.readouterr().err
    assert main(["check", missing, "-vv"]) == ExitCode.REFUSED
    assert "Traceback" in capsys.readouterr().err


def test_check_prints_a_job_file_that_means_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"engine": {"env": {"A": "b c"}}})
    assert main(["check", str(job)]) == ExitCode.DONE
    captured = capsys.readouterr()
    printed = tomllib.loads(captured.out)
    assert printed["dataset"].pop("max_tokens") == 4088  # resolved: the model's context less the server's margin
    assert decode(printed, "printed") == load(job).config
    assert f"{job}: warning: engine.env: is not used" in captured.err


def test_check_as_json_and_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"capture": {"layers": [9]}})
    assert main(["check", str(job), "--json"]) == ExitCode.REFUSED
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert document["findings"][0]["key"] == "capture.layers"
    assert document["config"]["capture"]["layers"] == [9]
    assert document["config"]["dataset"]["max_tokens"] == 4088


def test_check_names_a_model_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert main(["check", str(job)]) == ExitCode.REFUSED
    captured = capsys.readouterr()
    assert "error: model.path: " in captured.err
    assert "max_tokens" not in tomllib.loads(captured.out)["dataset"]


def test_the_schema_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--schema"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["title"] == "hsx job file"


def test_a_run_refuses_a_job_with_errors_before_anything_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path, {"capture": {"layers": [9]}})
    before = sorted(tmp_path.rglob("*"))
    assert main(["run", str(job)]) == ExitCode.REFUSED
    assert capsys.readouterr().err.startswith(f"hsx: error [config_conflict] {job}: capture.layers: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_serve_passes_on_what_follows_the_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = write_job(tmp_path)
    assert main(["serve", str(job), "--", "--pp-size", "2", "--help"]) == ExitCode.REFUSED
    assert "hsx: error [serve_refused]" in capsys.readouterr().err


def test_serve_says_where_the_servers_arguments_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "job.toml", "--tp-size", "8"])
    assert ended.value.code == ExitCode.REFUSED
    words = "the server's arguments go after --: hsx serve job.toml -- --tp-size 8"
    assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "job.toml", "--tp-size", "8", "--", "--trust-remote-code"])
    assert f"{words} --trust-remote-code\n" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completions(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == ExitCode.DONE
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def test_a_completion_is_bash(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    run = subprocess.run(["bash", "-n"], input=capsys.readouterr().out, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_module() -> None:
    assert hsx("--version").stdout == f"hsx {__version__}\n"


@pytest.mark.parametrize("command", ["check", "quarantine list"])
def test_a_reader_that_goes_away(command: str, tmp_path: Path) -> None:
    """Gone before the first byte, whatever fits into buffers, and whether the command succeeds or fails."""
    job = write_job(tmp_path)
    out, gone = os.pipe()
    os.close(out)
    try:
        run = subprocess.run(
            [sys.executable, "-m", "hsx", *command.split(), str(job)], stdout=gone, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(gone)
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr
    assert run.returncode != ExitCode.DONE


def test_an_unknown_fault_is_exit_code_1_with_a_traceback(tmp_path: Path) -> None:
    program = "import sys; sys.modules['hsx.commands.check'] = object(); from hsx.cli import main; sys.exit(main(['check']))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == ExitCode.INTERNAL
    assert "Traceback" in run.stderr
    assert "hsx: internal error AttributeError" in run.stderr


def test_a_package_that_is_missing_is_named() -> None:
    program = "import sys; sys.modules['shtab'] = None; from hsx.cli import main; sys.exit(main(['completion', 'bash']))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == ExitCode.REFUSED
    assert run.stderr.startswith("hsx: error [dependency_missing] the package 'shtab' is not installed in ")


def test_every_kind_of_error_has_an_exit_code() -> None:
    codes = {kind: of_error(RunError(kind, "x")) for kind in KINDS}
    assert ExitCode.DONE not in codes.values()
    assert codes["restart_budget"] == codes["root_unusable"] == codes["staging_failed"] == ExitCode.RUN_ERROR
    assert (codes["incomplete"], codes["store_damaged"], codes["job_locked"], codes["interrupted"]) == (3, 5, 6, 75)
    assert codes["dataset_rejected"] == codes["job_changed"] == ExitCode.REFUSED


def test_every_exit_code_has_a_meaning() -> None:
    assert set(MEANINGS) == set(ExitCode)


def test_every_command_has_its_module() -> None:
    parser = build_parser()
    for command in COMMANDS:
        assert command in parser.format_help()
        __import__(f"hsx.commands.{command}")
