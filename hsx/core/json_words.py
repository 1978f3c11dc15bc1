"""JSON in the words of those who write it: what Python and its decoders call a value is no word of theirs."""

from __future__ import annotations

import json
import re
from typing import Final

_KINDS: Final[dict[type, str]] = {int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}
_WORDS: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_TYPES: Final = re.compile(r"`([a-z]+(?: \| [a-z]+)*)`")
_PLACE: Final = re.compile(r" - at `\$?([^`]*)`")


def kind_of(value: object) -> str:
    """What a value is: "a string", "an object", "a list", "an integer", "a number"; "null", "true" and "false" are themselves.

    A table may hold what JSON has not: that has its type's own name.
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return next((words for kind, words in _KINDS.items() if isinstance(value, kind)), f"a value of type {type(value).__name__}")


def shown(value: object) -> str:
    """A value as it is written: text in quotes, null and not None."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def in_words(message: str) -> str:
    """What msgspec says of JSON: "Expected `int`, got `str` - at `$[2]`" is "expected an integer, got a string at [2]"."""
    text = _PLACE.sub(lambda found: f" at {found[1]}" if found[1] else "", message)
    text = _TYPES.sub(lambda found: " or ".join(_WORDS.get(word, word) for word in found[1].split(" | ")), text)
    return text.replace("Expected ", "expected ", 1) if text.startswith("Expected ") else text
