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
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from hsx.datasets.frame import TAGS, edges, filled, framed, marks_for, numbers_framed, result_forms, without_thinking
from hsx.datasets.placing import Placed, Spans, TemplateError, Tools
from hsx.datasets.tokenizer import RawTokenizer
from hsx.datasets.turns import Call, Turn
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hsx.datasets.frame import Marks, Segment

_GENERATION: Final = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END_OF_MESSAGE: Final = "<|eom_id|>"  # Llama's, after a call
SHOWN: Final = 40
EXACT: Final = 32
"""Turns of a conversation before each of which the generation prompt is rendered; behind them it is what it was there."""
_PROBE_CALL: Final = Call("probe_function", {"probe_key": "probe_value"})


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
        self._knows: bool | None = None

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
        given = self._without_thinking(turns) if self._style.thinking == "drop" else list(turns)
        text, generated = self._apply(given, tools)
        marks = marks_for(text)
        if marks is None:
            raise TemplateError("it has every character for private use; expected some that can stand for text")
        found = self._placed(text, marks, given, tools, results=True)
        if found is None and any(turn.role == "tool" for turn in given):
            found = self._placed(text, marks, given, tools, results=False)
        if found is None:
            raise TemplateError("the rendering is not the template's own text with the turns' text in it: a turn was rewritten")
        self._require_tools(text, given, tools)
        self._require_numbers(marks, given, tools)
        spans = self._marked(text, found, generated) if self._marks else self._spans(text, found)
        found.require_faithful(spans, marked=self._marks)
        return Rendered(text, self._chosen(spans, found))

    def _without_thinking(self, turns: Sequence[Turn]) -> list[Turn]:
        given = [without_thinking(turn) for turn in turns]
        for number, turn in enumerate(given, 1):
            if turn.role == "assistant" and ("<think>" in turn.content or "</think>" in turn.content):
                raise TemplateError(f"it cannot be told what of turn {number} is thinking: its tags do not match")
        return given

    def _placed(self, text: str, marks: Marks, turns: list[Turn], tools: Tools | None, *, results: bool) -> Placed | None:
        """Where each piece of text is in the rendering; None where it is not the frame filled with them."""
        segments, frames = framed(turns, marks, results=results)
        frame, _ = self._apply(frames, tools)
        pieces = marks.split(frame)
        literals, order = pieces[::2], [int(number) for number in pieces[1::2]]
        self._check(turns, segments, order)
        for number, turn in enumerate(turns, 1):
            if turn.role == "tool" and not results and not any(form in frame for form in result_forms(turn.content)):
                raise TemplateError(f"the template leaves out or rewrites the text of turn {number} (role 'tool')")
        for name in map(_tool_name, tools or ()):
            if not any(name in literal for literal in literals):
                raise TemplateError(f"the template leaves out the declared function {name!r}")
        places = filled(text, literals, [segments[number].forms for number in order])
        if places is None:
            return None
        return Placed(turns, frames, marks, segments, order, places, tools, results=results)

    def _require_tools(self, text: str, turns: list[Turn], tools: Tools | None) -> None:
        """Declared functions change the rendering: that a name is in it says little where it is a common word."""
        if not tools:
            return
        try:
            without, _ = self._apply(turns, None)
        except TemplateError:
            return
        if without == text:
            raise TemplateError("the template leaves out the declared functions")

    def _require_numbers(self, marks: Marks, turns: list[Turn], tools: Tools | None) -> None:
        """The numbers among the arguments of calls are rendered, too. They cannot be placed: templates decide by their type."""
        count, frames = numbers_framed(turns, marks)
        if count:
            shown = set(marks.split(self._apply(frames, tools)[0])[1::2])
            if len(shown) < count:
                raise TemplateError("the template leaves out a number among the arguments of a call")

    def _check(self, turns: list[Turn], segments: list[Segment], order: list[int]) -> None:
        """Every piece of text is there, and the assistant's are there once."""
        counts = Counter(order)
        for number, segment in enumerate(segments):
            turn = turns[segment.turn]
            shown = counts[number]
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
        return self._style.thinking != "keep" and (not turn.thinking or self._knows_thinking())

    def _knows_thinking(self) -> bool:
        """Whether the template renders that field, at least of a last turn. Its source does not tell (`enable_thinking`)."""
        if self._knows is None:
            turns = [Turn("user", "probe_question"), Turn("assistant", "probe_answer", "probe_thought")]
            try:
                self._knows = "probe_thought" in self._apply(turns, None)[0]
            except TemplateError:
                self._knows = False
        return self._knows

    def _spans(self, text: str, found: Placed) -> Spans:
        spans = []
        prompts: dict[tuple[str, str, bool], set[str]] = {}
        for turn, (first, last) in found.bounds.items():
            given = found.turns[turn]
            if given.role != "assistant":
                continue
            _, after = edges(found.framed[turn].content, found.marks)
            end = last + len(after) if after and text.startswith(after, last) else last
            spans.append((self._begin(text, found, turn, first, prompts), self._end(text, found, turn, end)))
        return tuple(spans)

    def _begin(self, text: str, found: Placed, turn: int, first: int, prompts: dict[tuple[str, str, bool], set[str]]) -> int:
        """Where what the model writes begins: behind the generation prompt; where there is none, with the text.

        A prompt takes two renderings of all turns before it; thousands of turns would take thousands of renderings. So behind
        `EXACT` turns, where the template wrote the same before a turn, after a turn of the same kind, it is taken from
        `prompts`; not where those differ, as a template may look into a question for what it lets the model think.
        """
        given, floor = found.turns[turn], found.floor[turn]
        before_it = found.turns[turn - 1] if turn else None
        kind = (text[floor:first], before_it.role if before_it else "", bool(before_it and before_it.calls))
        seen = prompts.setdefault(kind, set())
        if turn < EXACT or len(seen) != 1:
            prompt = self._prompt_of(found.turns[:turn], found.tools)[1]
            seen.add(prompt)
        else:
            (prompt,) = seen
        at = text.rfind(prompt, floor, first) if prompt else -1
        if at >= 0:
            found.require_own(prompt, turn)
            return at + len(prompt)
        before, _ = edges(found.framed[turn].content, found.marks)
        start = first - len(before) if before and text.endswith(before, floor, first) else first
        called = bool(given.calls) and not given.content.strip()
        if not called and not text[floor:start][-1:].isspace():
            return start  # no white space to decide about: the renderings would say the same
        earlier, _ = self._prompt_of(found.turns[:turn], found.tools)
        follows = floor <= len(earlier) <= start and text.startswith(earlier)
        if called:
            # What frames the call is the assistant's: it begins where the rendering of the earlier turns ends.
            if not follows:
                raise TemplateError(f"it cannot be told where the call of turn {turn + 1} begins: it has no generation prompt")
            return len(earlier)
        # Templates of Llama 2's kind end a prompt without white space, and begin the answer with some: the model writes it.
        return len(earlier) if follows and not text[len(earlier) : start].strip() else start

    def _end(self, text: str, found: Placed, turn: int, end: int) -> int:
        """Where what the model writes ends: with the token that ends the turn, else with the text."""
        limit = found.next_text(end, len(text))
        if found.turns[turn].calls or found.last[turn].thinking:
            return self._end_without_text(text, found, turn, end, limit)
        direct = self._end_of_turn(text, end, limit)
        token = text[end : end + direct].strip()
        if token in self._end_tokens():
            return end + direct
        # The template may close a block of thinking by itself before it ends the turn.
        stop = self._first_end(text, end, limit)
        if stop is not None and not TAGS.sub("", text[end : stop[0]]).strip():
            return stop[1]
        return end if TAGS.fullmatch(token) else end + direct

    def _marked(self, text: str, found: Placed, marks: Spans) -> Spans:
        """What the template marks: all of it has to be text of the assistant's, with what stands around it."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted(marks):
            if spans and not text[spans[-1][1] : start].strip():
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            elif text[start:end].strip():
                spans.append((start, end))
        silent = any(turn.role == "assistant" and number not in found.bounds for number, turn in enumerate(found.turns))
        for start, end in () if silent else spans:
            if not any(start <= piece.start < end for piece in found.pieces):
                raise TemplateError(f"the template marks {text[start:end][:SHOWN]!r} as generated, which is no turn's text")
        return marks

    def _chosen(self, spans: Spans, found: Placed) -> Spans:
        """The spans of the turns that count: not those that the dataset leaves out; with `last_turn` of the last one alone."""
        turns = [number for number, turn in enumerate(found.turns) if turn.role == "assistant"]
        if not self._style.last_turn and all(found.turns[number].counts for number in turns):
            return spans
        chosen = turns[-1:] if self._style.last_turn else turns
        return found.of_turns(spans, {number for number in chosen if found.turns[number].counts})

    def _prompt_of(self, turns: list[Turn], tools: Tools | None) -> tuple[str, str]:
        """The rendering of `turns`, and what the template adds to make the model speak; each "" where that cannot be told."""
        try:
            (without, _), (prompted, _) = self._apply(turns, tools), self._apply(turns, tools, prompt=True)
        except TemplateError:
            return "", ""
        return without, prompted[len(without) :] if prompted.startswith(without) else ""

    def _end_of_turn(self, text: str, end: int, limit: int) -> int:
        """Length of the white space and special token that follow the assistant's text, before `limit`; 0 where none does."""
        begin = end
        while begin < limit and text[begin].isspace():
            begin += 1
        token = next((token for token in self.tokenizer.added if text.startswith(token, begin, limit)), None)
        return begin - end + len(token) if token else 0

    def _first_end(self, text: str, end: int, limit: int) -> tuple[int, int] | None:
        """The first token that ends a turn in this part of the rendering."""
        found = ((text.find(token, end, limit), len(token)) for token in self._end_tokens())
        return min(((at, at + size) for at, size in found if at >= 0), default=None)

    def _end_without_text(self, text: str, found: Placed, turn: int, end: int, limit: int) -> int:
        """Where a turn ends that ends with a call or with thinking: after the first end-of-turn token before the next turn."""
        if turn + 1 < len(found.turns) and turn + 1 not in found.bounds:
            # The next turn has no text, or its text stayed in the frame: its own end must not be taken for this one's.
            later = (text.find(form, end, limit) for form in result_forms(found.turns[turn + 1].content) if form)
            limit = min((at for at in later if at >= 0), default=limit)
            whole, _ = self._prompt_of(found.turns[: turn + 1], found.tools)
            limit = min(limit, len(whole)) if end <= len(whole) and text.startswith(whole) else limit
        stop = self._first_end(text, end, limit)
        if stop is None:
            what = "call" if found.turns[turn].calls else "thinking"
            raise TemplateError(f"it cannot be told where the {what} of turn {turn + 1} ends: no end-of-turn token follows it")
        return stop[1]

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
            found.add(text[at : at + self._end_of_turn(text, at, len(text))].strip())
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
