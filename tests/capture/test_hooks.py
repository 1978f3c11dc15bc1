"""The hooks on a model of their own, in a process whose `sglang` is two lines: what they leave in the epoch's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from hsx.core.epoch import NORM_NAME, RECORD_NAME, REFUSAL_NAME, REPORT_NAME, STATE_NAME, EpochRecord, state_from_json, to_json

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = "11111111-2222-4333-8444-555555555555"

PROGRAM = """
import os, sys
from pathlib import Path
from types import SimpleNamespace as Thing
import torch
from hsx.capture.hooks import Hooks
from hsx.core.epoch import record_from_json

class RMSNorm(torch.nn.Module):
    variance_epsilon = 1e-6
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
    def set_dflash_layers_to_capture(self, layers):
        self.layers_to_capture = [k + 1 for k in layers]

def runner():
    server = Thing(pp_size=1, dp_size=1)
    config = Thing(num_hidden_layers=4, hidden_size=8, vocab_size=100, dtype=torch.bfloat16)
    return Thing(is_draft_worker=False, server_args=server, model_config=config, model=Model())

def forward(hooks, rids, lengths, mode="EXTEND", mm_inputs=None, input_embeds=None):
    ids = torch.arange(sum(lengths))
    batch = Thing(forward_mode=Thing(name=mode), rids=rids, extend_prefix_lens_cpu=[0] * len(rids), extend_seq_lens_cpu=lengths,
                  input_ids=ids, mm_inputs=mm_inputs, input_embeds=input_embeds)
    def original(_runner, _batch):
        aux = [torch.ones(len(ids), 8)]
        hooks.before_logits(None, None, torch.zeros(len(ids), 8) + 2, None, None, aux)
        return "output"
    assert hooks.around_forward(original, runner(), batch) == "output"

folder = Path(sys.argv[1])
record = record_from_json((folder / "server.json").read_text())
first, second = Hooks(record, folder), Hooks(record, folder)
first.after_load_model(None, runner())
"""


PARALLEL_STATE = "get_attn_tensor_model_parallel_rank = lambda: 0\nget_attn_tensor_model_parallel_world_size = lambda: 1\n"
RUNTIME_CONTEXT = """
class get_parallel:
    attn_dp_size, attn_dp_rank, dp_rank = 1, 0, None
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / EPOCH
    folder.mkdir()
    record = EpochRecord(EPOCH, "b", 1, 1, "", ("x",), "m", "", (1,), "post_norm", "sglang", "0", "0", "127.0.0.1", 1)
    (folder / RECORD_NAME).write_text(to_json(record))
    return folder


def run(tmp_path: Path, folder: Path, program: str) -> str:
    """Runs `PROGRAM` and then `program`; returns what it logged."""
    package = tmp_path / "packages" / "sglang"
    (package / "srt" / "distributed").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0"\n')
    (package / "srt" / "distributed" / "parallel_state.py").write_text(PARALLEL_STATE)
    (package / "srt" / "runtime_context.py").write_text(RUNTIME_CONTEXT)
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", PROGRAM + textwrap.dedent(program), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_each_forward_is_counted_whether_anything_was_taken_of_it_or_not(tmp_path: Path, folder: Path) -> None:
    program = """
    forward(first, ["f" * 32, "HEALTH_CHECK_1"], [3, 1])
    forward(first, ["hsx1-0a0b0c0d-7-1-5", "other"], [5, 2])
    forward(first, ["other"], [1], mode="DECODE")
    """
    run(tmp_path, folder, program)
    state = state_from_json((folder / STATE_NAME).read_text())
    assert (state.sequence, state.published, state.failed, state.foreign, state.incomplete) == (1, 1, 0, 3, 0)
    assert (folder / "hsx1-0a0b0c0d-7-1-5.safetensors").exists()
    assert {path.name for path in folder.iterdir()} >= {REPORT_NAME, NORM_NAME}
    assert not (folder / REFUSAL_NAME).exists()


def test_a_second_server_with_the_same_record_takes_nothing(tmp_path: Path, folder: Path) -> None:
    program = """
    report = (folder / "capture.json").stat()
    second.after_load_model(None, runner())
    forward(second, ["hsx1-0a0b0c0d-7-1-5"], [5])
    assert (folder / "capture.json").stat() == report
    forward(first, ["hsx1-0a0b0c0d-8-1-5"], [5])
    (folder / "pid").write_text(str(os.getpid()))
    """
    logged = run(tmp_path, folder, program)
    pid = (folder / "pid").read_text()
    reason = f"pid {pid} already captures into this epoch: a second server was started with the same epoch record"
    assert (folder / REFUSAL_NAME).read_text() == reason + "\n"
    assert reason in logged
    assert [path.name for path in folder.glob("*.safetensors")] == ["hsx1-0a0b0c0d-8-1-5.safetensors"]
    assert state_from_json((folder / STATE_NAME).read_text()).published == 1


def test_a_state_file_that_cannot_be_written_costs_the_server_nothing(tmp_path: Path, folder: Path) -> None:
    program = """
    (folder / "counter.json.part").mkdir()
    forward(first, ["hsx1-0a0b0c0d-7-1-5"], [5])
    forward(first, ["hsx1-0a0b0c0d-8-1-5"], [5])
    """
    logged = run(tmp_path, folder, program)
    assert logged.count("capture.state_failed") == 1
    assert state_from_json((folder / STATE_NAME).read_text()).published == 0
    assert len(list(folder.glob("*.safetensors"))) == 2


def test_a_folder_that_cannot_be_locked_is_a_refusal(tmp_path: Path, folder: Path) -> None:
    (folder / "capture.lock").mkdir()
    run(tmp_path, folder, 'forward(first, ["hsx1-0a0b0c0d-7-1-5"], [5])')
    assert (folder / REFUSAL_NAME).read_text().startswith("IsADirectoryError")
    assert not (folder / REPORT_NAME).exists()
    assert list(folder.glob("*.safetensors")) == []


def test_requests_with_other_inputs_than_text_are_refused_by_name(tmp_path: Path, folder: Path) -> None:
    """An image's rows stand under placeholder ids, and embeddings have no ids at all. The text beside them is captured."""
    program = """
    forward(first, ["hsx1-0a0b0c0d-1-1-5", "hsx1-0a0b0c0d-2-1-3", "other"], [5, 3, 2], mm_inputs=[object(), None, object()])
    forward(first, ["hsx1-0a0b0c0d-3-1-4"], [4], input_embeds=torch.ones(4, 8))
    """
    run(tmp_path, folder, program)
    said = {path.name: json.loads(path.read_text())["reason"] for path in folder.glob("*.error")}
    assert said == {
        "hsx1-0a0b0c0d-1-1-5.error": "the request has multi-modal inputs (images, audio or video); expected text alone",
        "hsx1-0a0b0c0d-3-1-4.error": "the batch has input embeddings in the place of token ids; expected ids",
    }
    assert [path.name for path in folder.glob("*.safetensors")] == ["hsx1-0a0b0c0d-2-1-3.safetensors"]
