"""A conversation with placeholders instead of its text, and what of a rendering is the template's own.

A template is rendered twice: with the text, and with a placeholder for each piece of it. The second rendering shows what the
template itself writes and where each piece goes; the first must then be exactly that frame filled with the real text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from hsx.datasets.turns import Call, Turn

# Tags that templates look for inside a turn's text; they stay in the frame, so that the template decides alike on both.
TAGS: Final = re.compile(r"(</?(?:think|tool_call|tool_response)>)")
_EMPTY_THOUGHT: Final = frozenset(("<think>", "</think>"))
_THOUGHT: Final = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
_PRIVATE: Final = range(0xE0F0, 0xF8FE, 2)

Places = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Marks:
    """Two characters that enclose a placeholder's number.

    A rendering of the real conversation has neither of them: what is not replaced, such as the result of a tool, the name of an
    argument or the description of a function, would otherwise be taken for a placeholder.
    """

    opening: str
    closing: str

    def of(self, number: int) -> str:
        """The placeholder of a piece."""
        return f"{self.opening}{number}{self.closing}"

    def split(self, text: str) -> list[str]:
        """What stands between the placeholders, and at each odd place a placeholder's number."""
        return re.split(f"{self.opening}([0-9]+){self.closing}", text)


def marks_for(text: str) -> Marks | None:
    """Marks that a text does not have; None where it has every character for private use."""
    used = set(text)
    return next((Marks(chr(at), chr(at + 1)) for at in _PRIVATE if used.isdisjoint((chr(at), chr(at + 1)))), None)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of text of a turn.

    Attributes:
        turn: the turn, from 0.
        text: what the placeholder stands for.
        thinking: it is what the assistant thought, which templates remove from earlier turns.
    """

    turn: int
    text: str
    thinking: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """As templates may write it: as it is, or as the inside of a JSON string."""
        escaped = json.dumps(self.text, ensure_ascii=False)[1:-1]
        return (self.text,) if escaped == self.text else (self.text, escaped)


def framed(turns: list[Turn], marks: Marks, *, results: bool = True) -> tuple[list[Segment], list[Turn]]:
    """The conversation with a placeholder for every piece of text, and what the placeholders stand for.

    Args:
        turns: the conversation.
        marks: what the placeholders are made of.
        results: whether the text of tools is replaced, too. Some templates write a result that is JSON in another way than one
            that is text; then it has to stay as it is, for the template to decide alike.
    """
    segments: list[Segment] = []

    def hold(index: int, text: str, *, thinking: bool = False, whole: bool = False) -> str:
        bare = text if whole else text.strip()
        if not bare.strip():
            return text
        lead, _, trail = text.partition(bare)
        segments.append(Segment(index, bare, thinking))
        # White space around the text stays in the frame: the template strips it on both sides, or on neither.
        return f"{lead}{marks.of(len(segments) - 1)}{trail}"

    def call(index: int, given: Call) -> Call:
        return replace(given, name=hold(index, given.name, whole=True), arguments=leaves(index, given.arguments))

    def leaves(index: int, value: Any) -> Any:  # noqa: ANN401 - JSON is any of several types
        if isinstance(value, str):
            return hold(index, value, whole=True)
        if isinstance(value, dict):
            return {key: leaves(index, inner) for key, inner in value.items()}
        return [leaves(index, inner) for inner in value] if isinstance(value, list) else value

    made = []
    for index, turn in enumerate(turns):
        if turn.role == "tool" and not results:
            made.append(turn)
            continue
        assistant = turn.role == "assistant"
        thinking = hold(index, turn.thinking, thinking=True)
        parts = TAGS.split(turn.content)
        if not any(part.strip() for part in parts[::2]) and not (assistant and set(parts[1::2]) <= _EMPTY_THOUGHT):
            parts = [turn.content]  # a text that is nothing but tags; an empty block of thinking is no text
        for at in range(0, len(parts), 2):
            parts[at] = hold(index, parts[at], thinking=assistant and at > 0 and parts[at - 1] == "<think>")
        calls = tuple(call(index, each) for each in turn.calls)
        made.append(replace(turn, content="".join(parts), thinking=thinking, calls=calls))
    return segments, made


def result_forms(text: str) -> tuple[str, ...]:
    """How a template may write a tool's result that is not replaced: as text, as a JSON string, or as the JSON that it is."""
    forms = [*Segment(0, text.strip()).forms]
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return tuple(forms)
    return (*forms, json.dumps(value, ensure_ascii=False), json.dumps(value))


def numbers_framed(turns: list[Turn], marks: Marks) -> tuple[int, list[Turn]]:
    """The conversation with a placeholder for each number and flag among the arguments of calls, and how many those are."""
    count = 0

    def leaves(value: Any) -> Any:  # noqa: ANN401 - JSON is any of several types
        nonlocal count
        if isinstance(value, dict):
            return {key: leaves(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [leaves(inner) for inner in value]
        if isinstance(value, int | float):
            count += 1
            return marks.of(count - 1)
        return value

    calls = [tuple(replace(call, arguments=leaves(call.arguments)) for call in turn.calls) for turn in turns]
    return count, [replace(turn, calls=made) if made else turn for turn, made in zip(turns, calls, strict=True)]


def edges(content: str, marks: Marks) -> tuple[str, str]:
    """The tags before the first and after the last placeholder of a turn, which are its text as well."""
    pieces = marks.split(content)
    return pieces[0].lstrip(), pieces[-1].rstrip()


def filled(text: str, literals: list[str], fillings: list[tuple[str, ...]]) -> Places | None:
    """Where each filling stands in `text`, when `text` is the literals with the fillings between them; else None.

    Args:
        text: the rendering.
        literals: what the template wrote before, between and after the placeholders.
        fillings: the forms that each placeholder's text may have, the likeliest first.
    """
    places = []
    position = len(literals[0])
    if not text.startswith(literals[0]):
        return None
    for forms, literal in zip(fillings, literals[1:], strict=True):
        for filling in forms:
            end = position + len(filling)
            if text.startswith(filling, position) and text.startswith(literal, end):
                break
        else:
            return None
        places.append((position, end))
        position = end + len(literal)
    return places if position == len(text) else None


def without_thinking(turn: Turn) -> Turn:
    """The turn without what the assistant thought: no field of its own, no `<think>...</think>`, and nothing before a
    `</think>` that stands alone, whose beginning the generation prompt wrote. A `<think>` that never ends stays.
    """
    if turn.role != "assistant":
        return turn
    content = _THOUGHT.sub("", turn.content)
    _, closing, rest = content.partition("</think>")
    content = rest if closing else content
    if content == turn.content and not turn.thinking:
        return turn
    return replace(turn, content=content.lstrip(), thinking="")
