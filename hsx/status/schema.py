"""The JSON Schema of the status document, made from its types; docs/status.schema.json is a copy."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from hsx.config_schema import SCHEMA_ID, field_texts
from hsx.status import document


def schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the status document, with descriptions."""
    whole: dict[str, Any] = {
        "$schema": SCHEMA_ID,
        "title": f"hsx status document, version {document.VERSION}",
        **msgspec.json.schema(document.StatusDocument),
    }
    texts = field_texts(document)
    for section, definition in whole["$defs"].items():
        for name, entry in definition.get("properties", {}).items():
            text = texts.get((section, name))
            if text:
                entry["description"] = text
    return whole


def schema_text() -> str:
    """`schema()` as it is committed in docs/status.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"
