"""Tiny random models with a real tokenizer, made on the spot: what the tests serve and recompute.

`make(kind, folder)` writes a Hugging Face model folder: float32 weights, drawn from a fixed seed, and a byte-level BPE
tokenizer with a chat template, trained on a text that ships with this package. The weights are drawn wide enough
(`initializer_range` 0.08) that neighbouring layers differ by far more than rounding does.

    python -m hsx.testing.tiny_models llama FOLDER
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Final, Literal, get_args

Kind = Literal["llama", "qwen3", "dsv3", "glm4moe", "granite"]
"""Llama; Qwen3 (with norms on queries and keys); DeepSeek-V3 (multi-head latent attention, mixture of experts); GLM-4-MoE
(mixture of experts with plain attention); Granite (multipliers on embeddings, residual, attention and logits)."""
KINDS: Final[tuple[str, ...]] = get_args(Kind)

LAYERS: Final = 8
HIDDEN_SIZE: Final = 256
VOCAB_SIZE: Final = 1000
CONTEXT_LENGTH: Final = 4096
SPECIAL_TOKENS: Final = ("<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>")
_ROLES: Final = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=False))
CHAT_TEMPLATE: Final = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make(kind: Kind, folder: Path, seed: int = 0) -> Path:
    """Writes the model `kind` into `folder` (made if missing) and returns it. Equal seeds give equal weights.

    Needs the extra `hf`; imports torch and transformers, and leaves torch's global random state as it was.
    """
    import torch
    from transformers import (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        Glm4MoeConfig,
        Glm4MoeForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    shape = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 512,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8 if kind == "dsv3" else 4,
        "max_position_embeddings": CONTEXT_LENGTH,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "llama":
            model = LlamaForCausalLM(LlamaConfig(head_dim=32, **shape))
        elif kind == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(head_dim=32, **shape))
        elif kind == "glm4moe":
            model = Glm4MoeForCausalLM(Glm4MoeConfig(head_dim=32, **_MOE, **shape))
        elif kind == "granite":
            model = GraniteForCausalLM(GraniteConfig(**_MULTIPLIERS, **shape))
        else:
            model = DeepseekV3ForCausalLM(DeepseekV3Config(**_MLA, **shape))
        for name, parameter in model.named_parameters():
            if "bias" in name:  # the constructor leaves the router's correction bias uninitialised
                torch.nn.init.zeros_(parameter)
            elif "norm" in name:  # all ones by default, which would hide a norm that is applied twice or not at all
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_tokenizer(folder: Path) -> None:
    """Writes the tokenizer with its chat template into `folder`: `VOCAB_SIZE` ids at most, no unknown token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([files("hsx.testing").joinpath("corpus.txt").read_text(encoding="utf-8")], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_ROLES)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


_MOE: Final = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "use_qk_norm": True,
}
_MULTIPLIERS: Final = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_MLA: Final = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 64,
    "rope_parameters": {
        "rope_type": "yarn",
        "type": "yarn",
        "rope_theta": 10000.0,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def main(arguments: list[str]) -> int:
    """`KIND FOLDER`; returns the exit code."""
    if len(arguments) != 2 or arguments[0] not in KINDS:
        sys.stderr.write(f"usage: python -m hsx.testing.tiny_models {{{','.join(KINDS)}}} FOLDER\n")
        return 2
    for kind in get_args(Kind):
        if kind == arguments[0]:
            make(kind, Path(arguments[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
