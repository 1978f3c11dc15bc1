"""`hsx report` in a real browser: nothing is loaded, nothing is complained of, and it fits a phone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra report")

from hsx.config_load import load
from hsx.report.gather import gather
from hsx.report.page import page
from hsx.testing.browser import DESKTOP, PHONE, Browser
from hsx.testing.kept_job import keep_job
from hsx.testing.report_scene import make_report_scene

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

GROUND = "getComputedStyle(document.body).backgroundColor"
INK = "getComputedStyle(document.querySelector('#figure-lengths .desktop svg text')).fill"


def written(folder: Path, file: Path) -> tuple[str, dict[str, Any]]:
    """The URL of a job's page, and the document that it is made of."""
    gathered = gather(load(file), 64, 0)
    output = folder / "report.html"
    output.write_text(page(gathered), encoding="utf-8")
    return output.as_uri(), json.loads(json.dumps(gathered.document))


def test_a_page_looks_the_same_everywhere_and_asks_nobody(tmp_path: Path, window: Browser, pictures: Path) -> None:
    url, document = written(tmp_path, make_report_scene(tmp_path))
    looks = {}
    for look, dark, size in (("light", False, DESKTOP), ("dark", True, DESKTOP), ("phone", False, PHONE)):
        window.complaints()
        window.look(dark=dark, size=size)
        window.open(url)
        assert window.value("performance.getEntriesByType('resource').map(entry => entry.name)") == []
        assert window.value("document.documentElement.scrollWidth") == size[0]
        shown = window.value("[...document.querySelectorAll('.figure svg')].filter(one => one.clientWidth > 0).length")
        assert shown == 8, "each figure once: throughput, lengths, norms, channels, four heat maps"
        looks[look] = (window.value(GROUND), window.value(INK))
        window.picture(pictures / f"report-{look}.png")
        assert window.complaints() == []
    assert looks["light"][0] != looks["dark"][0]
    assert looks["light"][1] != looks["dark"][1]
    assert window.value("JSON.parse(document.querySelector('#report').textContent)") == document
    progress = document["progress"]
    assert window.number('[data-field="committed"]') == progress["committed"]
    assert window.text('[data-field="committed"]') == f"{progress['committed']:,}"
    assert window.text("#state") == "unfinished"


def test_an_empty_job_has_a_page_without_figures_of_states(tmp_path: Path, window: Browser, pictures: Path) -> None:
    kept = keep_job(tmp_path)
    kept.extract(only=set())
    url, _ = written(tmp_path, kept.file)
    window.look(dark=False, size=DESKTOP)
    window.open(url)
    window.picture(pictures / "report-empty.png")
    assert window.text("#state") == "empty"
    assert window.value("document.querySelector('#figure-norms')") is None
    assert window.complaints() == []
