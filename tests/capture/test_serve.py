"""hsx serve: which server arguments are refused, what is added, and the record it leaves."""

from __future__ import annotations

import os
import stat
import sys
import uuid
from typing import TYPE_CHECKING

import msgspec
import pytest

from hsx.config import Config
from hsx.core.epoch import record_from_json
from hsx.engines.process import boot_id, start_ticks
from hsx.errors import RunError
from hsx.serve import NO_FUSION, Environment, Launch, plan_launch, write_record

if TYPE_CHECKING:
    from pathlib import Path

FIT = Environment("0.5.23", plugin=True, variables={})
GOOD = ["--disable-radix-cache"]


def config(tmp_path: Path, **engine: object) -> Config:
    return msgspec.convert(
        {
            "job": {"name": "a", "store": "s"},
            "model": {"path": str(tmp_path / "model"), "revision": "r1"},
            "dataset": {"path": "d"},
            "capture": {"layers": [2, 5], "final": "pre_norm"},
            "staging": {"dump_dir": str(tmp_path / "dumps")},
            "roots": [{"name": "a", "path": "p"}],
            "engine": engine,
        },
        Config,
    )


def refusal(tmp_path: Path, args: list[str], found: Environment = FIT) -> str:
    with pytest.raises(RunError) as caught:
        plan_launch(config(tmp_path), args, found)
    assert caught.value.kind == "serve_refused"
    return caught.value.message


def test_what_is_missing_is_added(tmp_path: Path) -> None:
    launch = plan_launch(config(tmp_path, port=31000), GOOD, FIT)
    model = str(tmp_path / "model")
    assert launch.command == (
        *(sys.executable, "-m", "sglang.launch_server", *GOOD),
        *("--model-path", model, "--revision", "r1", "--host", "127.0.0.1", "--port", "31000", NO_FUSION),
    )
    assert (launch.model, launch.revision, launch.host, launch.port) == (model, "r1", "127.0.0.1", 31000)
    assert launch.variables == {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "SGLANG_TIMEOUT_KEEP_ALIVE": "600"}


def test_what_is_given_stays(tmp_path: Path) -> None:
    model = str(tmp_path / "other" / ".." / "model")
    given = ["--model", model, "--revision=r1", "--host=0.0.0.0", "--port", "5", "--tp-size", "2", "--pp-size", "1", *GOOD]
    given.append(NO_FUSION)
    launch = plan_launch(config(tmp_path, port=5), given, FIT)
    assert launch.command == (sys.executable, "-m", "sglang.launch_server", *given)
    assert (launch.model, launch.host, launch.port) == (model, "0.0.0.0", 5)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--disable-radix-cache is missing"),
        ([*GOOD, "--pp-size", "2"], "--pp-size is 2; expected 1"),
        ([*GOOD, "--pipeline-parallel-size=4"], "--pp-size is 4; expected 1"),
        ([*GOOD, "--pp-size", "1", "--pp-size", "2"], "--pp-size is 2; expected 1"),
        ([*GOOD, "--attn-cp-size", "2"], "--attn-cp-size is 2; expected 1"),
        ([*GOOD, "--disaggregation-mode", "prefill"], "--disaggregation-mode is prefill; expected null"),
        ([*GOOD, "--speculative-algorithm", "EAGLE"], "--speculative-algorithm is given; remove it"),
        ([*GOOD, "--speculative-num-steps=3"], "--speculative-num-steps is given; remove it"),
        ([*GOOD, "--enable-return-hidden-states"], "--enable-return-hidden-states is given; remove it"),
        ([*GOOD, "--return-aux-hidden-state-layer-ids", "1", "2"], "--return-aux-hidden-state-layer-ids is given"),
        ([*GOOD, "--enable-hierarchical-cache"], "--enable-hierarchical-cache is given; remove it"),
        ([*GOOD, "--enable-pdmux"], "--enable-pdmux is given; remove it"),
        ([*GOOD, "--allow-auto-truncate"], "--allow-auto-truncate is given; remove it: it cuts long prompts silently"),
        (
            [*GOOD, "--enable-flashinfer-allreduce-fusion"],
            "--enable-flashinfer-allreduce-fusion is given",
        ),
        ([*GOOD, "--flashinfer-allreduce-fusion-backend=trtllm"], "--flashinfer-allreduce-fusion-backend is given; remove it"),
        ([*GOOD, "--enable-aiter-allreduce-fusion"], "--enable-aiter-allreduce-fusion is given; remove it"),
        ([*GOOD, "--is-embedding"], "--is-embedding is given; remove it"),
        ([*GOOD, "--config", "a.yaml"], "--config is given; remove it"),
        ([*GOOD, "--pp", "2"], "--pp is short for --pp-size; write names in full"),
        ([*GOOD, "--speculative-a", "EAGLE"], "--speculative-a is given; remove it"),
        ([*GOOD, "--specul", "EAGLE"], "--specul is short for --speculative-; write names in full"),
        ([*GOOD, "--nnodes", "2", "--dp-size", "4", "--enable-dp-attention"], "--dp-size is 4 and --nnodes 2; expected 1"),
        ([*GOOD, "--nnodes=2", "--attention-data-parallel-size=2"], "--attn-dp-size is 2 and --nnodes 2; expected 1"),
        (["--disable-radix"], "--disable-radix-cache is missing"),
        ([*GOOD, "--model-path", "/elsewhere"], "--model-path is '/elsewhere'; expected"),
        ([*GOOD, "--revision", "r2"], "--revision is 'r2'; expected 'r1'"),
        ([*GOOD, "--port", "x"], "--port is 'x'; expected 1 to 65535"),
        ([*GOOD, "--port", "70000"], "--port is '70000'; expected 1 to 65535"),
        ([*GOOD, "--port", "31000"], "--port is 31000, engine.port of the job file is 30000; hsx would wait for the other"),
        ([*GOOD, "--host=10.0.0.1"], "--host is 10.0.0.1, engine.host of the job file is 127.0.0.1; hsx would wait"),
    ],
)
def test_refused_arguments(tmp_path: Path, args: list[str], message: str) -> None:
    assert message in refusal(tmp_path, args)


@pytest.mark.parametrize("args", [["--nnodes", "2", "--tp-size", "16"], ["--nnodes", "1", "--dp-size", "8"]])
def test_tensor_parallelism_over_nodes_and_ranks_on_one_are_served(tmp_path: Path, args: list[str]) -> None:
    assert plan_launch(config(tmp_path), [*GOOD, *args], FIT).command[3:-9] == (*GOOD, *args)


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, ["--pp-size", "2", "--is-embedding"])
    assert [name in message for name in ("--disable-radix-cache", "--pp-size", "--is-embedding")] == [True] * 3


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (Environment("", plugin=True, variables={}), "sglang is not installed in"),
        (Environment("0.5.10.post2", plugin=True, variables={}), "sglang is 0.5.10.post2; expected at least 0.5.11"),
        (
            Environment("0.5.99", plugin=True, variables={}, missing=("hook ModelRunner.forward: it is not there",)),
            "sglang 0.5.99 is not as hsx knows it: hook ModelRunner.forward: it is not there",
        ),
        (Environment("0.5.23", plugin=False, variables={}), "the entry point hsx of sglang.srt.plugins is missing"),
    ],
)
def test_refused_environments(tmp_path: Path, found: Environment, message: str) -> None:
    assert message in refusal(tmp_path, GOOD, found)


@pytest.mark.parametrize(("listed", "expected"), [("", None), ("hsx,a", None), ("a, b", "a,b,hsx")])
def test_plugin_is_put_on_the_list(tmp_path: Path, listed: str, expected: str | None) -> None:
    found = Environment("0.5.23", plugin=True, variables={"SGLANG_PLUGINS": listed} if listed else {})
    assert plan_launch(config(tmp_path), GOOD, found).variables.get("SGLANG_PLUGINS") == expected


def test_reference_engine_needs_no_sglang(tmp_path: Path) -> None:
    found = Environment("", plugin=False, variables={})
    launch = plan_launch(config(tmp_path, kind="reference"), ["--extra"], found)
    assert launch.command[:4] == (sys.executable, "-m", "hsx.testing.reference_engine", "--extra")
    assert launch.variables == {}


def launch_of(tmp_path: Path) -> Launch:
    return plan_launch(config(tmp_path), GOOD, FIT)


def test_record_names_this_process(tmp_path: Path) -> None:
    epoch = str(uuid.uuid4())
    path = write_record(config(tmp_path), launch_of(tmp_path), epoch)
    record = record_from_json(path.read_text())
    assert path == tmp_path / "dumps" / epoch / "server.json"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (record.epoch, record.pid, record.start_ticks) == (epoch, os.getpid(), start_ticks(os.getpid()))
    assert record.boot_id == boot_id()
    assert (record.layers, record.final, record.engine, record.engine_version) == ((2, 5), "pre_norm", "sglang", "0.5.23")
    assert record.command == launch_of(tmp_path).command
    assert [p.name for p in path.parent.iterdir()] == ["server.json"]


def test_epochs_are_never_reused(tmp_path: Path) -> None:
    epoch = str(uuid.uuid4())
    write_record(config(tmp_path), launch_of(tmp_path), epoch)
    with pytest.raises(RunError, match="exists already") as caught:
        write_record(config(tmp_path), launch_of(tmp_path), epoch)
    assert caught.value.kind == "serve_refused"


@pytest.mark.parametrize("epoch", ["", "../x", "11111111222243338444555555555555", "11111111-2222-4333-8444-55555555555Z"])
def test_epoch_must_be_a_uuid(tmp_path: Path, epoch: str) -> None:
    with pytest.raises(RunError, match="expected a uuid in its 36-character form"):
        write_record(config(tmp_path), launch_of(tmp_path), epoch)


def test_dump_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("a file")
    with pytest.raises(RunError) as caught:
        write_record(config(tmp_path), launch_of(tmp_path), str(uuid.uuid4()))
    assert caught.value.kind == "staging_failed"
