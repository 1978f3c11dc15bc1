"""Writes docs/compatibility.md from what hsx knows of SGLang's versions and models, and what the tests have seen of them.

`pytest tests/sglang/test_equality.py` leaves one file a case in build/compatibility; then this. Rows that no test ran say what
they rest on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.capture.versions import BAD, KNOWN, OLDEST

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parent.parent

RUN_KINDS: Final = {
    "llama": "Llama, and what SGLang serves with its class",
    "qwen3": "Qwen3 (dense)",
    "dsv3": "DeepSeek-V3 (latent attention, experts); Kimi-K2, whose model is the same class",
    "glm4moe": "GLM-4-MoE (experts); its only setter is the one for eagle3",
    "granite": "Granite (multipliers); without a setter, so taken at the norms",
}
"""The tiny models of tests/sglang/test_equality.py."""

READ: Final = (
    (
        "add one, in every setter",
        "Qwen2, Qwen2-MoE, Qwen2.5-VL, Qwen3-MoE, Qwen3-Next, Qwen3-VL, Qwen3.5, Gemma 3, Gemma 4, Apertus, "
        "Bailing-MoE, EXAONE-MoE, LFM2, LongCat-Flash, MiMo-V2, MiniMax-M2 and M3, MiniCPM-V, Laguna, Nanbeige, "
        "Nemotron-H, Llama 4 (multi-modal)",
        "`model`",
    ),
    (
        "add one for dflash; for eagle3 only if the first number is 1",
        "DeepSeek-V2/V3, Kimi-K2.5, GLM-4-MoE-Lite; gpt-oss, unless the last number is that of the final state",
        "`model`, by dflash",
    ),
    (
        "add none, and take a layer's input",
        "Muse Glimmer: with k - 1, as for all others, it would give h_(k-1)",
        "`model`, told k",
    ),
    (
        "add none, and take a layer's output",
        "Beam, Muse Spark, Inkling, Kimi-K3",
        "`model`, read back in that meaning",
    ),
    (
        "have no setter",
        "Mixtral, Gemma 2, Cohere, MiniCPM, Phi, Ernie 4.5, GLM-4 (dense), Hunyuan, Granite-MoE, Llama 4 (text) and others "
        "with one input norm a layer",
        "`norms`",
    ),
    (
        "have neither a setter nor an input norm that is given h_k",
        "OLMo 2 and others that norm behind each block; DeepSeek-V4, Gemma 3n and others with several residual streams",
        "refused",
    ),
)
"""What the models' setters do with their numbers in 0.5.23: kind, models, how hsx takes the layers."""

INTRODUCTION: Final = """\
# What works with what

Made by `scripts/generate_compatibility.py`; do not edit. "Run" means that a real server was started, and every state of
its dumps compared with Hugging Face in float32. "Read" means that the source was read and has all that the plugin uses
(`scripts/check_sglang_source.py`), and nothing more: whether the states are right is then for the proof of the first
forward and for the boot canary to tell. All of it was run on a CPU; nothing here was run on a GPU unless a row says so."""

VERSIONS: Final = """\
`hsx serve` refuses versions older than {oldest}, and those known as bad ({bad}); it refuses any version whose source
lacks something that a hook needs, by the hook's name, and the plugin looks again at the loaded modules. For a version
that was only read, and for one that is not in this table, it warns."""

LAYERS: Final = """\
## Layers, by model

h_k is what the input norm of decoder layer k normalises. Models number it differently; hsx tells each model what it needs
to hear, reads back what it then holds, and compares the states of the first forward with what the norms themselves saw
([decision 22](decisions/0022-a-layer-is-what-its-norm-sees.md)). `capture.json` says which `method` was used."""

LIMITS: Final = """\
## Limits

- **h_0, `pre_norm`, and the method `norms`** are taken at module calls. Under prefill graphs these do not happen: such a
  server is refused when it starts, and told `--disable-prefill-cuda-graph`. Layers that the model hands out are not affected.
- **All-reduce and norm in one kernel** (tensor parallelism on a GPU): a layer may be handed out before the ranks' parts are
  added up. `hsx serve` turns it off, and the plugin refuses a server in which it is on.
- **h_0 of an id whose embedding is all zero** fails `nonzero_rows`.
- **Qwen3-MoE** cannot be judged on a CPU without AMX: its states are wrong there, without an error (seen: NaN). The
  router's `fused_topk` has no form for such a CPU. Mixtral and others with plain softmax routing take the same way. Their
  layers are read only.
- **A residual stream in float16 or float32** is rounded to bf16 (`capture.convert`, on by default; off, such a server
  is refused). Any other dtype is refused.
- **Refused**: pipeline parallelism, speculative decoding, prefix caches, prefill context parallelism, disaggregation,
  data-parallel ranks over several nodes, requests with images or sound."""


def page(folder: Path) -> str:
    """The page, with the results in `folder`."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    oldest = ".".join(map(str, OLDEST))
    versions = ["| SGLang | known by |", "| --- | --- |"]
    for version, how in KNOWN.items():
        kinds = sorted({result["kind"] for result in results if result["version"] == version})
        versions.append(f"| {version} | {'run: ' + (', '.join(kinds) or 'no result here') if how == 'run' else 'read'} |")
    runs = ["| model | class in SGLang | SGLang | states | chunk | method | prompts | largest error |", "| --- " * 8 + "|"]
    runs += [run_row(result) for result in results]
    layers = ["| setters | models | taken by |", "| --- | --- | --- |", *(f"| {a} | {b} | {c} |" for a, b, c in READ)]
    parts = (
        INTRODUCTION,
        "## Versions",
        "\n".join(versions),
        VERSIONS.format(oldest=oldest, bad=", ".join(BAD) or "none so far"),
        "## Run",
        "Chunks are shared between prompts of 1 to 1500 tokens, sent at once. The error is relative, per token, before "
        "rounding to bf16; the tests allow 1e-4.",
        "\n".join(runs),
        LAYERS,
        "\n".join(layers),
        LIMITS,
    )
    return "\n\n".join(parts) + "\n"


def run_row(result: dict[str, Any]) -> str:
    """One row of what was run; the error in whole powers of ten, so that it is the same on every machine."""
    states = ", ".join([*(f"h_{k}" for k in result["layers"]), result["final"]])
    error = next(limit for limit in ("1e-6", "1e-5", "1e-4", "1e-3", "1") if result["worst"] <= float(limit))
    cells = [RUN_KINDS[result["kind"]], f"`{result['architecture']}`", result["version"], states, result["chunk"]]
    return "| " + " | ".join(map(str, [*cells, f"`{result['method']}`", result["prompts"], f"under {error}"])) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the page; returns 1 where no results are found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "compatibility")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "compatibility.md")
    args = parser.parse_args(arguments)
    if not any(args.results.glob("*.json")):
        sys.stderr.write(f"{args.results} has no results; run tests/sglang/test_equality.py first\n")
        return 1
    args.page.write_text(page(args.results), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
