"""Templates that misbehave: dropped and rewritten turns, stripped thinking, ambiguous frames."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from hsx.datasets.assistant import EXACT
from hsx.datasets.placing import TemplateError
from hsx.datasets.template import ChatTemplate, Style
from hsx.datasets.turns import Turn
from hsx.errors import RunError

Model = Callable[[str | None], Path]

# The traits of Qwen3's template: unknown roles vanish, thinking is cut from earlier turns, an empty block is added to the last.
THINKING = r"""{%- for m in messages -%}
{%- if m.role == 'user' or m.role == 'system' -%}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
{%- set thought = '' -%}{%- set content = m.content -%}
{%- if '</think>' in content -%}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{ '<|im_start|>assistant\n' }}
{%- if loop.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif -%}
{{ content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}"""


def spans(template: ChatTemplate, *turns: tuple[str, str]) -> list[str]:
    rendered = template.render([Turn(role, content) for role, content in turns])
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_thinking_cut_from_earlier_turns_is_fine(model_with: Model) -> None:
    template = ChatTemplate(model_with(THINKING))
    found = spans(
        template,
        ("user", "1+1?"),
        ("assistant", "<think>\neasy\n</think>\n\nTwo."),
        ("user", "2+2?"),
        ("assistant", "<think>\nalso easy\n</think>\n\nFour."),
    )
    assert found == ["Two.<|im_end|>", "<think>\nalso easy\n</think>\n\nFour.<|im_end|>"]


def test_block_that_the_template_adds_after_the_generation_prompt_is_the_assistants(model_with: Model) -> None:
    template = ChatTemplate(model_with(THINKING))
    assert spans(template, ("user", "a"), ("assistant", "b")) == ["<think>\n\n</think>\n\nb<|im_end|>"]


def test_dropped_turn_is_an_error_not_a_shorter_sample(model_with: Model) -> None:
    template = ChatTemplate(model_with(THINKING))
    with pytest.raises(TemplateError, match=r"leaves out the text of turn 2 \(role 'critic'\)"):
        template.render([Turn("user", "a"), Turn("critic", "b"), Turn("assistant", "c")])


def test_unnormalised_roles_do_not_render_to_nothing(model_with: Model) -> None:
    template = ChatTemplate(model_with(THINKING))
    with pytest.raises(TemplateError, match="leaves out the text of turn 1"):
        template.render([Turn("human", "a"), Turn("gpt", "b")])


@pytest.mark.parametrize(
    "text", ["user", "assistant", "<|im_end|>", "", "\n", "<think>", "</think>x", "a</think>b<think>c", "0", "\ue0f00"]
)
def test_text_that_looks_like_the_frame(model_with: Model, text: str) -> None:
    template = ChatTemplate(model_with(PLAIN))
    rendered = template.render([Turn("user", text), Turn("assistant", f"x{text}"), Turn("user", text)])
    (span,) = rendered.spans
    assert rendered.text[slice(*span)] == f"x{text}<|im_end|>"


PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_stripping_template_is_followed(model_with: Model) -> None:
    template = ChatTemplate(model_with(PLAIN.replace("m.content", "m.content | trim")))
    assert spans(template, ("user", " a "), ("assistant", "\n b c \n")) == ["b c<|im_end|>"]


@pytest.mark.parametrize("change", ["m.content | upper", "m.content | escape", "m.content.replace('b', 'bb')"])
def test_rewriting_template_is_refused(model_with: Model, change: str) -> None:
    template = ChatTemplate(model_with(PLAIN.replace("m.content", change)))
    with pytest.raises(TemplateError, match="a turn was rewritten"):
        template.render([Turn("user", "a<b"), Turn("assistant", "b")])


def test_assistant_text_written_twice_is_refused(model_with: Model) -> None:
    template = ChatTemplate(model_with(PLAIN.replace("m.content", "m.content + m.content")))
    with pytest.raises(TemplateError, match="2 times"):
        template.render([Turn("user", "a"), Turn("assistant", "b")])


def test_template_that_raises_is_quoted(model_with: Model) -> None:
    template = ChatTemplate(model_with("{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([Turn("user", "a")])


@pytest.mark.parametrize(
    ("template", "failure"),
    [
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.there }}", "UndefinedError"),
        ("{{ 'a'.encode('nonsense') }}", "LookupError"),
        ("{{ 'a'.encode('utf-8').decode('utf-16') }}", "UnicodeDecodeError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
    ],
)
def test_template_that_fails_costs_the_row_and_not_the_run(model_with: Model, template: str, failure: str) -> None:
    with pytest.raises(TemplateError, match=f"refuses the conversation: {failure}"):
        ChatTemplate(model_with(template)).render([Turn("user", "a")])


def test_without_end_of_turn_token_the_span_is_the_text(model_with: Model) -> None:
    template = ChatTemplate(model_with("{% for m in messages %}{{ '[' + m.role + '] ' + m.content + '\n' }}{% endfor %}"))
    assert spans(template, ("user", "a"), ("assistant", "b c"), ("user", "d")) == ["b c"]


def test_template_file_and_override(model_with: Model, tmp_path: Path) -> None:
    model = model_with(PLAIN)
    (model / "chat_template.jinja").write_text("J{{ messages[0].content }}", encoding="utf-8")
    assert ChatTemplate(model).render([Turn("user", "a")]).text == "Ja"
    override = tmp_path / "mine.jinja"
    override.write_text("M{{ messages[0].content }}", encoding="utf-8")
    assert ChatTemplate(model, override).render([Turn("user", "a")]).text == "Ma"


def test_named_templates_use_the_default(model_with: Model) -> None:
    model = model_with(None)
    config = {
        "chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ messages[0].content }}"}]
    }
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert ChatTemplate(model).render([Turn("user", "a")]).text == "Da"


def test_saved_truncation_does_not_cut_samples(model_with: Model) -> None:
    from tokenizers import Tokenizer

    model = model_with(PLAIN)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=900)
    tokenizer.save(str(model / "tokenizer.json"))
    assert len(ChatTemplate(model).encode("x" * 500)[0]) == 500


def unavailable(model: Path, override: Path | None = None) -> str:
    with pytest.raises(RunError) as caught:
        ChatTemplate(model, override)
    assert caught.value.kind == "chat_unavailable"
    return caught.value.message


def test_no_tokenizer(tmp_path: Path) -> None:
    assert "tokenizer.json does not exist" in unavailable(tmp_path)


def test_no_template(model_with: Model) -> None:
    assert "no chat template" in unavailable(model_with(None))


def test_missing_override(model_with: Model, tmp_path: Path) -> None:
    assert "none.jinja cannot be read" in unavailable(model_with(PLAIN), tmp_path / "none.jinja")


def test_damaged_tokenizer(model_with: Model) -> None:
    model = model_with(PLAIN)
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "cannot be loaded" in unavailable(model)


def test_damaged_settings(model_with: Model) -> None:
    model = model_with(PLAIN)
    for content, expected in (("{", "cannot be read"), ("[]", "expected a JSON object")):
        (model / "tokenizer_config.json").write_text(content, encoding="utf-8")
        assert expected in unavailable(model)


def test_special_token_with_another_id_than_declared(model_with: Model) -> None:
    model = model_with(PLAIN)
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["added_tokens_decoder"] = {"1": {"content": "<|im_start|>"}, "7": {"content": "<|im_end|>"}}
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "'<|im_end|>' the id 2; tokenizer_config.json says 7" in unavailable(model)


def test_tokenizer_that_loses_white_space(model_with: Model) -> None:
    from tokenizers import Tokenizer, pre_tokenizers

    model = model_with(PLAIN)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    assert "loses white space" in unavailable(model)


class Counted(Mapping[str, str]):
    """No variables for a template, and how often it was asked for them: once a rendering."""

    def __init__(self) -> None:
        self.renderings = 0

    def __getitem__(self, name: str) -> str:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        self.renderings += 1
        return iter(())

    def __len__(self) -> int:
        return 1


def test_renderings_do_not_grow_with_the_turns(model_with: Model) -> None:
    """Or a conversation of megabytes takes minutes: each of them renders all turns before it. Only the first have their own."""
    model = model_with(THINKING)
    counts = []
    for pairs in (EXACT, 300):
        counted = Counted()
        turns = [(role, f"{role} {number}") for number in range(pairs) for role in ("user", "assistant")]
        found = spans(ChatTemplate(model, style=Style(arguments=counted)), *turns)
        assert found[1:-1] == [f"assistant {number}<|im_end|>" for number in range(1, pairs - 1)]
        assert found[-1] == f"<think>\n\n</think>\n\nassistant {pairs - 1}<|im_end|>"
        counts.append(counted.renderings)
    assert counts[0] == counts[1] > 0
