"""What a page says, taken apart without a browser."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")

from hsx.config_load import load
from hsx.report.gather import gather
from hsx.report.page import page

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass
class Page(HTMLParser):
    """Elements with their attributes, and the embedded document."""

    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    embedded: str = ""
    text: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        last, attributes = self.elements[-1] if self.elements else ("", {})
        if last == "script" and attributes.get("id") == "report":
            self.embedded += data
        elif last != "style":
            self.text += data

    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.embedded))

    def values(self) -> dict[str, str]:
        """The exact numbers behind those that are shown, by name."""
        return {str(a["data-field"]): a["data-value"] or "" for _, a in self.elements if "data-field" in a}


def read_page(text: str) -> Page:
    found = Page()
    found.feed(text)
    found.close()
    return found


@pytest.fixture(scope="session")
def report() -> Callable[..., Page]:
    """Makes the page of a job file, and takes it apart. Its figures take seconds: `document` is the same without them."""

    def make(file: Path | str) -> Page:
        return read_page(page(gather(load(file), 64, 0)))

    return make


@pytest.fixture(scope="session")
def document() -> Callable[..., dict[str, Any]]:
    """What the page of a job file would embed."""

    def make(file: Path | str, samples: int = 64, seed: int = 0) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(gather(load(file), samples, seed).document, allow_nan=False))
        return found

    return make
