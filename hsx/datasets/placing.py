"""Where each turn's text stands in a rendering, and what has to hold of the spans that count for the loss."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hsx.datasets.frame import result_forms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.datasets.frame import Marks, Places, Segment
    from hsx.datasets.turns import Turn

Tools = list[dict[str, Any]]
Spans = tuple[tuple[int, int], ...]


class TemplateError(Exception):
    """This conversation cannot be rendered, or not be told apart from the template's own text; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a turn's text in a rendering: characters [start, end)."""

    turn: int
    start: int
    end: int
    thinking: bool


class Placed:
    """Where each turn's text stands in a rendering.

    Args:
        turns: the conversation.
        frames: with placeholders.
        marks: what the placeholders are made of.
        segments: what they stand for.
        order: which of them the template wrote, in this order.
        places: where each of those stands.
        tools: the declared functions.
        results: whether results of tools are among the pieces.

    Attributes:
        pieces: in the order of the rendering.
        bounds: of each turn with text: from its first to behind its last piece.
        floor: of each of them, where the text before it ends.
        last: of each of them, its last piece.
    """

    def __init__(
        self,
        turns: list[Turn],
        frames: list[Turn],
        marks: Marks,
        segments: list[Segment],
        order: list[int],
        places: Places,
        tools: Tools | None,
        *,
        results: bool,
    ) -> None:
        self.turns, self.framed, self.marks, self.tools = turns, frames, marks, tools
        self.pieces = [
            Piece(segments[number].turn, start, end, segments[number].thinking)
            for number, (start, end) in zip(order, places, strict=True)
        ]
        self._starts = [piece.start for piece in self.pieces]
        self._results = results
        bounds: dict[int, tuple[int, int]] = {}
        self.floor: dict[int, int] = {}
        self.last: dict[int, Piece] = {}
        end_before = 0
        for piece in self.pieces:
            first, _ = bounds.get(piece.turn, (piece.start, piece.end))
            self.floor.setdefault(piece.turn, end_before)
            bounds[piece.turn] = (min(first, piece.start), piece.end)
            self.last[piece.turn] = piece
            end_before = piece.end
        self.bounds = dict(sorted(bounds.items()))

    def next_text(self, end: int, length: int) -> int:
        """Where the next piece of text begins, at or behind `end`; `length` of the rendering where none does."""
        at = bisect_left(self._starts, end)
        return self._starts[at] if at < len(self._starts) else length

    def require_own(self, prompt: str, turn: int) -> None:
        """Raises TemplateError where a generation prompt stands in text that has no placeholder: it may be found there
        instead of where the template writes it.
        """
        if any(prompt in text for text in self._unplaced()):
            raise TemplateError(
                f"it cannot be told where turn {turn + 1} begins: {prompt!r} also stands in a tool's result or description"
            )

    def require_faithful(self, spans: Spans, *, marked: bool) -> None:
        """Raises TemplateError where a span has text of another turn in it, or begins or ends within the assistant's.

        Args:
            spans: what counts for the loss.
            marked: the template itself said so.
        """
        who = "the template marks" if marked else "the template would have"
        ordered = sorted(spans)
        ends = [end for _, end in ordered]
        for piece in self.pieces:
            turn = self.turns[piece.turn]
            at = bisect_right(ends, piece.start)
            while at < len(ordered) and ordered[at][0] < piece.end:
                if turn.role != "assistant":
                    raise TemplateError(f"{who} the text of turn {piece.turn + 1} (role {turn.role!r}) as generated")
                if piece.start < ordered[at][0] or ordered[at][1] < piece.end:
                    raise TemplateError(f"{who} a part of the text of turn {piece.turn + 1} (role {turn.role!r}) as generated")
                at += 1

    def of_turns(self, spans: Spans, turns: set[int]) -> Spans:
        """Those of the spans that have text of one of these turns."""
        chosen = [self.bounds[turn] for turn in turns if turn in self.bounds]
        return tuple(span for span in spans if any(span[0] < end and first < span[1] for first, end in chosen))

    def _unplaced(self) -> Iterator[str]:
        if not self._results:
            for turn in self.turns:
                if turn.role == "tool":
                    yield from result_forms(turn.content)
        yield from _texts(self.tools or [])


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
