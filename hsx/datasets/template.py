"""A model's own chat template: conversations to text and to the spans of the assistant's text in it.

Stock templates do not mark the assistant's text, and some drop turns without a word. So every conversation is rendered
twice, as `hsx.datasets.frame` tells. Where the rendering is not the frame filled with the turns' text (a template that drops,
rewrites or escapes text), the row is refused instead of guessed at. A template that marks the assistant's text itself, with
`{% generation %}`, is believed as to where it is, and held to the same proof.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from hsx.datasets.frame import PLACEHOLDER, Places, Segment, edges, filled, framed, result_forms, without_thinking
from hsx.datasets.tokenizer import RawTokenizer
from hsx.datasets.turns import Call, Turn
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

Tools = list[dict[str, Any]]
Spans = tuple[tuple[int, int], ...]
_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_MESSAGE: Final = "<|eom_id|>"  # Llama's, after a call
_PROBE_CALL: Final = Call("probe_function", {"probe_key": "probe_value"})


class TemplateError(Exception):
    """This conversation cannot be rendered, or not be told apart from the template's own text; the message says why."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: the whole rendering.
        spans: [start, end) in characters of each assistant turn: what the model writes after the generation prompt, with the
            end-of-turn token where the template writes one; or what the template itself marks.
    """

    text: str
    spans: Spans


@dataclass(frozen=True, slots=True)
class Style:
    """How conversations are rendered.

    Attributes:
        thinking: `template`: as the template does, which may leave it out; `keep`: a row of which it leaves some out is
            refused; `drop`: it is taken out before rendering.
        last_turn: only the last assistant turn counts for the loss.
        arguments: further variables for the template, such as `enable_thinking`.
    """

    thinking: Literal["template", "keep", "drop"] = "template"
    last_turn: bool = False
    arguments: Mapping[str, Any] | None = None

    def fingerprint(self) -> dict[str, str]:
        """What differs from the defaults, so that a job that was begun before there was a choice goes on."""
        found: dict[str, str] = {"dataset.thinking": self.thinking} if self.thinking != "template" else {}
        if self.last_turn:
            found["dataset.loss_on"] = "last"
        if self.arguments:
            found["dataset.template_args"] = json.dumps(dict(self.arguments), sort_keys=True)
        return found


class ChatTemplate:
    """The chat template of a model folder, and its tokenizer.

    Args:
        model: folder with `tokenizer.json` and, with the template, `tokenizer_config.json` or `chat_template.jinja`.
        override: a Jinja file that replaces the model's template.
        style: how conversations are rendered.

    Raises:
        RunError: `chat_unavailable` where the extra `chat`, the tokenizer or a template is missing, or the tokenizer
            contradicts its own configuration.
    """

    def __init__(self, model: Path, override: Path | None = None, style: Style | None = None) -> None:
        try:
            import jinja2
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            raise RunError("chat_unavailable", f"{error}; conversations need hsx with its extra 'chat'") from error
        self.tokenizer = RawTokenizer(model)
        self._style = style or Style()
        self._template = _template(model, self.tokenizer.settings, override)
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
        self._marks = _GENERATION.search(self._template) is not None
        self._call_form: tuple[str | None, bool] | None = None
        self._ends: frozenset[str] | None = None

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of `tokenizer.json` and of the template's text, and how it is used."""
        template = hashlib.sha256(self._template.encode()).hexdigest()
        return {
            "dataset.tokenizer": self.tokenizer.sha256,
            "dataset.chat_template": template,
            **self._style.fingerprint(),
        }

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and their [start, end) characters in `text`; no special token is added, the template wrote them."""
        return self.tokenizer.encode(text)

    def render(self, turns: Sequence[Turn], tools: Tools | None = None) -> Rendered:
        """Renders a conversation and finds the assistant's text in it.

        Args:
            turns: the conversation.
            tools: the functions that the model may call.

        Raises:
            TemplateError: the template refuses the conversation, drops or rewrites a turn's text, or its frame is ambiguous.
        """
        given = [without_thinking(turn) for turn in turns] if self._style.thinking == "drop" else list(turns)
        text, marks = self._apply(given, tools)
        found = self._placed(text, given, tools, results=True)
        if found is None and any(turn.role == "tool" for turn in given):
            found = self._placed(text, given, tools, results=False)
        if found is None:
            raise TemplateError("the rendering is not the template's own text with the turns' text in it: a turn was rewritten")
        spans = self._marked(found, marks) if self._marks else self._spans(text, found)
        return Rendered(text, self._last(spans, found) if self._style.last_turn else spans)

    def _placed(self, text: str, turns: list[Turn], tools: Tools | None, *, results: bool) -> _Found | None:
        """Where each piece of text is in the rendering; None where it is not the frame filled with them."""
        segments, frames = framed(turns, results=results)
        frame, _ = self._apply(frames, tools)
        pieces = PLACEHOLDER.split(frame)
        literals, order = pieces[::2], [int(number) for number in pieces[1::2]]
        self._check(turns, segments, order)
        for number, turn in enumerate(turns, 1):
            if turn.role == "tool" and not results and not any(form in frame for form in result_forms(turn.content)):
                raise TemplateError(f"the template leaves out or rewrites the text of turn {number} (role 'tool')")
        for name in map(_tool_name, tools or ()):
            if not any(name in literal for literal in literals):
                raise TemplateError(f"the template leaves out the declared function {name!r}")
        places = filled(text, literals, [segments[number].forms for number in order])
        return None if places is None else _Found(turns, frames, segments, order, places, tools)

    def _check(self, turns: list[Turn], segments: list[Segment], order: list[int]) -> None:
        """Every piece of text is there, and the assistant's are there once."""
        times = Counter(order)
        for number, segment in enumerate(segments):
            turn = turns[segment.turn]
            shown = times[number]
            if shown == 0 and not (segment.thinking and self._may_leave_out(turn)):
                what = "thinking" if segment.thinking else "text"
                hint = "; dataset.thinking = 'drop' takes it out" if segment.thinking else ""
                raise TemplateError(f"the template leaves out the {what} of turn {segment.turn + 1} (role {turn.role!r}){hint}")
            if shown > 1 and turn.role == "assistant":
                raise TemplateError(
                    f"the template writes the text of turn {segment.turn + 1} (role {turn.role!r}) {shown} times"
                )

    def _may_leave_out(self, turn: Turn) -> bool:
        """Whether thinking may go: not where it must be kept, and not where the template knows no field for it."""
        knows = not turn.thinking or "reasoning_content" in self._template or "thinking" in self._template
        return self._style.thinking != "keep" and knows

    def _spans(self, text: str, found: _Found) -> Spans:
        spans = []
        prompts: dict[tuple[str, str, bool], str] = {}
        for turn, (first, last) in found.bounds.items():
            given = found.turns[turn]
            if given.role != "assistant":
                continue
            floor = found.floor[turn]
            before, after = edges(found.framed[turn].content)
            start = first - len(before) if before and text.endswith(before, floor, first) else first
            end = last + len(after) if after and text.startswith(after, last) else last
            # Each prompt takes two renderings of all turns before it. Where the template wrote the same before a turn, after a
            # turn of the same kind, it is the same prompt: thousands of turns would take thousands of renderings otherwise.
            before_it = found.turns[turn - 1] if turn else None
            kind = (text[floor:start], before_it.role if before_it else "", bool(before_it and before_it.calls))
            if kind not in prompts:
                prompts[kind] = self._prompt_of(found.turns[:turn], found.tools)[1]
            prompt = prompts[kind]
            at = text.rfind(prompt, floor, start) if prompt else -1
            if at < 0 and given.calls and not given.content.strip():
                # What frames the call is the assistant's: it begins where the rendering of the earlier turns ends.
                earlier, _ = self._prompt_of(found.turns[:turn], found.tools)
                if not (floor <= len(earlier) <= start and text.startswith(earlier)):
                    raise TemplateError(
                        f"it cannot be told where the call of turn {turn + 1} begins: no generation prompt is there"
                    )
                start = len(earlier)
            begin = at + len(prompt) if at >= 0 else start
            stop = self._end_of_call(text, end, found, turn) if given.calls else end + self._end_of_turn(text, end)
            spans.append((begin, stop))
        return tuple(spans)

    def _marked(self, found: _Found, marks: Spans) -> Spans:
        """What the template marks; no other turn's text may be in it."""
        ends = [end for _, end in marks]
        for turn, (first, last) in found.bounds.items():
            after = bisect_right(ends, first)
            if found.turns[turn].role != "assistant" and after < len(marks) and marks[after][0] < last:
                raise TemplateError(
                    f"the template marks the text of turn {turn + 1} (role {found.turns[turn].role!r}) as generated"
                )
        return marks

    def _last(self, spans: Spans, found: _Found) -> Spans:
        last = max((number for number, turn in enumerate(found.turns) if turn.role == "assistant"), default=-1)
        if last not in found.bounds:
            return ()
        first, end = found.bounds[last]
        return tuple(span for span in spans if span[0] < end and first < span[1])

    def _prompt_of(self, turns: list[Turn], tools: Tools | None) -> tuple[str, str]:
        """The rendering of `turns`, and what the template adds to make the model speak; each "" where that cannot be told."""
        try:
            (without, _), (prompted, _) = self._apply(turns, tools), self._apply(turns, tools, prompt=True)
        except TemplateError:
            return "", ""
        return without, prompted[len(without) :] if prompted.startswith(without) else ""

    def _end_of_turn(self, text: str, end: int) -> int:
        """Length of the white space and special token that follow the assistant's text; 0 where none does."""
        begin = end
        while begin < len(text) and text[begin].isspace():
            begin += 1
        token = next((token for token in self.tokenizer.added if text.startswith(token, begin)), None)
        return begin - end + len(token) if token else 0

    def _end_of_call(self, text: str, end: int, found: _Found, turn: int) -> int:
        """Where a turn that ends with a call ends: after the first end-of-turn token before the next turn's text."""
        after = bisect_left(found.places, (end, 0))
        limit = found.places[after][0] if after < len(found.places) else len(text)
        if turn + 1 < len(found.turns) and turn + 1 not in found.bounds:  # a result that was left in the frame
            later = (text.find(form, end, limit) for form in result_forms(found.turns[turn + 1].content))
            limit = min((at for at in later if at >= 0), default=limit)
        ends = [text.find(token, end, limit) + len(token) for token in self._end_tokens() if text.find(token, end, limit) >= 0]
        if not ends:
            raise TemplateError(f"it cannot be told where the call of turn {turn + 1} ends: no end-of-turn token follows it")
        return min(ends)

    def _end_tokens(self) -> frozenset[str]:
        """The tokens that end a turn: what this template writes after a plain answer, and the tokenizer's end of text."""
        if self._ends is None:
            found = {
                self.tokenizer.special.get("eos_token", ""),
                _END_OF_MESSAGE if _END_OF_MESSAGE in self.tokenizer.added else "",
            }
            try:
                text, _ = self._apply([Turn("user", "probe_question"), Turn("assistant", "probe_answer")], None)
            except TemplateError:
                text = ""
            at = text.find("probe_answer") + len("probe_answer")
            found.add(text[at : at + self._end_of_turn(text, at)].strip())
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
                    text, _ = self._apply(turns, None)
                except TemplateError:
                    continue
                if _PROBE_CALL.name in text and '"probe_value"' in text:
                    return form
            self._call_form = ("", True)
        return self._call_form

    def _apply(self, turns: Sequence[Turn], tools: Tools | None, *, prompt: bool = False) -> tuple[str, Spans]:
        messages = [self._message(turn) for turn in turns]
        variables = {**self.tokenizer.special, **(self._style.arguments or {})}
        try:
            texts, marks = self._render(
                [messages],
                tools=tools or None,
                chat_template=self._template,
                return_assistant_tokens_mask=self._marks,
                add_generation_prompt=prompt,
                **variables,
            )
        except self._failures as error:
            raise TemplateError(f"the template refuses the conversation: {type(error).__name__}: {error}") from error
        return str(texts[0]), tuple((start, end) for start, end in marks[0]) if self._marks else ()

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


class _Found:
    """Where each turn's text stands in a rendering.

    Attributes:
        bounds: of each turn with text, in order: from its first to behind its last piece.
        floor: of each of them, where the text before it ends.
    """

    def __init__(
        self,
        turns: list[Turn],
        frames: list[Turn],
        segments: list[Segment],
        order: list[int],
        places: Places,
        tools: Tools | None,
    ) -> None:
        self.turns, self.framed, self.places, self.tools = turns, frames, places, tools
        bounds: dict[int, tuple[int, int]] = {}
        self.floor: dict[int, int] = {}
        end_before = 0
        for number, (start, end) in zip(order, places, strict=True):
            turn = segments[number].turn
            first, _ = bounds.get(turn, (start, end))
            self.floor.setdefault(turn, end_before)
            bounds[turn] = (min(first, start), end)
            end_before = end
        self.bounds = dict(sorted(bounds.items()))


def _call_message(call: Call, *, as_object: bool) -> dict[str, Any]:
    arguments = call.arguments if as_object else json.dumps(call.arguments, ensure_ascii=False)
    named = {"id": call.call_id} if call.call_id else {}
    return {**named, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))


def _template(model: Path, settings: dict[str, Any], override: Path | None) -> str:
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
