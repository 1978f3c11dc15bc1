"""Conversations: `{"id": ..., "messages": [{"role", "content"}]}` or ShareGPT's `conversations` of `from` and `value`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.datasets.rows import Bad, Limits, checked_ids, rows_of, value_of
from hsx.datasets.template import ChatTemplate, Rendered, TemplateError, Turn
from hsx.ports import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    import msgspec
    from numpy.typing import NDArray

    from hsx.datasets.jsonl import JsonlFile

ROLES: Final = {"human": "user", "gpt": "assistant"}
"""ShareGPT's roles; every other role goes to the template as it is, which must render it."""
UNSUPPORTED: Final = ("tool_calls", "function_call", "reasoning_content")


class ChatRows:
    """A `ports.Dataset` of conversations, tokenised with the model's own chat template.

    `loss_mask` is 1 on what the model writes in the assistant's turns, up to and with the end-of-turn token, and 0 elsewhere.
    """

    def __init__(self, file: JsonlFile, limits: Limits, template: ChatTemplate) -> None:
        self._file = file
        self._limits = limits
        self._template = template

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see `ports.Dataset`."""
        return rows_of(self._file, self._row)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of file, tokenizer and template, and the limits that decide which rows are used."""
        return {
            "dataset.sha256": self._file.sha256(),
            "dataset.format": "chat",
            "dataset.max_tokens": str(self._limits.max_tokens),
            "dataset.vocab_size": str(self._limits.vocab_size),
            **self._template.fingerprint(),
        }

    def _row(self, sample_id: str, fields: dict[str, msgspec.Raw], line: int) -> Row:
        turns = turns_of(fields)
        try:
            rendered = self._template.render(turns)
        except TemplateError as error:
            raise Bad("bad_chat", str(error)) from error
        tokens, offsets = self._template.encode(rendered.text)
        ids = checked_ids(tokens, self._limits)
        mask = span_mask(offsets, rendered)
        if rendered.spans and not mask.any():
            raise Bad("bad_chat", "no token begins in the assistant's text")
        return Row(sample_id, ids, mask, line)


def span_mask(offsets: list[tuple[int, int]], rendered: Rendered) -> NDArray[np.uint8]:
    """uint8 [tokens]: 1 where a token begins within one of the spans.

    A token that begins before a span belongs to the template's text, even if it reaches into it: the model does not write it.
    """
    starts = np.array([start for start, _ in offsets], dtype=np.int64)
    mask = np.zeros(len(offsets), dtype=np.uint8)
    for start, end in rendered.spans:
        mask |= ((starts >= start) & (starts < end)).astype(np.uint8)
    return mask


def turns_of(fields: dict[str, msgspec.Raw]) -> list[Turn]:
    """The turns of a row: `messages` if it has that field, else `conversations`.

    Raises Bad: `missing_field`, `bad_type`, `empty` (no turns), `bad_chat` (a turn that hsx or the template cannot take).
    """
    name = "messages" if "messages" in fields else "conversations"
    value = value_of(fields, name)
    if not isinstance(value, list):
        raise Bad("bad_type", f"field {name!r} is a {type(value).__name__}; expected a list of turns")
    if not value:
        raise Bad("empty", f"field {name!r} has no turns; expected at least one")
    if "tools" in fields and value_of(fields, "tools"):
        raise Bad("bad_chat", "field 'tools' is set; declared tools are not rendered yet, put them into the system turn")
    return [_turn(number, turn) for number, turn in enumerate(value, 1)]


def _turn(number: int, turn: object) -> Turn:
    if not isinstance(turn, dict):
        raise Bad("bad_type", f"turn {number} is a {type(turn).__name__}; expected an object with role and content")
    for key in UNSUPPORTED:
        if turn.get(key):
            raise Bad("bad_chat", f"turn {number} has {key!r}, which is not rendered yet; put its text into the content")
    role = turn["role"] if "role" in turn else turn.get("from")
    if not isinstance(role, str) or not role:
        raise Bad("bad_chat", f"turn {number} has the role {role!r}; expected 'role' or 'from' with a name")
    content = turn["content"] if "content" in turn else turn.get("value")
    if isinstance(content, list):
        content = _joined(number, content)
    if not isinstance(content, str):
        raise Bad(
            "bad_chat", f"turn {number} has a {type(content).__name__} as content; expected 'content' or 'value' with text"
        )
    return Turn(ROLES.get(role, role), content)


def _joined(number: int, parts: list[object]) -> str:
    texts = []
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise Bad("bad_chat", f"turn {number} has a content part that is not text; expected parts of type 'text' only")
        texts.append(part["text"])
    return "".join(texts)
