"""The job file's JSON Schema, and its reference for people, both made from the structs in `hsx.config`.

The texts are the docstrings of the structs and of their fields, so that there is one place to keep true.
"""

from __future__ import annotations

import ast
import inspect
import json
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hsx import config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

SCHEMA_ID: Final = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """A JSON Schema (2020-12) of the job file, with descriptions, for editors."""
    document: dict[str, Any] = {"$schema": SCHEMA_ID, "title": "hsx job file", **msgspec.json.schema(config.Config)}
    texts = field_texts()
    for section, definition in document["$defs"].items():
        for name, entry in definition.get("properties", {}).items():
            text = texts.get((section, name))
            if text:
                entry["description"] = f"{text} ({entry['description']})" if "description" in entry else text
    return document


def schema_text() -> str:
    """`schema()` as it is committed in docs/job.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


def field_texts(module: ModuleType = config) -> dict[tuple[str, str], str]:
    """The docstring under each field of a module's structs, by (struct, field), in one line each."""
    texts = {}
    for section in ast.parse(inspect.getsource(module)).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for field, after in zip(section.body, section.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    texts[section.name, name] = " ".join(text.split())
    return texts


def keys() -> list[str]:
    """Every key of the job file, such as `pipeline.retries`; those of a root as `roots.name`."""
    return [f"{key}.{field}" for key, name, _ in _sections() for field in schema()["$defs"][name]["properties"]]


def reference() -> str:
    """The reference in Markdown: one table a section, as it is committed in docs/job-file.md."""
    definitions, texts = schema()["$defs"], field_texts()
    parts = [
        "# The job file",
        "Made from the structs in `hsx/config.py` by `scripts/generate_docs.py`; do not edit.",
        "A job is one TOML file. Paths in it are relative to its own folder. `hsx check JOB` prints it resolved, and says what "
        "is wrong with it; `docs/job.schema.json` is its JSON Schema, which editors use to complete and check it.",
    ]
    for key, name, is_list in _sections():
        definition = definitions[name]
        heading = f"[[{key}]]" if is_list else f"[{key}]"
        rows = ["| key | takes | default | meaning |", "|---|---|---|---|"]
        for field, entry in definition["properties"].items():
            required = field in definition.get("required", [])
            default = "required" if required else f"`{json.dumps(entry.get('default'))}`"
            rows.append(f"| `{field}` | {_takes(entry)} | {default} | {texts.get((name, field), '')} |")
        parts += [f"## `{heading}`", definition["description"], "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _sections() -> Iterator[tuple[str, str, bool]]:
    """(key, struct name, whether it is a list) of each section, in the order of the file."""
    properties = schema()["$defs"]["Config"]["properties"]
    for key, entry in properties.items():
        item = entry.get("items", entry)
        reference_to = item.get("$ref") or item["anyOf"][0]["$ref"]
        yield key, reference_to.rpartition("/")[2], "items" in entry


def _takes(entry: dict[str, Any]) -> str:
    """What a key takes, in words."""
    if "enum" in entry:
        return ", ".join(f"`{value}`" for value in entry["enum"])
    if "anyOf" in entry:
        return " or ".join(_takes(option) for option in entry["anyOf"] if option.get("type") != "null")
    if entry.get("type") == "array":
        return f"list of {_takes(entry['items'])}"
    if entry.get("type") == "object":
        return "table of text"
    if entry.get("pattern"):
        return "a size" if "KiB" in entry["pattern"] else "a name"
    words = {"string": "text", "integer": "integer", "number": "number", "boolean": "`true`, `false`"}[entry["type"]]
    bounds = [
        f"{sign} {entry[bound]:g}"
        for bound, sign in (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"))
        if bound in entry
    ]
    return " ".join([words, ", ".join(bounds)]).strip()
