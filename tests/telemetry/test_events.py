"""The catalogue of events: whole, by the source; and what it demands of a line."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx import events as catalogue
from hsx.events import BOUND, EVENTS, NOTHING, ONCE_A_SAMPLE, objections

if TYPE_CHECKING:
    from collections.abc import Iterator

HSX = Path(__file__).parents[2] / "hsx"
LEVELS = {"debug", "info", "warning", "error", "critical", "exception"}
LOGGERS = {"log", "logger", "_log", "_logger"}


def calls() -> Iterator[tuple[str, ast.Call, str]]:
    """Each call of a logger's method in hsx, but for those of the tests' own programs: file, call, level."""
    for path in sorted(HSX.rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                owner = node.func.value
                named = owner.id if isinstance(owner, ast.Name) else owner.attr if isinstance(owner, ast.Attribute) else ""
                got = isinstance(owner, ast.Call) and isinstance(owner.func, ast.Attribute) and owner.func.attr == "get_logger"
                if named in LOGGERS or got:
                    yield str(path.relative_to(HSX)), node, node.func.attr


def names(argument: ast.expr) -> list[str]:
    """The events that the first argument may be: text, a constant of `hsx.events`, or a choice of two texts."""
    if isinstance(argument, ast.Constant):
        return [str(argument.value)]
    if isinstance(argument, ast.IfExp):
        return [*names(argument.body), *names(argument.orelse)]
    if isinstance(argument, ast.Name) and argument.id in ("PER_SAMPLE", "PER_TWIN"):
        return [str(getattr(catalogue, argument.id))]
    return []


def is_told(path: str, call: ast.Call) -> bool:
    """What only hands on an event that it was given: `EventLog` and its like."""
    return isinstance(call.args[0], ast.Name) and call.args[0].id == "event" and path == "recent.py"


def test_every_event_in_the_source_is_in_the_catalogue_with_its_level_and_fields() -> None:
    wrong = []
    for path, call, level in calls():
        if is_told(path, call):
            continue
        found = names(call.args[0])
        if not found:
            wrong.append(f"{path}:{call.lineno}: the event is not written out")
        for text in found:
            name = text.split(" ", 1)[0]
            event = EVENTS.get(name)
            if event is None:
                wrong.append(f"{path}:{call.lineno}: {name}")
                continue
            if event.level != {"exception": "error"}.get(level, level):
                wrong.append(f"{path}:{call.lineno}: {name} at {level}")
            if (event.writer == "server") != path.startswith("capture/"):
                wrong.append(f"{path}:{call.lineno}: {name} is {event.writer}'s")
            fields = {word.arg for word in call.keywords if word.arg} - {"exc_info"} | set(re.findall(r"(\w+)=%", text))
            if not fields <= set(event.fields):
                wrong.append(f"{path}:{call.lineno}: {name} has {fields - set(event.fields)}")
    assert wrong == []


def test_every_event_of_the_catalogue_is_written_somewhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in HSX.rglob("*.py") if path.name != "events.py")
    assert [event for event in EVENTS if not re.search(rf'"{re.escape(event)}[" ]', text) and event not in ONCE_A_SAMPLE] == []


def test_names_are_facts_and_every_entry_is_whole() -> None:
    for name, event in EVENTS.items():
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name), name
        assert event.says.endswith("."), name
        assert event.todo == NOTHING or event.todo.endswith("."), name
        assert event.optional <= set(event.fields), name
        assert event.level not in ("error", "warning") or event.todo != NOTHING, f"{name}: what is to be done?"


def test_no_field_carries_ids_or_secrets() -> None:
    forbidden = {"input_ids", "token_ids", "ids", "prompt", "text", "env", "environment", "password", "secret", "authorization"}
    assert [(name, key) for name, event in EVENTS.items() for key in event.fields if key in forbidden] == []


@pytest.mark.parametrize(
    ("line", "objection"),
    [
        ({"event": "thing.happened", "level": "info"}, r"event 'thing.happened' is not in the catalogue"),
        ({"event": "capture.failed", "level": "error"}, r"is not in the catalogue"),
        ({"event": "status.listening", "level": "error", "url": "x"}, r"written at level error; the catalogue has info"),
        ({"event": "status.listening", "level": "info", "url": "x", "port": 1}, r"has fields .*: port"),
        ({"event": "status.listening", "level": "info"}, r"lacks fields: url"),
    ],
)
def test_a_line_that_is_not_as_the_catalogue_says(line: dict[str, Any], objection: str) -> None:
    (found,) = objections(line)
    assert re.search(objection, found)


def test_lines_that_are() -> None:
    bound = dict.fromkeys(BOUND, "x") | {"level": "info"}
    assert objections({**bound, "event": "status.listening", "url": "x"}) == []
    assert objections({"event": "whatever a library says", "level": "error", "logger": "aiohttp"}) == []
