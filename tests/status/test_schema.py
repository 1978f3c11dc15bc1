"""The published schema is what the documents are."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from hsx.status import StatusServer
from hsx.status.document import encode
from hsx.status.schema import schema, schema_text
from hsx.telemetry import Telemetry
from hsx.testing.scenes import SCENES

PUBLISHED = Path(__file__).parents[2] / "docs" / "status.schema.json"


def test_the_published_schema_is_current() -> None:
    assert PUBLISHED.read_text(encoding="utf-8") == schema_text()


@pytest.mark.parametrize("name", SCENES)
def test_a_document_loses_nothing_to_its_types_and_fits_the_schema(name: str) -> None:
    scene = SCENES[name]()
    document = StatusServer(scene.telemetry, scene.facts, "127.0.0.1", 0).document()
    sent = msgspec.json.decode(encode(document))
    assert sent == json.loads(json.dumps(document))
    jsonschema.Draft202012Validator(schema()).validate(sent)


def test_a_run_that_knows_nothing_yet_fits_too() -> None:
    sent = msgspec.json.decode(encode(StatusServer(Telemetry(), dict, "127.0.0.1", 0).document()))
    jsonschema.Draft202012Validator(schema()).validate(sent)
    assert "total" not in sent["progress"]["samples"]


def test_every_field_that_needs_words_has_them() -> None:
    described = [definition.get("description") for definition in schema()["$defs"].values()]
    assert all(described)
