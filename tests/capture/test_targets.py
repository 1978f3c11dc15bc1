"""What the plugin uses of SGLang is looked up in a package's source, and named where it is not there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hsx.capture.targets import missing_at_run_time, missing_in_source
from hsx.core.epoch import RECORD_NAME, RECORD_VARIABLE, REFUSAL_NAME, EpochRecord, to_json

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sglang_source.py"

# As little of SGLang as has every target; some of it in the shapes that versions differ in.
FILES = {
    "__init__.py": "",
    "srt/__init__.py": "",
    "srt/plugins/__init__.py": "",
    "srt/plugins/hook_registry.py": """
from enum import Enum

class HookType(Enum):
    BEFORE = 1
    AFTER = 2
    AROUND = 3

class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None): ...
""",
    "srt/model_executor/__init__.py": "",
    "srt/model_executor/model_runner.py": """
class Base:
    def load_model(self): ...

class ModelRunner(Base):
    def __init__(self, model_config, server_args, is_draft_worker=False):
        self.model_config, self.server_args = model_config, server_args
        self.is_draft_worker: bool = is_draft_worker
        self.model = None

    def load_model(self): ...
    def forward(self, forward_batch, pp_proxy_tensors=None): ...
""",
    "srt/model_executor/forward_batch_info.py": """
from dataclasses import dataclass
from enum import Enum

class ForwardMode(Enum):
    EXTEND = 1
    MIXED = 2

class Mixin:
    rids: list

@dataclass
class ForwardBatch(Mixin):
    forward_mode: ForwardMode
    input_ids: object
    extend_prefix_lens_cpu: list
    input_embeds: object
    mm_inputs: list
    extend_seq_lens_cpu: list
    rids: list
""",
    "srt/server_args.py": "class ServerArgs: ...\n",
    "srt/arg_groups/fields/parallel.py": "class Parallel:\n    tp_size: int\n    pp_size: int\n    dp_size: int\n"
    "    nnodes: int\n    node_rank: int\n",
    "srt/configs/__init__.py": "",
    "srt/configs/model_config.py": """
class ModelConfig:
    def __init__(self):
        self.num_hidden_layers = self.hidden_size = self.vocab_size = self.dtype = 1
""",
    "srt/distributed/__init__.py": "",
    "srt/distributed/parallel_state.py": (
        "from sglang.srt.distributed.elsewhere import get_attn_tensor_model_parallel_rank\n"
        "def get_attn_tensor_model_parallel_world_size(): ...\n"
    ),
    "srt/distributed/elsewhere.py": "if True:\n    def get_attn_tensor_model_parallel_rank(): ...\n",
    "srt/layers/__init__.py": "",
    "srt/layers/logits_processor.py": """
class LogitsProcessor:
    def forward(
        self, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, hidden_states_before_norm=None
    ): ...
""",
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "sglang" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "sglang"


def test_all_is_found_where_versions_keep_it(package: Path) -> None:
    assert missing_in_source(package) == []


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (
            "srt/model_executor/model_runner.py",
            "def forward(",
            "def run(",
            "hook ModelRunner.forward: sglang.srt.model_executor.model_runner.ModelRunner.forward is not there",
        ),
        (
            "srt/model_executor/model_runner.py",
            "self, forward_batch",
            "self, batch",
            "hook ModelRunner.forward: sglang.srt.model_executor.model_runner.ModelRunner.forward takes "
            "(self, batch, pp_proxy_tensors); expected it to begin with (self, forward_batch)",
        ),
        (
            "srt/model_executor/forward_batch_info.py",
            "extend_seq_lens_cpu",
            "extend_lens_cpu",
            "hook ModelRunner.forward: sglang.srt.model_executor.forward_batch_info.ForwardBatch has no extend_seq_lens_cpu",
        ),
        (
            "srt/layers/logits_processor.py",
            "aux_hidden_states=None, ",
            "",
            "hook LogitsProcessor.forward: sglang.srt.layers.logits_processor.LogitsProcessor.forward takes",
        ),
        (
            "srt/arg_groups/fields/parallel.py",
            "pp_size",
            "pipeline_size",
            "hook ModelRunner.load_model: sglang.srt.server_args.ServerArgs has no pp_size",
        ),
        ("srt/plugins/hook_registry.py", "HookRegistry", "Hooks", "hook plugin: sglang.srt.plugins.hook_registry.HookRegistry"),
    ],
)
def test_what_moved_is_named_with_its_hook(package: Path, file: str, old: str, new: str, says: str) -> None:
    path = package / file
    path.write_text(path.read_text().replace(old, new))
    found = missing_in_source(package)
    assert len(found) == 1
    assert found[0].startswith(says)


def test_a_process_looks_at_its_own_modules(package: Path) -> None:
    """In a process of its own, which imports the little package; the real one is asked in tests/sglang."""
    path = package / "srt/server_args.py"  # its fields come from elsewhere at run time
    path.write_text("class ServerArgs:\n    tp_size = pp_size = dp_size = nnodes = node_rank = 1\n")
    program = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        f"from hsx.capture.targets import missing_at_run_time\nprint(missing_at_run_time())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "[]\n"), run.stderr
    path = package / "srt/model_executor/forward_batch_info.py"
    path.write_text(path.read_text().replace("MIXED", "BOTH").replace("rids", "requests"))
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "ForwardBatch has no rids" in run.stdout
    assert "ForwardMode has no MIXED" in run.stdout


def test_without_sglang_everything_is_missing() -> None:
    assert all("is not there" in sentence for sentence in missing_at_run_time())


def test_the_script_reads_wheels_and_folders(package: Path, tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-9.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(f"sglang/{name}", text.replace("load_model", "load"))

    def run(*places: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, str(SCRIPT), *map(str, places)], capture_output=True, text=True)

    assert (run(package.parent).returncode, run(package.parent).stdout) == (0, f"{package.parent}: all there\n")
    done = run(package.parent, wheel)
    assert (done.returncode, done.stdout.splitlines()[1]) == (1, f"{wheel}: 1 missing")
    assert "hook ModelRunner.load_model" in done.stdout
    assert run(tmp_path / "nothing").returncode == 2
    assert run().returncode == 2


def test_the_plugin_refuses_by_the_hooks_name(package: Path, tmp_path: Path) -> None:
    """SGLang would log the missing target and serve on; the boot gate reads what the plugin leaves in the epoch's folder."""
    path = package / "srt/layers/logits_processor.py"
    path.write_text(path.read_text().replace("def forward", "def apply"))
    (package / "srt/server_args.py").write_text("class ServerArgs:\n    tp_size = pp_size = dp_size = nnodes = node_rank = 1\n")
    epoch = "11111111-2222-4333-8444-555555555555"
    record = EpochRecord(epoch, "b", 1, 1, "", ("x",), "m", "", (1,), "post_norm", "sglang", "9.9", "0", "127.0.0.1", 1)
    (tmp_path / RECORD_NAME).write_text(to_json(record))
    program = f"import sys; sys.path.insert(0, {str(package.parent)!r})\nfrom hsx.capture.plugin import register\nregister()"
    environment = {**os.environ, RECORD_VARIABLE: str(tmp_path / RECORD_NAME)}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = (tmp_path / REFUSAL_NAME).read_text()
    assert found.startswith(
        "sglang 9.9 is not as hsx knows it: hook LogitsProcessor.forward: sglang.srt.layers.logits_processor."
    )
    assert found.endswith("is not there (type object 'LogitsProcessor' has no attribute 'forward')\n")
