"""The demo's model against transformers' own GGUF loader, and the demo's dataset under its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from hsx.core.spec import ModelShape
from hsx.datasets.chat import ChatRows
from hsx.datasets.jsonl import JsonlFile
from hsx.datasets.rows import Limits
from hsx.datasets.template import ChatTemplate
from hsx.errors import RunError
from hsx.model_config import read_model_shape
from hsx.records import Row
from hsx.testing import smollm2

DEMO = Path(__file__).parents[2] / "demo" / "chat.jsonl"


@pytest.fixture(scope="module")
def model(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared anew: that is what is tested here."""
    return smollm2.prepare(tmp_path_factory.mktemp("smollm2") / "model", smollm2_gguf)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_tensors_are_those_of_transformers(model: Path, smollm2_gguf: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    ours = load_file(model / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(model)
    theirs = load_gguf_checkpoint(str(smollm2_gguf), return_tensors=True, model_to_load=loaded)["tensors"]
    assert ours.keys() == theirs.keys()
    assert len(ours) == 272
    different = [
        name
        for name, tensor in ours.items()
        if not torch.equal(torch.as_tensor(theirs[name]).to(torch.bfloat16).view(torch.int16), tensor.view(torch.int16))
    ]
    assert different == []
    assert loaded.config.rope_parameters["rope_theta"] == 100_000.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shape_and_tokenizer(model: Path) -> None:
    assert read_model_shape(model) == ModelShape(hidden_size=576, layers=30, vocab_size=49152, context_length=8192)
    from transformers import AutoTokenizer

    template = ChatTemplate(model)
    text = "Grüße 😀 12345\n\n\tdef f(x): return x<|im_end|>日本"
    ids, _ = template.encode(text)
    assert ids == AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False).input_ids


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_prepared_folder_is_left_alone(model: Path, tmp_path: Path) -> None:
    before = (model / "model.safetensors").stat().st_mtime_ns
    assert smollm2.prepare(model, tmp_path / "no such file") == model
    assert (model / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_dataset_under_its_own_template(model: Path) -> None:
    rows = list(ChatRows(JsonlFile(DEMO), Limits(49152, 8184), ChatTemplate(model)))
    assert all(isinstance(row, Row) for row in rows)
    lengths = sorted(len(row.input_ids) for row in rows if isinstance(row, Row))
    assert sum(lengths) <= 17_500  # what the demo may take is said in its documentation
    assert lengths[-1] > 1400
    assert sum(length > 512 for length in lengths) >= 6
    assert min(int(row.loss_mask.sum()) for row in rows if isinstance(row, Row)) == 2


def test_package_that_cannot_be_installed(tmp_path: Path) -> None:
    (tmp_path / "cache.partial").mkdir()
    # Not a version, so pip refuses it before it asks any index.
    with pytest.raises(RunError, match="could not be installed") as caught:
        smollm2.fetch_gguf(tmp_path / "cache", version="no version")
    assert caught.value.kind == "dependency_missing"
