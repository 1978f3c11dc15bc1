"""Conversations made to confuse: what counts is what the assistant says, all of it and nothing else, or the row is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hsx.datasets.fields import Bad
from hsx.datasets.placing import TemplateError
from hsx.datasets.spans import span_mask
from hsx.datasets.template import ChatTemplate
from hsx.testing.chats import FAMILIES, PARTS, SPECIAL, conversation

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

    from hsx.datasets.turns import Turn

EXAMPLES: Final = 20
ENDS: Final = {
    "glm": ("", *(f"<|{role}|>" for role in ("user", "assistant", "system", "tool"))),
    "inst": ("</s>",),
    "deepseek": ("</s>",),
    "llama3": ("<|eot_id|>", ""),
    "gemma": ("<end_of_turn>", ""),
}
"""What ends a turn, where it is not ChatML's token; nothing where it is no special token."""
TOKENIZERS: Final = ("bytes", "merges", "no specials")


def write_tokenizer(folder: Path, kind: str) -> None:
    """Byte-level: without merges; with merges over any border, as it splits at special tokens only; and without even those."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [] if kind == "bytes" else [one + two for one in PARTS for two in PARTS]
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    )
    special = SPECIAL if kind != "no specials" else ("<s>", "</s>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], ChatTemplate]:
    made = {}
    for kind in TOKENIZERS:
        folder = tmp_path_factory.mktemp("hostile") / kind
        write_tokenizer(folder, kind)
        for name, template in FAMILIES.items():
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
            made[name, kind] = ChatTemplate(folder)
    return made


def said(template: ChatTemplate, turns: list[Turn]) -> list[str] | None:
    """The text of each run of tokens that count; None for a row that is refused."""
    try:
        rendered = template.render(turns)
        ids, offsets = template.encode(rendered.text)
        mask = span_mask(rendered.text, offsets, rendered.spans).tolist()
    except (TemplateError, Bad):
        return None
    assert template.tokenizer.decode(ids) == rendered.text
    runs: list[list[int]] = []
    for at, token in enumerate(ids):
        if mask[at]:
            if not at or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return [template.tokenizer.decode(run) for run in runs]


def matches(name: str, run: str, thought: str, content: str) -> bool:
    """Whether a run is this text, with what a template adds to it: the token that ends the turn, and a block of thinking."""
    text = f"{thought}</think>{content}" if thought else content
    wanted = {squeezed(before + text) for before in ("", "<think>", *(() if thought else ("<think></think>", "</think>")))}
    return any(run.endswith(end) and squeezed(run.removesuffix(end)) in wanted for end in ENDS.get(name, ("<|im_end|>",)))


def squeezed(text: str) -> str:
    """Without white space: how much of it a template keeps is not in question here."""
    return "".join(text.split())


def problem(name: str, turns: list[Turn], runs: list[str]) -> str:
    """What is wrong with what counts; "" for nothing."""
    thinks = name in ("qwen3", "thinker")
    texts = [
        (turn.thinking.strip() if thinks and turn is turns[-1] else "", turn.content.strip())
        for turn in turns
        if turn.role == "assistant"
    ]
    texts = [text for text in texts if any(text) or name == "marked"]  # that one marks the end of a turn without text, too
    if len(runs) != len(texts):
        return f"{len(runs)} runs of tokens count; expected {len(texts)}"
    wrong = [(run, text) for run, text in zip(runs, texts, strict=True) if not matches(name, run, *text)]
    return f"{wrong[0][0]!r} counts; expected {wrong[0][1]!r}" if wrong else ""


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=False), thoughts=st.booleans())
def test_what_counts(
    templates: dict[tuple[str, str], ChatTemplate], name: str, kind: str, random: Random, thoughts: bool
) -> None:
    turns = conversation(random, thoughts=thoughts)
    runs = said(templates[name, kind], turns)
    assert runs is None or not problem(name, turns, runs)


def test_the_conversations_are_not_all_refused(templates: dict[tuple[str, str], ChatTemplate]) -> None:
    from random import Random

    random = Random(7)
    made = [conversation(random, thoughts=False) for _ in range(40)]
    for name in FAMILIES:
        taken = sum(said(templates[name, "bytes"], turns) is not None for turns in made)
        assert taken >= 5, (name, taken)
