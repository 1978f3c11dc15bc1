"""Calls, declared functions, thinking, marks of the template's own, names of roles: as templates render them, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hsx.core.spec import ModelShape
from hsx.datasets import open_dataset
from hsx.datasets.fields import Bad, Columns, JsonFields
from hsx.datasets.placing import TemplateError
from hsx.datasets.template import ChatTemplate, Style
from hsx.datasets.turns import Call, Turn, turns_of
from hsx.records import BadRow, Row
from hsx.testing.jobs import dataset_config

Model = Callable[[str | None], Path]
SHAPE = ModelShape(hidden_size=8, layers=4, vocab_size=259, context_length=4096)
WRITE = "'<|im_start|>' + m.role + '\n' + m.content"
CALLS = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{{ " + WRITE + " }}{% for c in m.tool_calls or [] %}"
    "{{ '[' + c.function.name + ' ' }}{{ ARGUMENTS }}{{ ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
AS_OBJECT = CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")
AS_TEXT = CALLS.replace("ARGUMENTS", "'' + c.function.arguments")
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{{ '<|im_end|>' }}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)


def spans(template: ChatTemplate, turns: list[Turn], tools: list[dict[str, Any]] | None = None) -> list[str]:
    rendered = template.render(turns, tools)
    return [rendered.text[start:end] for start, end in rendered.spans]


def normalised(turns: list[dict[str, Any]], roles: dict[str, str] | None = None) -> list[Turn]:
    return turns_of(JsonFields(json.dumps({"messages": turns}).encode()), Columns(), roles or {})


ARGUMENTS = {"city": 'Zü"rich\n', "days": 3, "more": ["x", {"y": "z"}]}


@pytest.mark.parametrize("template", [AS_OBJECT, AS_TEXT], ids=["object", "text"])
def test_calls_in_the_form_that_the_template_takes(model_with: Model, template: str) -> None:
    turns = [Turn("user", "?"), Turn("assistant", "Wait. ", calls=(Call("f", ARGUMENTS), Call("g", {}))), Turn("tool", "20")]
    (said,) = spans(ChatTemplate(model_with(template)), turns)
    assert said == "Wait. [f " + json.dumps(ARGUMENTS, ensure_ascii=False) + "][g {}]<|im_end|>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("c.function.name + ' '", "' '"), "leaves out the text of turn 2"),
        (("c.function.arguments | tojson", "''"), "leaves out the text of turn 2"),
        (("<|im_end|>\n' }}{% endfor", "\n' }}{% endfor"), "cannot be told where the call of turn 2 ends"),
        (("t.function.name", "''"), "leaves out the declared function 'f'"),
    ],
)
def test_what_a_template_leaves_out_of_calls(model_with: Model, change: tuple[str, str], words: str) -> None:
    template = ChatTemplate(model_with(AS_OBJECT.replace(*change)))
    turns = [Turn("user", "?"), Turn("assistant", "", calls=(Call("f", {"x": "y"}),)), Turn("user", "ok")]
    with pytest.raises(TemplateError, match=words):
        spans(template, turns, [{"type": "function", "function": {"name": "f"}}])


FORMS = [
    [{"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}]}],
    [{"from": "gpt", "value": "", "tool_calls": [{"name": "f", "arguments": {"x": 1}, "id": "1"}]}],
    [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}', "id": "1"}}],
    [{"from": "function_call", "value": '{"id": "1", "name": "f", "arguments": {"x": 1}}'}],
    [{"role": "assistant", "content": "", "tool_calls": '[{"id": "1", "name": "f", "parameters": {"x": 1}}]'}],
]


@pytest.mark.parametrize("turns", FORMS)
def test_forms_of_a_call(turns: list[dict[str, Any]]) -> None:
    assert normalised(turns) == [Turn("assistant", "", calls=(Call("f", {"x": 1}, "1"),))]


def test_thinking_beside_a_call_that_is_text() -> None:
    turn = {"from": "function_call", "value": '{"name": "f", "arguments": {}}', "reasoning_content": "hm"}
    assert normalised([turn]) == [Turn("assistant", "", "hm", (Call("f", {}),))]


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]},
            "the arguments of 'f' is not JSON",
        ),
        ({"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": [1]}]}, "calls 'f' with a list"),
        ({"role": "assistant", "content": "", "tool_calls": [3]}, "has an integer as a call"),
        ({"role": "function_call", "content": "no JSON"}, "is not JSON"),
        ({"role": "assistant", "content": "x", "reasoning": 5}, "has an integer as thinking"),
    ],
)
def test_bad_calls(turn: dict[str, Any], words: str) -> None:
    with pytest.raises(Bad, match=words) as caught:
        normalised([turn])
    assert caught.value.reason == "bad_chat"


def test_roles_are_named_by_a_table_each_message_by_itself() -> None:
    given = [
        ("human", "user"),
        ("gpt", "assistant"),
        ("observation", "tool"),
        ("system", "system"),
        ("critic", "judge"),
        ("x", "x"),
    ]
    turns = [{"from": name, "value": "t"} if at % 2 else {"role": name, "content": "t"} for at, (name, _) in enumerate(given)]
    assert [turn.role for turn in normalised(turns, {"critic": "judge"})] == [role for _, role in given]


def test_marks_of_the_template_are_believed_and_proved(model_with: Model) -> None:
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "c"), Turn("assistant", "d")]
    assert spans(ChatTemplate(model_with(MARKED)), turns) == ["b", "d"]
    wrong = ChatTemplate(model_with(MARKED.replace("== 'assistant'", "== 'user'")))
    with pytest.raises(TemplateError, match=r"marks the text of turn 1 \(role 'user'\) as generated"):
        wrong.render(turns)


@pytest.mark.parametrize("template", [AS_OBJECT, MARKED], ids=["plain", "marked"])
def test_only_the_last_turn(model_with: Model, template: str) -> None:
    last = ChatTemplate(model_with(template), style=Style(last_turn=True))
    turns = [Turn("assistant", "a"), Turn("user", "b"), Turn("assistant", "c"), Turn("user", "d")]
    assert [said.removesuffix("<|im_end|>") for said in spans(last, turns)] == ["c"]
    assert spans(last, [Turn("assistant", "a"), Turn("assistant", "")]) == []
    assert spans(last, [Turn("user", "a")]) == []


THINKER = AS_OBJECT.replace(
    WRITE, "'<|im_start|>' + m.role + '\n' + (m.content.split('</think>')[-1] if not loop.last else m.content)"
)


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ("template", ["one<|im_end|>", "<think>b</think>two<|im_end|>"]),
        ("keep", "leaves out the thinking of turn 1"),
        ("drop", ["one<|im_end|>", "two<|im_end|>"]),
    ],
)
def test_thinking(model_with: Model, thinking: Any, expected: list[str] | str) -> None:
    template = ChatTemplate(model_with(THINKER), style=Style(thinking=thinking))
    turns = [Turn("assistant", "<think>a</think>one"), Turn("user", "?"), Turn("assistant", "<think>b</think>two")]
    if isinstance(expected, list):
        assert spans(template, turns) == expected
        return
    with pytest.raises(TemplateError, match=expected):
        template.render(turns)


def test_thinking_in_a_field_that_the_template_does_not_know(model_with: Model) -> None:
    turns = [Turn("user", "?"), Turn("assistant", "a", thinking="hm")]
    with pytest.raises(TemplateError, match=r"leaves out the thinking of turn 2.*dataset.thinking = 'drop'"):
        ChatTemplate(model_with(AS_OBJECT)).render(turns)
    assert spans(ChatTemplate(model_with(AS_OBJECT), style=Style(thinking="drop")), turns) == ["a<|im_end|>"]


def test_result_that_the_template_writes_in_another_way_where_it_is_json(model_with: Model) -> None:
    picky = AS_OBJECT.replace("m.content", "('#' + m.content if m.role == 'tool' and m.content[0] in '{2' else m.content)")
    turns = [Turn("assistant", "", calls=(Call("f", {}),)), Turn("tool", '{"t": 20}'), Turn("assistant", "20")]
    assert spans(ChatTemplate(model_with(picky)), turns) == ["[f {}]<|im_end|>", "20<|im_end|>"]
    rewritten = AS_OBJECT.replace("m.content", "('#' if m.role == 'tool' and m.content[0] in '{2' else m.content)")
    with pytest.raises(TemplateError, match="leaves out or rewrites the text of turn 2"):
        ChatTemplate(model_with(rewritten)).render(turns)


def test_settings_reach_the_template_and_the_fingerprint(tmp_path: Path, model_with: Model) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"id": 1, "messages": [{"role": "narrator", "content": "a"}], "tools": '[{"function": {"name": "f"}}]'}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = model_with("{{ extra }}{{ tools[0].function.name }}{% for m in messages %}{{ m.role + m.content }}{% endfor %}")
    settings: dict[str, Any] = {
        "template_args": {"extra": "E"},
        "roles": {"narrator": "user"},
        "loss_on": "last",
        "thinking": "drop",
    }
    dataset = open_dataset(dataset_config(path, model, **settings), SHAPE)
    (row,) = dataset
    assert isinstance(row, Row), row
    assert len(row.input_ids) == len("Efusera")
    plain = open_dataset(dataset_config(path, model), SHAPE).fingerprint()
    more = dataset.fingerprint()
    assert {key: more[key] for key in more.keys() - plain.keys()} == {
        "dataset.roles": "[('narrator', 'user')]",
        "dataset.template_args": '{"extra": "E"}',
        "dataset.loss_on": "last",
        "dataset.thinking": "drop",
    }


@pytest.mark.parametrize("tools", [5, "{", [3]])
def test_bad_tools(tmp_path: Path, chat_model: Path, tools: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"id": 1, "messages": [{"role": "user", "content": "a"}], "tools": tools}), encoding="utf-8")
    (row,) = open_dataset(dataset_config(path, chat_model), SHAPE)
    assert isinstance(row, BadRow)
    assert row.reason == "bad_chat"


def test_conversations_of_a_table_have_no_fields_of_other_rows(tmp_path: Path, chat_model: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    rows = [
        {"id": "a", "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"id": "b", "messages": [{"role": "assistant", "content": "a", "reasoning_content": "hm"}]},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    first, second = open_dataset(dataset_config(tmp_path / "rows.parquet", chat_model), SHAPE)
    assert isinstance(first, Row), first
    assert isinstance(second, BadRow)
    assert "leaves out the thinking" in second.message
