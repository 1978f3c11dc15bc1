"""The hooks on a model of their own, in a process whose `sglang` is two lines: what they leave in the epoch's folder."""

from __future__ import annotations

import itertools
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

    def forward(self, x):
        return x * self.weight

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm = RMSNorm()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4))
        self.norm = RMSNorm()
    def set_dflash_layers_to_capture(self, layers):
        self.layers_to_capture = [k + 1 for k in layers]

MODEL = Model()

def runner(**changes):
    server = Thing(**{"pp_size": 1, "dp_size": 1, "nnodes": 1, "node_rank": 0, **changes})
    config = Thing(num_hidden_layers=4, hidden_size=8, vocab_size=100, dtype=torch.bfloat16)
    return Thing(is_draft_worker=False, server_args=server, model_config=config, model=MODEL)

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


GRAPHS = """
BACKEND = "disabled"
def check_cuda_graph_backend(phase, backend):
    return (phase, backend) == ("prefill", BACKEND)
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
    for name, source in {
        "__init__.py": '__version__ = "0"\n',
        "srt/distributed/parallel_state.py": PARALLEL_STATE,
        "srt/model_executor/cuda_graph_config.py": GRAPHS,
        "srt/runtime_context.py": RUNTIME_CONTEXT,
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(source)
    path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
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


INSTALL = """
import dataclasses
import sglang.srt.runtime_context as context

said = {}
def install(name, layers=(1,), final="post_norm", **changes):
    fresh = folder.parent / name
    fresh.mkdir()
    Hooks(dataclasses.replace(record, layers=layers, final=final), fresh).after_load_model(None, runner(**changes))
    said[name] = (fresh / "capture.error").read_text() if not (fresh / "capture.json").exists() else ""
"""


def test_states_taken_at_modules_are_refused_under_prefill_graphs(tmp_path: Path, folder: Path) -> None:
    program = """
    import json
    import sglang.srt.model_executor.cuda_graph_config as graphs
    for backend in ("disabled", "breakable", "full", "tc_piecewise", "another"):
        graphs.BACKEND = backend
        install(f"{backend} handed out")
        install(f"{backend} pre_norm", final="pre_norm")
        install(f"{backend} h_0", layers=(0, 1))
    sys.modules[graphs.__name__] = None  # as in 0.5.13
    install("old graphs", final="pre_norm", disable_piecewise_cuda_graph=False)
    install("old none", final="pre_norm", disable_piecewise_cuda_graph=True)
    install("old unknown", final="pre_norm")
    install("old handed out")
    (folder / "said").write_text(json.dumps(said))
    """
    run(tmp_path, folder, INSTALL + textwrap.dedent(program))
    said = json.loads((folder / "said").read_text())
    assert {name for name, reason in said.items() if not reason} == {
        *(f"{backend} handed out" for backend in ("disabled", "breakable", "full", "tc_piecewise", "another", "old")),
        *("disabled pre_norm", "disabled h_0", "old none"),
    }
    for state, backend in itertools.product(("pre_norm", "h_0"), ("breakable", "full", "tc_piecewise")):
        assert said[f"{backend} {state}"] == (
            f"{state} can only be taken where the model's norms run as modules, and this server's prefills are replayed from "
            f"graphs (backend '{backend}'): start it with --disable-prefill-cuda-graph (--disable-piecewise-cuda-graph before "
            "SGLang 0.5.14)\n"
        )
    assert "backend 'tc_piecewise'" in said["old graphs"]
    assert {"may be replayed from graphs (it does not say)" in said[name] for name in ("another pre_norm", "old unknown")} == {
        True
    }


def test_ranks_that_may_hand_out_parts_of_a_sum_are_refused(tmp_path: Path, folder: Path) -> None:
    program = """
    import json
    import sglang.srt.distributed.parallel_state as ranks
    fused = {"flashinfer_allreduce_fusion_backend": "auto"}
    install("one rank", **fused)
    ranks.get_attn_tensor_model_parallel_world_size = lambda: 2
    install("two", **fused)
    install("of before", flashinfer_allreduce_fusion_backend=None, enable_flashinfer_allreduce_fusion=True)
    install("on AMD", enable_aiter_allreduce_fusion=True)
    install("off", flashinfer_allreduce_fusion_backend=None, enable_flashinfer_allreduce_fusion=False)
    install("unknown")
    install("h_0 alone", layers=(0,), **fused)
    # As from 0.5.19 on: what was given stays in server_args, what was settled is in the runtime context.
    context.get_exec = lambda: Thing(comm=Thing(**fused, enable_aiter_allreduce_fusion=False))
    install("settled on", flashinfer_allreduce_fusion_backend=None)
    context.get_exec = lambda: Thing(comm=Thing(flashinfer_allreduce_fusion_backend=None, enable_aiter_allreduce_fusion=False))
    install("settled off", **fused)
    (folder / "said").write_text(json.dumps(said))
    """
    run(tmp_path, folder, INSTALL + textwrap.dedent(program))
    said = json.loads((folder / "said").read_text())
    assert {name for name, reason in said.items() if not reason} == {
        *("one rank", "off", "unknown", "h_0 alone", "settled off"),
    }
    why = "all-reduce and norm may be one kernel, and layers may be handed out before the ranks' parts are added up"
    assert said["two"] == (
        f"flashinfer_allreduce_fusion_backend is 'auto' with 2 tensor-parallel ranks: {why}: start it with "
        "--enforce-disable-flashinfer-allreduce-fusion\n"
    )
    assert said["settled on"] == said["two"]
    assert said["of before"].startswith("enable_flashinfer_allreduce_fusion is True with 2")
    assert said["on AMD"].endswith(f"{why}: start it without --enable-aiter-allreduce-fusion\n")


def test_over_nodes_the_only_writer_is_on_the_first(tmp_path: Path, folder: Path) -> None:
    program = """
    import json
    install("first", nnodes=2)
    install("second", nnodes=2, node_rank=1)
    context.get_parallel.attn_dp_size, context.get_parallel.attn_dp_rank = 2, 1
    install("ranks", nnodes=2, node_rank=1)
    (folder / "said").write_text(json.dumps(said))
    """
    run(tmp_path, folder, INSTALL + textwrap.dedent(program))
    said = json.loads((folder / "said").read_text())
    assert said["first"] == ""
    assert said["second"] == "the process that would write the dumps runs on node 1 of 2; expected node 0, where hsx is\n"
    assert said["ranks"] == (
        "the server has 2 data-parallel ranks on 2 nodes; those of other nodes would write their dumps there, where hsx does "
        "not see them: expected tensor parallelism alone, or one server and job on each node\n"
    )


def test_a_model_that_hands_out_something_else_is_refused_by_the_writer_thread(tmp_path: Path, folder: Path) -> None:
    """The refusal is a file, and the forward path writes none: the writer thread is held up here, and the forward returns."""
    program = """
    import threading
    def original(_runner, _batch):
        MODEL.layers[1].input_layernorm(torch.ones(5, 8))
        final = MODEL.norm(torch.ones(5, 8))
        first.before_logits(None, None, final, None, None, [torch.full((5, 8), 3.0)])
        return "output"
    held = threading.Event()
    first._session.later(held.wait)
    batch = Thing(forward_mode=Thing(name="EXTEND"), rids=["hsx1-0a0b0c0d-1-1-5"], extend_prefix_lens_cpu=[0],
                  extend_seq_lens_cpu=[5], input_ids=torch.arange(5), mm_inputs=None, input_embeds=None)
    assert first.around_forward(original, runner(), batch) == "output"
    assert not (folder / "capture.error").exists()
    held.set()
    forward(first, ["hsx1-0a0b0c0d-2-1-5"], [5])
    """
    run(tmp_path, folder, program)
    assert (
        (folder / REFUSAL_NAME)
        .read_text()
        .startswith("the model hands out something else for h_1 than the input norm of layer 1")
    )
    assert json.loads((folder / "hsx1-0a0b0c0d-1-1-5.error").read_text())["reason"].startswith("CaptureRefusedError: the model")
    assert list(folder.glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("refused", "logged"),
    [
        ("os.memfd_create", "capture.memory_unshared bytes=1073741824 reason=no"),
        ("del os.memfd_create; nothing", "capture.memory_unshared bytes=1073741824 reason=[Errno 38] this Python has no"),
        ("subprocess.Popen", "capture.no_writer_process reason=no"),
        ("nothing", ""),
    ],
)
def test_without_a_writer_process_the_thread_writes(tmp_path: Path, folder: Path, refused: str, logged: str) -> None:
    program = f"""
    import dataclasses, subprocess
    from hsx.engines.process import descendants
    def no(*_args, **_kwargs):
        raise OSError("no")
    fresh = folder.parent / "fresh"
    fresh.mkdir()
    nothing = None
    {refused} = no
    before = len(descendants(os.getpid()))
    third = Hooks(record, fresh)
    third.after_load_model(None, runner())
    assert len(descendants(os.getpid())) - before == ({refused!r} == "nothing")
    forward(third, ["hsx1-0a0b0c0d-7-1-5"], [5])
    """
    said = run(tmp_path, folder, program)
    assert logged in said
    assert ("capture.no_writer_process" in said or "capture.memory_unshared" in said) == bool(logged)
    fresh = folder.parent / "fresh"
    assert [path.name for path in fresh.glob("hsx1*")] == ["hsx1-0a0b0c0d-7-1-5.safetensors"]
    assert state_from_json((fresh / STATE_NAME).read_text()).published == 1
