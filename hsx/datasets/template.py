"""A model's own chat template: conversations to text and to the spans of the assistant's text in it.

Stock templates do not mark the assistant's text, and some drop turns without a word. So every conversation is rendered
twice, as `hsx.datasets.frame` tells. Where the rendering is not the frame filled with the turns' text (a template that drops,
rewrites or escapes text), the row is refused instead of guessed at. A template that marks the assistant's text itself, with
`{% generation %}`, is believed as to where it is, and held to the same proof.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hsx.datasets.assistant import assistant_spans, require_whole_marks
from hsx.datasets.frame import filled, framed, marks_for, numbers_framed, result_forms, without_thinking
from hsx.datasets.placing import Placed, Spans, TemplateError, Tools
from hsx.datasets.rendering import Renderer, read_template
from hsx.datasets.tokenizer import RawTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from hsx.datasets.frame import Marks, Segment
    from hsx.datasets.turns import Turn


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
        self.tokenizer = RawTokenizer(model)
        self._style = style or Style()
        self._template = read_template(model, self.tokenizer.settings, override)
        self._renderer = Renderer(self._template, self.tokenizer, self._style.arguments)

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
        text, generated = self._renderer.apply(given, tools)
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
        if self._renderer.marks:
            require_whole_marks(text, found, generated)
        spans = generated if self._renderer.marks else assistant_spans(self._renderer, text, found)
        found.require_faithful(spans, marked=self._renderer.marks)
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
        frame, _ = self._renderer.apply(frames, tools)
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
            without, _ = self._renderer.apply(turns, None)
        except TemplateError:
            return
        if without == text:
            raise TemplateError("the template leaves out the declared functions")

    def _require_numbers(self, marks: Marks, turns: list[Turn], tools: Tools | None) -> None:
        """The numbers among the arguments of calls are rendered, too. They cannot be placed: templates decide by their type."""
        count, frames = numbers_framed(turns, marks)
        if count:
            shown = set(marks.split(self._renderer.apply(frames, tools)[0])[1::2])
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
        return self._style.thinking != "keep" and (not turn.thinking or self._renderer.knows_thinking())

    def _chosen(self, spans: Spans, found: Placed) -> Spans:
        """The spans of the turns that count: not those that the dataset leaves out; with `last_turn` of the last one alone."""
        turns = [number for number, turn in enumerate(found.turns) if turn.role == "assistant"]
        if not self._style.last_turn and all(found.turns[number].counts for number in turns):
            return spans
        chosen = turns[-1:] if self._style.last_turn else turns
        return found.of_turns(spans, {number for number in chosen if found.turns[number].counts})


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))
