"""The turns of a conversation, out of all the forms that datasets write them in.

Each message is normalised by itself, by the tables below: datasets mix forms from row to row, and even within a row.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hsx.core.json_words import kind_of
from hsx.datasets.fields import Bad, Columns, Fields, brief, excerpt

if TYPE_CHECKING:
    from collections.abc import Mapping

ROLES: Final[dict[str, str]] = {
    **dict.fromkeys(("human", "prompter", "Human", "User", "USER"), "user"),
    **dict.fromkeys(("gpt", "bot", "model", "chatgpt", "Assistant", "ASSISTANT"), "assistant"),
    **dict.fromkeys(("System", "SYSTEM"), "system"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    "function_call": "assistant",
    "tool_call": "assistant",
}
"""What other names of roles mean; a role that is not here goes to the template as it is, which must render it."""
ROLE_FIELDS: Final = ("role", "from", "speaker")
CONTENT_FIELDS: Final = ("content", "value", "text")
THINKING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
COUNT_FIELDS: Final = ("weight", "train", "loss")
"""Fields by which datasets leave one of the assistant's turns out of the loss: 0 or false."""
CALL_ROLES: Final = ("function_call", "tool_call")
"""ShareGPT's roles of a turn whose text is a call, in JSON."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function: its name and its arguments."""

    name: str
    arguments: dict[str, Any]
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn.

    Attributes:
        role: as the template knows it.
        content: its text; "" for none.
        thinking: what the assistant thought, where the dataset has it in a field of its own.
        calls: what the assistant calls.
        name: the function whose result this is, where the dataset says it.
        call_id: the call whose result this is, likewise.
        counts: whether it counts for the loss, where it is the assistant's; the dataset may say that it does not.
    """

    role: str
    content: str
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    name: str = ""
    call_id: str = ""
    counts: bool = True


def turns_of(fields: Fields, columns: Columns, roles: Mapping[str, str]) -> list[Turn]:
    """The turns of a row: `messages` if it has that field and it is not null, else `conversations`.

    Args:
        fields: the row.
        columns: how its fields are called.
        roles: names of roles beside `ROLES`, or instead of what those say.

    Raises Bad: `missing_field`, `bad_type`, `empty` (no turns), `bad_chat` (a turn that hsx cannot take).
    """
    names = (columns.messages, columns.conversations)
    there = fields.types()
    name = next(filter(fields.has, names), next((name for name in names if name in there), columns.conversations))
    value = fields.value(name)
    if not isinstance(value, list):
        raise Bad("bad_type", f"field {name!r} is {kind_of(value)}; expected a list of turns")
    if not value:
        raise Bad("empty", f"field {name!r} has no turns; expected at least one")
    return [_turn(number, turn, roles) for number, turn in enumerate(value, 1)]


def tools_of(fields: Fields, columns: Columns) -> list[dict[str, Any]]:
    """The functions that the row declares: a list of objects, or the same as JSON text. Raises Bad `bad_chat`."""
    if not fields.has(columns.tools):
        return []
    value = fields.value(columns.tools)
    if isinstance(value, str):
        value = _parsed(value, f"field {columns.tools!r}") if value.strip() else []
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Bad("bad_chat", f"field {columns.tools!r} is not a list of objects; expected one for each function")
    return value


def _turn(number: int, turn: object, roles: Mapping[str, str]) -> Turn:
    if not isinstance(turn, dict):
        raise Bad("bad_type", f"turn {number} is {kind_of(turn)}; expected an object with role and content")
    given = _role(number, turn, roles)
    role = roles.get(given, ROLES.get(given, given))
    content = _only(number, turn, CONTENT_FIELDS)
    if isinstance(content, list):
        content = _joined(number, content)
    calls = _calls(number, turn)
    counts = _counts(number, turn, role)
    if given in CALL_ROLES and isinstance(content, str) and not calls:
        calls = tuple(_call(number, call) for call in _as_list(_parsed(content, f"turn {number}")))
        content = ""
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        found = "no content" if content is None else f"{kind_of(content)} as content"
        raise Bad("bad_chat", f"turn {number} has {found}; expected 'content' or 'value' with text")
    thinking = _only(number, turn, THINKING_FIELDS) or ""
    if not isinstance(thinking, str):
        raise Bad("bad_chat", f"turn {number} has {kind_of(thinking)} as thinking; expected text")
    return Turn(role, content, thinking, calls, _text(turn.get("name")), _text(turn.get("tool_call_id")), counts)


def _role(number: int, turn: Mapping[str, Any], roles: Mapping[str, str]) -> str:
    """The first role that is given. One that is known must not contradict another: a `speaker` may be anyone's name."""
    given = [(name, turn[name]) for name in ROLE_FIELDS if turn.get(name) is not None]
    if not given or not isinstance(given[0][1], str) or not given[0][1]:
        found = f"the role {brief(given[0][1])}" if given else "no role"
        raise Bad("bad_chat", f"turn {number} has {found}; expected 'role' or 'from' with a name")
    known = {**ROLES, **{role: role for role in ("user", "assistant", "system", "tool")}, **roles}
    meant = [(name, role, known[role]) for name, role in given if isinstance(role, str) and role in known]
    for name, role, means in meant[1:]:
        if means != meant[0][2]:
            raise _conflict(number, meant[0][:2], (name, role))
    return str(given[0][1])


def _only(number: int, turn: Mapping[str, Any], names: tuple[str, ...]) -> Any:  # noqa: ANN401 - JSON is any of several types
    """What is in these fields, which are names for the same; null says nothing, nor does an empty text beside others."""
    given = [(name, turn[name]) for name in names if turn.get(name) is not None]
    full = [(name, value) for name, value in given if value != ""] or given[:1]
    for other in full[1:]:
        if other[1] != full[0][1]:
            raise _conflict(number, full[0], other)
    return full[0][1] if full else None


def _conflict(number: int, one: tuple[str, object], other: tuple[str, object]) -> Bad:
    shown = " and ".join(f"{name!r} {excerpt(str(value).encode(errors='replace'), 30)}" for name, value in (one, other))
    return Bad("bad_chat", f"turn {number} has {shown}, which differ; expected one of them")


def _counts(number: int, turn: Mapping[str, Any], role: str) -> bool:
    """What the dataset says of a turn's loss; of other turns than the assistant's it may say anything, they never count."""
    counts = True
    for name in COUNT_FIELDS:
        value = turn.get(name)
        if role != "assistant" or value is None or (name == "loss" and not isinstance(value, bool)):
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise Bad("bad_chat", f"turn {number} has {name} {brief(value)}; expected 0 or 1, false or true")
        counts = counts and bool(value)
    return counts


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _joined(number: int, parts: list[object]) -> str:
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        if not (isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str)):
            raise Bad("bad_chat", f"turn {number} has a content part that is not text; expected parts of type 'text' only")
        texts.append(part["text"])
    return "".join(texts)


def _calls(number: int, turn: Mapping[str, Any]) -> tuple[Call, ...]:
    value = turn.get("tool_calls") or turn.get("function_call")
    if not value:
        return ()
    if isinstance(value, str):
        value = _parsed(value, f"turn {number}: its calls")
    return tuple(_call(number, call) for call in _as_list(value))


def _call(number: int, call: object) -> Call:
    if not isinstance(call, dict):
        raise Bad("bad_chat", f"turn {number} has {kind_of(call)} as a call; expected an object")
    inner = call.get("function")
    function = inner if isinstance(inner, dict) else call
    name, arguments = function.get("name"), function.get("arguments", function.get("parameters"))
    if not isinstance(name, str) or not name:
        raise Bad("bad_chat", f"turn {number} calls {brief(name)}; expected the name of a function")
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"turn {number}: the arguments of {name!r}") if arguments.strip() else {}
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Bad("bad_chat", f"turn {number} calls {name!r} with {kind_of(arguments)}; expected an object")
    return Call(name, arguments, _text(call.get("id")))


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _parsed(text: str, what: str) -> Any:  # noqa: ANN401 - JSON is any of several types
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Bad("bad_chat", f"{what} is not JSON: {error}") from error


def _no_constant(name: str) -> None:
    """JSON has no NaN and no Infinity, though Python's reader takes them."""
    raise ValueError(f"{name} is no JSON value")
