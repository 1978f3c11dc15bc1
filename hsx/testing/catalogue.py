"""Holds what is logged against the catalogue of events: every run in every test is one more look at it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hsx.events import objections

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping


class Catalogued:
    """A structlog processor that lets every event through, and keeps what the catalogue does not say of it.

    Attributes:
        objections: one sentence each.
    """

    def __init__(self) -> None:
        self.objections: list[str] = []

    def __call__(self, _logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        self.objections += objections({**event, "level": method})
        return event


def strays(lines: Iterable[str]) -> list[str]:
    """Objections to the JSON lines of a log; lines that are no JSON objects, or torn ones, are passed over."""
    whole = (json.loads(line) for line in lines if line.startswith("{") and line.endswith("}"))
    return [objection for line in whole if "event" in line for objection in objections(line)]
