"""Where what the assistant writes begins and ends in a rendering: from the generation prompt to the end of the turn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hsx.datasets.frame import TAGS, edges, result_forms
from hsx.datasets.placing import TemplateError

if TYPE_CHECKING:
    from hsx.datasets.placing import Placed, Spans
    from hsx.datasets.rendering import Renderer

EXACT: Final = 32
"""Turns of a conversation before each of which the generation prompt is rendered; behind them it is what it was there."""
SHOWN: Final = 40


def assistant_spans(renderer: Renderer, text: str, found: Placed) -> Spans:
    """[start, end) in characters of each assistant turn: what the model writes, with the token that ends the turn.

    Args:
        renderer: of the template.
        text: the rendering.
        found: where the turns' text stands in it.

    Raises TemplateError where a turn's begin or end cannot be told.
    """
    spans = []
    prompts: dict[tuple[str, str, bool], set[str]] = {}
    for turn, (first, last) in found.bounds.items():
        given = found.turns[turn]
        if given.role != "assistant":
            continue
        _, after = edges(found.framed[turn].content, found.marks)
        end = last + len(after) if after and text.startswith(after, last) else last
        spans.append((_begin(renderer, text, found, turn, first, prompts), _end(renderer, text, found, turn, end)))
    return tuple(spans)


def _begin(
    renderer: Renderer, text: str, found: Placed, turn: int, first: int, prompts: dict[tuple[str, str, bool], set[str]]
) -> int:
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
        prompt = renderer.prompt_of(found.turns[:turn], found.tools)[1]
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
    earlier, _ = renderer.prompt_of(found.turns[:turn], found.tools)
    follows = floor <= len(earlier) <= start and text.startswith(earlier)
    if called:
        # What frames the call is the assistant's: it begins where the rendering of the earlier turns ends.
        if not follows:
            raise TemplateError(f"it cannot be told where the call of turn {turn + 1} begins: it has no generation prompt")
        return len(earlier)
    # Templates of Llama 2's kind end a prompt without white space, and begin the answer with some: the model writes it.
    return len(earlier) if follows and not text[len(earlier) : start].strip() else start


def _end(renderer: Renderer, text: str, found: Placed, turn: int, end: int) -> int:
    """Where what the model writes ends: with the token that ends the turn, else with the text."""
    limit = found.next_text(end, len(text))
    if found.turns[turn].calls or found.last[turn].thinking:
        return _end_without_text(renderer, text, found, turn, end, limit)
    direct = renderer.end_of_turn(text, end, limit)
    token = text[end : end + direct].strip()
    if token in renderer.end_tokens():
        return end + direct
    # The template may close a block of thinking by itself before it ends the turn.
    stop = renderer.first_end(text, end, limit)
    if stop is not None and not TAGS.sub("", text[end : stop[0]]).strip():
        return stop[1]
    return end if TAGS.fullmatch(token) else end + direct


def _end_without_text(renderer: Renderer, text: str, found: Placed, turn: int, end: int, limit: int) -> int:
    """Where a turn ends that ends with a call or with thinking: after the first end-of-turn token before the next turn."""
    if turn + 1 < len(found.turns) and turn + 1 not in found.bounds:
        # The next turn has no text, or its text stayed in the frame: its own end must not be taken for this one's.
        later = (text.find(form, end, limit) for form in result_forms(found.turns[turn + 1].content) if form)
        limit = min((at for at in later if at >= 0), default=limit)
        whole, _ = renderer.prompt_of(found.turns[: turn + 1], found.tools)
        limit = min(limit, len(whole)) if end <= len(whole) and text.startswith(whole) else limit
    stop = renderer.first_end(text, end, limit)
    if stop is None:
        what = "call" if found.turns[turn].calls else "thinking"
        raise TemplateError(f"it cannot be told where the {what} of turn {turn + 1} ends: no end-of-turn token follows it")
    return stop[1]


def require_whole_marks(text: str, found: Placed, marks: Spans) -> None:
    """Raises TemplateError where a part of what the template marks is no turn's text with what stands around it."""
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
