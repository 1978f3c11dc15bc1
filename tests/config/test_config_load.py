"""Reading a job file: what is resolved, and how each fault is reported."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.commands.toml_text import to_toml
from hsx.config_load import decode, load, parse_size
from hsx.errors import ConfigError
from hsx.testing.jobs import job_document, write_job


def problems_of(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.kind == "config_invalid"
    return caught.value.problems


def test_relative_paths_begin_at_the_job_file(tmp_path: Path) -> None:
    job = write_job(tmp_path, {"dataset": {"chat_template": "../t.jinja"}})
    assert Path.cwd() != tmp_path
    loaded = load(job)
    assert loaded.path == job
    assert loaded.store == tmp_path / "store.zarr"
    assert loaded.state_dir == tmp_path / "store.zarr.job"
    assert loaded.dataset == tmp_path / "rows.jsonl"
    assert loaded.model == tmp_path / "model"
    assert loaded.chat_template == tmp_path.parent / "t.jinja"
    assert loaded.roots[0].path == tmp_path / "root-a"
    assert loaded.config.roots[0].path == str(tmp_path / "root-a")
    assert loaded.config.job.state_dir == str(loaded.state_dir)
    assert loaded.staging_bytes == 64 * 2**20


def test_home_is_expanded_and_links_are_kept(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    loaded = load(write_job(tmp_path, {"job": {"store": "~/s.zarr"}, "engine": {"python": "link/bin/python"}}))
    assert loaded.store == Path.home() / "s.zarr"
    # A virtual environment's python is a link: followed, it would be another environment's.
    assert loaded.config.engine.python == str(tmp_path / "link/bin/python")


def test_a_bare_interpreter_name_is_left_to_path(tmp_path: Path) -> None:
    assert load(write_job(tmp_path, {"engine": {"python": "python3"}})).config.engine.python == "python3"


def test_the_file_must_exist_and_be_toml(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[job\n", encoding="utf-8")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for path, words in (
        (tmp_path / "none.toml", "No such file"),
        (bad, "is not TOML: .*line 1, column 5.*: '\\[job'$"),
        (binary, "is not UTF-8"),
        (tmp_path, "is a folder; expected a job file$"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            load(path)
        assert caught.value.kind == "config_unreadable"
        assert caught.value.problems[0].startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"job": {"store": None}}, "job.store is missing; expected text"),
        ({"job": {"store": " "}}, "job.store = ' ': expected text that is not empty"),
        ({"job": {"name": "a b"}}, "job.name = 'a b': expected a name of up to 64 letters, digits"),
        ({"model": {"path": 3}}, "model.path = 3: expected text, got an integer"),
        ({"dataset": {"on_bad_row": "maybe"}}, "dataset.on_bad_row = 'maybe': expected one of 'refuse', 'skip'"),
        ({"dataset": {"max_tokens": 0}}, "dataset.max_tokens = 0: expected an integer >= 1"),
        ({"capture": {"layers": [1, "x"]}}, "capture.layers = [1, 'x']: expected an integer, got text, at [1]"),
        ({"staging": {"max_bytes": "lots"}}, "staging.max_bytes = 'lots': expected a size in bytes with its unit"),
        ({"engine": {"port": 99999}}, "engine.port = 99999: expected an integer <= 65535"),
        ({"engine": {"ownership": "mine"}}, "engine.ownership = 'mine': expected one of 'spawn', 'external', 'systemd'"),
        ({"engine": {"env": {"A": 3}}}, "engine.env = {'A': 3}: expected text, got an integer"),
        ({"pipeline": {"allow_quarantined": 1.5}}, "pipeline.allow_quarantined = 1.5: expected a number <= 1"),
        ({"pipeline": {"dump_deadline_s": True}}, "pipeline.dump_deadline_s = True: expected a number, got true or false"),
        ({"pipeline": {"start_rate": float("nan")}}, "pipeline.start_rate = nan: expected a finite number"),
        ({"watchdog": {"grace_s": float("inf")}}, "watchdog.grace_s = inf: expected a finite number"),
        ({"status": {"enabled": "yes"}}, "status.enabled = 'yes': expected true or false, got text"),
        ({"log": {"level": "loud"}}, "log.level = 'loud': expected one of 'debug', 'info', 'warning', 'error'"),
        ({"pipeline": {"concurency": 3}}, "pipeline.concurency = 3: unknown key; did you mean pipeline.concurrency?"),
        ({"job": {"layers": [1]}}, "job.layers = [1]: unknown key; did you mean capture.layers?"),
        ({"job": {"xyzzy": 1}}, "job.xyzzy = 1: unknown key; expected one of name, store, state_dir"),
        ({"pipelines": {"retries": 1}}, "pipelines = {'retries': 1}: unknown key; did you mean pipeline?"),
        ({"roots": []}, "roots is missing; expected one table or more"),
        ({"job": {"store": None, "stor": "x"}}, "job.stor = 'x': unknown key; did you mean job.store?"),
        ({"roots": [{"name": "a"}]}, "roots[0].path is missing; expected text"),
        ({"roots": [{"name": "a", "path": "x", "reserve": 10}]}, "roots[0].reserve = 10: expected a size in bytes"),
    ],
)
def test_each_fault_names_file_key_value_and_what_was_expected(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    job = write_job(tmp_path, changes)
    problems = problems_of(job)
    assert len(problems) == 1
    assert problems[0].startswith(f"{job}: {problem}")


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    job = write_job(tmp_path, {"job": {"name": "a b", "frob": 1}, "capture": {"layers": "1"}, "status": {"port": -1}})
    keys = [problem.removeprefix(f"{job}: ").split(" ")[0] for problem in problems_of(job)]
    assert keys == ["job.frob", "job.name", "capture.layers", "status.port"]


def test_a_section_must_be_a_table() -> None:
    with pytest.raises(ConfigError, match="f: pipeline = 3: expected a table") as caught:
        decode({"pipeline": 3}, "f")
    assert len(caught.value.problems) == 7  # and six sections are missing


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    (problem,) = problems_of(write_job(tmp_path, {"model": {"revision": ["x" * 500]}}))
    assert len(problem) < 250
    assert "..." in problem


def test_the_printed_form_reads_back_the_same(tmp_path: Path) -> None:
    changes = {"engine": {"args": ["--a", 'quo"te', "tab\t", "del\x7f", "ünï 😀"], "env": {"A.B": "x", "C": "\\"}}}
    config = load(write_job(tmp_path, changes)).config
    again = decode(tomllib.loads(to_toml(msgspec.to_builtins(config))), "again")
    assert again == config


@pytest.mark.parametrize(
    ("text", "size"),
    [("0B", 0), ("1B", 1), ("1.5 kB", 1500), ("8GiB", 8 * 2**30), ("1.5TB", 1_500_000_000_000), ("0.3B", 0), ("2TiB", 2**41)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8", "8 gib", "-1GiB", "1e3GB", "GiB", "1GiB ", "1,5GB", "٣GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number with one of the units"):
        parse_size(text)


@given(whole=st.integers(0, 10**9), unit=st.sampled_from(["B", "kB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"]))
def test_whole_sizes_are_exact(whole: int, unit: str) -> None:
    assert parse_size(f"{whole}{unit}") == whole * parse_size(f"1{unit}")


def test_the_example_of_the_tests_is_complete(tmp_path: Path) -> None:
    assert set(job_document(tmp_path)) == {"job", "model", "dataset", "capture", "staging", "roots"}


def test_one_bracket_too_few_around_roots(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text(encoding="utf-8").replace("[[roots]]", "[roots]"), encoding="utf-8")
    (problem,) = problems_of(job)
    assert problem.startswith(f"{job}: roots = ")
    assert problem.endswith(": write [[roots]], with two brackets")


def test_a_misspelt_section_is_one_problem(tmp_path: Path) -> None:
    job = write_job(tmp_path)
    job.write_text(job.read_text(encoding="utf-8").replace("[dataset]", "[datset]"), encoding="utf-8")
    (problem,) = problems_of(job)
    assert problem.endswith("unknown key; did you mean dataset?")
