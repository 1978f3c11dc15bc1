"""Plain data as TOML: just what a job file needs."""

from __future__ import annotations

import json
from typing import Any


def to_toml(document: dict[str, Any]) -> str:
    """TOML text of a two-level document: tables of scalars, lists and one-level tables, and lists of such tables.

    Keys whose value is None are left out, as TOML has no null.
    """
    parts = []
    for key, value in document.items():
        if isinstance(value, list):
            parts += [f"[[{_key(key)}]]\n{_lines(entry)}" for entry in value]
        else:
            parts.append(f"[{_key(key)}]\n{_lines(value)}")
    return "\n".join(parts)


def _lines(section: dict[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in section.items() if value is not None)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _text(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped, and surrogate pairs, which ensure_ascii would make.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
