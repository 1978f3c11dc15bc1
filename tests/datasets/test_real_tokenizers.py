"""Masks under the tokenizers and templates of models that people use: what counts is what the assistant says."""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hsx.datasets.agreement import compare, require_agreement
from hsx.datasets.fields import Bad
from hsx.datasets.placing import TemplateError
from hsx.datasets.spans import span_mask
from hsx.datasets.template import ChatTemplate
from hsx.datasets.tokenizer import RawTokenizer
from hsx.datasets.turns import Call, Turn
from hsx.errors import RunError
from hsx.testing.chats import conversation
from hsx.testing.real_tokenizers import MISTRAL, NAMES, fetch, folder_of, is_there

CACHE = Path(__file__).parents[2] / "build" / "tokenizers"
FAMILIES = (*NAMES, MISTRAL)
pytestmark = pytest.mark.slow

HELLO = "Hello 😀,\n\n```py\nx = 1  # é\n```"
CONVERSATION = [
    Turn("system", "You are kind."),
    Turn("user", "hi <|assistant|>"),
    Turn("assistant", HELLO),
    Turn("user", "bye, assistant"),
    Turn("assistant", "Grüße, 日本!"),
]
END = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
}
NO_THOUGHT = {"qwen3": "<think>\n\n</think>\n\n"}
"""What the template adds to the last answer."""


@dataclass(frozen=True)
class Family:
    name: str
    folder: Path
    template: ChatTemplate

    def said(self, turns: list[Turn], tools: list[dict[str, Any]] | None = None, *, exact: bool = True) -> list[str]:
        """The text of each run of tokens that count; `exact`: all tokens give the rendering, which a normaliser may change."""
        rendered = self.template.render(turns, tools)
        ids, offsets = self.template.encode(rendered.text)
        mask = span_mask(rendered.text, offsets, rendered.spans).tolist()
        runs: list[list[int]] = []
        for at, (token, counts) in enumerate(zip(ids, mask, strict=True)):
            if counts and (at == 0 or not mask[at - 1]):
                runs.append([])
            if counts:
                runs[-1].append(token)
        assert not exact or self.template.tokenizer.decode(ids) == rendered.text
        return [self.template.tokenizer.decode(run) for run in runs]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Without the tokenizers, tests fail in CI and are skipped elsewhere."""
    name = request.param
    folder = folder_of(name, CACHE)
    if not is_there(name, CACHE):
        reason = f"{folder} is missing; run scripts/setup_tokenizers.sh"
        assert os.environ.get("CI", "").lower() != "true", reason
        pytest.skip(reason)
    return Family(name, folder, ChatTemplate(folder))


def test_what_counts_is_what_the_assistant_says(family: Family) -> None:
    end = END[family.name]
    assert family.said(CONVERSATION) == [HELLO + end, NO_THOUGHT.get(family.name, "") + "Grüße, 日本!" + end]
    text = family.template.render(CONVERSATION).text
    ids, _ = family.template.encode(text)
    start = family.template.tokenizer.special.get("bos_token")
    if start is not None:
        assert text.count(start) == 1
        assert ids.count(family.template.tokenizer.encode(start)[0][0]) == 1


WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "", "parameters": {"type": "object"}}}
CALL = Turn("assistant", "", calls=(Call("get_weather", {"city": 'Zü"rich', "days": 3}, "abcdefghi"),))
RESULT = Turn("tool", '{"t": 20}', name="get_weather", call_id="abcdefghi")
ARGUMENTS = '{"city": "Zü\\"rich", "days": 3}'
SAID_BY_CALLING: dict[str, str | list[str]] = {
    "qwen3": [
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\n20 degrees.<|im_end|>",
    ],
    "mistral": [f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}]</s>', "20 degrees.</s>"],
    "deepseek_v3": "cannot be told where the call of turn 2 ends",
    "llama3_1": "leaves out the text of turn 2",
    "gemma3": "roles must alternate",
}


def test_calls_count_as_what_the_assistant_says_or_the_row_is_refused(family: Family) -> None:
    turns = [Turn("user", "Weather?"), CALL, RESULT, Turn("assistant", "20 degrees.")]
    expected = SAID_BY_CALLING[family.name]
    if isinstance(expected, list):
        assert family.said(turns) == expected
        assert family.said(turns, [WEATHER]) == expected
        return
    with pytest.raises(TemplateError, match=expected):
        family.said(turns)


def test_two_calls_where_the_template_ends_only_those(family: Family) -> None:
    if family.name != "deepseek_v3":
        return
    two = Turn("assistant", "", calls=(Call("a", {"x": "1"}), Call("b", {"y": "2"})))
    first, last = family.said([Turn("user", "?"), two, Turn("tool", "1"), Turn("tool", "2"), Turn("assistant", "3")])
    assert first.startswith("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n")
    assert first.endswith("<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
    assert last == "3<｜end▁of▁sentence｜>"


def test_unknown_roles_and_conversations_of_unknown_form_are_never_dropped(family: Family) -> None:
    if family.name == "llama3_1":  # its template writes any role
        assert family.said([Turn("critic", "x"), Turn("assistant", "y")]) == ["y<|eot_id|>"]
        return
    with pytest.raises(TemplateError):
        family.said([Turn("user", "a"), Turn("critic", "b"), Turn("assistant", "c")])


def test_transformers_own_class_may_be_wrong_where_ours_is_right(family: Family) -> None:
    """A tokenizer of bytes that is labelled Llama's loses its white space there; the file itself is right."""
    if family.name != "deepseek_v3":
        return
    ids, _ = family.template.encode("How are you doing?")
    assert family.template.tokenizer.decode(ids) == "How are you doing?"


def with_class(folder: Path, made: Path, name: str) -> RawTokenizer:
    """The same tokenizer, said to be of another class."""
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    (made / "tokenizer.json").symlink_to(folder / "tokenizer.json")
    (made / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": name}), encoding="utf-8")
    return RawTokenizer(made)


def test_tokenizer_that_transformers_loads_otherwise_is_found_out(family: Family, tmp_path: Path) -> None:
    found = compare(family.template.tokenizer)
    if family.name != "deepseek_v3":
        assert found.loaded
        assert found.difference is None, found
    if family.name == "deepseek_v3":
        assert found.difference is not None
        assert len(found.difference.theirs) != len(found.difference.ours)
        # What the message advises.
        assert compare(with_class(family.folder, tmp_path, "PreTrainedTokenizerFast")).difference is None
    elif family.name == "qwen3":
        with pytest.raises(RunError, match="AutoTokenizer") as caught:
            require_agreement(with_class(family.folder, tmp_path, "LlamaTokenizerFast"))
        assert caught.value.kind == "chat_unavailable"


def test_mistral_gives_the_tokens_of_its_makers_own_library(family: Family) -> None:
    if family.name != "mistral":
        return
    import mistral_common
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    theirs = MistralTokenizer.from_file(str(Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"))
    for turns in (CONVERSATION[:4], CONVERSATION[1:4]):
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        expected = theirs.encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
        assert family.template.encode(family.template.render(turns).text)[0] == expected


def squeezed(text: str) -> str:
    """Without white space, which templates strip, and as the normalisers of Qwen and Gemma write it."""
    return unicodedata.normalize("NFC", "".join(text.split()))


def test_conversations_made_to_confuse(family: Family) -> None:
    end, taken = END[family.name], 0
    for seed in range(150):
        turns = conversation(Random(seed), thoughts=False)
        together = any(one.role == other.role == "assistant" for one, other in pairwise(turns))
        if together and family.name == "mistral":
            continue  # its template makes one turn of them
        try:
            runs = family.said(turns, exact=False)
        except (TemplateError, Bad):
            continue
        taken += 1
        texts = [squeezed(turn.content) for turn in turns if turn.role == "assistant" and turn.content.strip()]
        assert [squeezed(run.removesuffix(end)).removeprefix("<think></think>") for run in runs] == texts, turns
        assert all(run.endswith(end) for run in runs)
    assert taken > 20


def test_package_that_cannot_be_downloaded(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="could not be downloaded") as caught:
        fetch("not a name", tmp_path)
    assert caught.value.kind == "dependency_missing"
