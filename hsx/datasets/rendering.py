"""A model's chat template as a program that is run, and what is found out of it by running it on probes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from hsx.datasets.placing import Spans, TemplateError, Tools
from hsx.datasets.turns import Call, Turn
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hsx.datasets.tokenizer import RawTokenizer

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_MESSAGE: Final = "<|eom_id|>"  # Llama's, after a call
_PROBE_CALL: Final = Call("probe_function", {"probe_key": "probe_value"})


class Renderer:
    """Runs a template.

    Args:
        template: its text.
        tokenizer: of the same model.
        arguments: further variables for the template.

    Attributes:
        marks: whether the template marks itself what the assistant generates.

    Raises:
        RunError: `chat_unavailable` where the extra `chat` is missing.
    """

    def __init__(self, template: str, tokenizer: RawTokenizer, arguments: Mapping[str, Any] | None = None) -> None:
        try:
            import jinja2
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise RunError("chat_unavailable", f"{error}; conversations need hsx with its extra 'chat'") from error
        self._template = template
        self._tokenizer = tokenizer
        self._arguments = arguments or {}
        self._render = render_jinja_template
        # A template is a program: it fails on what it is given as any Python expression does, or says no by raise_exception.
        self._failures = (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        )
        self.marks = _GENERATION.search(template) is not None
        self._call_form: tuple[str | None, bool] | None = None
        self._ends: frozenset[str] | None = None
        self._knows: bool | None = None

    def apply(self, turns: Sequence[Turn], tools: Tools | None, *, prompt: bool = False) -> tuple[str, Spans]:
        """The conversation as text, and what the template marks of it, [start, end) in characters.

        Args:
            turns: the conversation.
            tools: the functions that the model may call.
            prompt: whether what makes the model speak is added.

        Raises TemplateError: the template refuses it.
        """
        messages = [self._message(turn) for turn in turns]
        variables = {**self._tokenizer.special, **self._arguments}
        try:
            texts, marks = self._render(
                [messages],
                tools=tools or None,
                chat_template=self._template,
                return_assistant_tokens_mask=self.marks,
                add_generation_prompt=prompt,
                **variables,
            )
        except self._failures as error:
            raise TemplateError(f"the template refuses the conversation: {type(error).__name__}: {error}") from error
        return str(texts[0]), tuple((start, end) for start, end in marks[0]) if self.marks else ()

    def prompt_of(self, turns: list[Turn], tools: Tools | None) -> tuple[str, str]:
        """The rendering of `turns`, and what the template adds to make the model speak; each "" where that cannot be told."""
        try:
            (without, _), (prompted, _) = self.apply(turns, tools), self.apply(turns, tools, prompt=True)
        except TemplateError:
            return "", ""
        return without, prompted[len(without) :] if prompted.startswith(without) else ""

    def knows_thinking(self) -> bool:
        """Whether the template renders that field, at least of a last turn. Its source does not tell (`enable_thinking`)."""
        if self._knows is None:
            turns = [Turn("user", "probe_question"), Turn("assistant", "probe_answer", "probe_thought")]
            try:
                self._knows = "probe_thought" in self.apply(turns, None)[0]
            except TemplateError:
                self._knows = False
        return self._knows

    def end_of_turn(self, text: str, end: int, limit: int) -> int:
        """Length of the white space and special token that follow the assistant's text, before `limit`; 0 where none does."""
        begin = end
        while begin < limit and text[begin].isspace():
            begin += 1
        token = next((token for token in self._tokenizer.added if text.startswith(token, begin, limit)), None)
        return begin - end + len(token) if token else 0

    def first_end(self, text: str, end: int, limit: int) -> tuple[int, int] | None:
        """The first token that ends a turn in this part of the rendering."""
        found = ((text.find(token, end, limit), len(token)) for token in self.end_tokens())
        return min(((at, at + size) for at, size in found if at >= 0), default=None)

    def end_tokens(self) -> frozenset[str]:
        """The tokens that end a turn: what this template writes after a plain answer, and the tokenizer's end of text."""
        if self._ends is None:
            found = {
                self._tokenizer.special.get("eos_token", ""),
                _END_OF_MESSAGE if _END_OF_MESSAGE in self._tokenizer.added else "",
            }
            try:
                text, _ = self.apply([Turn("user", "probe_question"), Turn("assistant", "probe_answer")], None)
            except TemplateError:
                text = ""
            at = text.find("probe_answer") + len("probe_answer")
            found.add(text[at : at + self.end_of_turn(text, at, len(text))].strip())
            self._ends = frozenset(found - {""})
        return self._ends

    def _form_of_calls(self) -> tuple[str | None, bool]:
        """How this template takes calls: the content of a turn without text, and whether arguments are an object.

        Templates differ: some concatenate the arguments as text, and some take a turn for a call only if its content is null.
        The first form that renders a call's name and argument is taken.
        """
        if self._call_form is None:
            turns = [Turn("user", "probe_question"), Turn("assistant", "", calls=(_PROBE_CALL,))]
            for form in (("", True), (None, True), ("", False), (None, False)):
                self._call_form = form
                try:
                    text, _ = self.apply(turns, None)
                except TemplateError:
                    continue
                if _PROBE_CALL.name in text and '"probe_value"' in text:
                    return form
            self._call_form = ("", True)
        return self._call_form

    def _message(self, turn: Turn) -> dict[str, Any]:
        message: dict[str, Any] = {"role": turn.role, "content": turn.content}
        if turn.thinking:
            message |= {"reasoning_content": turn.thinking, "thinking": turn.thinking}
        if turn.name:
            message["name"] = turn.name
        if turn.call_id:
            message["tool_call_id"] = turn.call_id
        if turn.calls:
            empty, as_object = self._form_of_calls()
            message["content"] = turn.content or empty
            message["tool_calls"] = [_call_message(call, as_object=as_object) for call in turn.calls]
        return message


def _call_message(call: Call, *, as_object: bool) -> dict[str, Any]:
    arguments = call.arguments if as_object else json.dumps(call.arguments, ensure_ascii=False)
    named = {"id": call.call_id} if call.call_id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def read_template(model: Path, settings: dict[str, Any], override: Path | None) -> str:
    """The text of `override`, or of the model's own template. Raises RunError `chat_unavailable`."""
    file = override or model / "chat_template.jinja"
    if override or file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunError("chat_unavailable", f"chat template {file} cannot be read: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}.get("default")
    if not isinstance(template, str) or not template:
        raise RunError(
            "chat_unavailable",
            f"{model} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json; "
            "set dataset.chat_template",
        )
    return template
