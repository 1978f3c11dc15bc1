"""The dashboard in a real browser shows what `/status` says, in every state that a run can be in."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from hsx.status import StatusServer
from hsx.testing.browser import DESKTOP, PHONE, Browser
from hsx.testing.commands import PATIENCE_S
from hsx.testing.scenes import SCENES, Scene

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.slow

BANNERS = {
    "empty": "The engine is coming up",
    "running": "",
    "full": "Paused: no room",
    "restarting": "The engine is being restarted",
    "failed": "The run failed: restart_budget",
    "done": "The job is done",
}
PHASES = {
    "empty": "waiting",
    "running": "extracting",
    "full": "paused",
    "restarting": "waiting",
    "failed": "failed",
    "done": "done",
}


def status_of(url: str, token: str = "") -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/status", headers=headers), timeout=60) as answer:
        return dict(json.load(answer))


@dataclass(frozen=True, slots=True)
class Shown:
    """A run that is served, and the page that is open on it."""

    url: str
    scene: Scene
    server: StatusServer


@asynccontextmanager
async def shown(name: str, window: Browser, *, token: str = "") -> AsyncIterator[Shown]:
    """Serves a scene and opens its dashboard; waits until it shows something."""
    scene = SCENES[name]()
    server = StatusServer(scene.telemetry, scene.facts, "127.0.0.1", 0, token=token, goodbye_s=PATIENCE_S)
    url = await server.start()
    try:
        await asyncio.to_thread(window.open, url)
        if not token:
            await settled(window, lambda: window.value("document.body.dataset.time ?? ''"), "the page shows the run")
        yield Shown(url, scene, server)
    finally:
        await server.stop()


def all_of(selector: str) -> str:
    return f"[...document.querySelectorAll({selector!r})]"


def is_drawn(window: Browser, width: int) -> bool:
    """The curve was drawn for a window of this width."""
    return bool(window.value(f"(document.querySelector('#chart svg')?.clientWidth ?? 0) < {width}"))


async def settled(window: Browser, found: Callable[[], object], what: str) -> None:
    await asyncio.to_thread(window.until, found, what)


@pytest.mark.parametrize("name", SCENES)
async def test_every_state_is_shown_as_the_status_has_it(name: str, window: Browser, pictures: Path) -> None:
    window.look(dark=False, size=DESKTOP)
    window.complaints()
    async with shown(name, window) as page:
        status = await asyncio.to_thread(status_of, page.url)
        progress, engine = status["progress"], status["engine"]
        numbers = {
            "samples": progress["samples"]["committed"],
            "tokens": progress["tokens"]["committed"],
            "bytes": progress["bytes"]["committed"],
            "pending": progress["samples"]["pending"],
            "by-run": progress["samples"]["committed_by_run"],
            "restarts": engine["restarts"]["total"],
            "requeued": engine["restarts"]["requeued"],
            "violations": status["invariants"]["violations"],
            "quarantined": status["quarantine"]["count"],
            "Requests": status["in_flight"]["requests"],
            "Staging": status["staging"]["bytes"],
        }
        assert {key: window.number(f'[data-field="{key}"]') for key in numbers} == numbers
        assert window.text('[data-field="samples"]') == f"{progress['samples']['committed']:,}"
        assert window.text("#phase") == PHASES.get(name, name)
        assert window.text("#engine-pill") == f"engine {engine['state']}"
        assert window.text("#banner strong") == BANNERS[name]
        assert window.text("#name") == status["job"]["name"]
        roots = window.value(
            f"Object.fromEntries({all_of('[data-root]')}.map(root => [root.dataset.root, root.dataset.state]))"
        )
        assert roots == {key: root["state"] for key, root in status["roots"].items()}
        strip = window.value(all_of(".strip i") + ".map(piece => piece.className)")
        assert strip == [step["state"] for step in engine["timeline"]]
        reasons = window.value(all_of("#quarantine code") + ".map(code => code.innerText)")
        assert reasons == list(status["quarantine"]["by_reason"])
        assert int(str(window.value("document.querySelector('#events li').dataset.id"))) == status["events"][-1]["id"]
        assert (window.text("#restarts tbody code") or "-") == next(
            (one["reason"] for one in reversed(engine["restarts"]["last"])), "-"
        )
        if status["intake"]["paused"]:
            assert status["intake"]["pauses"][0]["message"] in window.text("#banner")
        if status["phase"]["reason"]:
            assert status["phase"]["reason"] in window.text("#banner")
        for look, dark, size in (("light", False, DESKTOP), ("dark", True, DESKTOP), ("phone", False, PHONE)):
            window.look(dark=dark, size=size)
            # Nothing may stand out to the right of a phone.
            assert window.value("document.documentElement.scrollWidth") == size[0]
            await settled(window, partial(is_drawn, window, size[0]), "the curve fits")
            await asyncio.to_thread(window.picture, pictures / f"{name}-{look}.png")
    assert window.complaints() == []


async def test_colours_follow_the_scheme(window: Browser) -> None:
    window.look(dark=False, size=DESKTOP)
    async with shown("running", window):
        ground = "getComputedStyle(document.body).backgroundColor"
        light = window.value(ground)
        window.look(dark=True, size=DESKTOP)
        assert window.value(ground) != light


async def test_what_happens_appears_by_itself_and_the_end_is_heard(window: Browser) -> None:
    window.look(dark=False, size=DESKTOP)
    async with shown("running", window) as page:
        page.scene.telemetry.intake_paused("staging_full", "free at least 4.0 MB in the dump directory")
        await settled(window, lambda: "free at least 4.0 MB" in window.text("#banner"), "the pause is shown")
        await settled(window, lambda: "intake.paused" in window.text("#events"), "the event is shown")
        page.scene.telemetry.intake_resumed("staging_full")
        await settled(window, lambda: window.text("#banner") == "", "the pause is over")
        page.scene.telemetry.phase("failed", kind="roots_full", reason="<b>every root</b> is out of service")
        await page.server.stop()
        await settled(window, lambda: "The run failed: roots_full" in window.text("#banner"), "the end is shown")
        assert "<b>every root</b> is out of service" in window.text("#banner")


async def test_a_run_that_is_gone_is_told_from_one_that_ended(window: Browser) -> None:
    window.look(dark=False, size=DESKTOP)
    async with shown("running", window) as page:
        committed = window.number('[data-field="samples"]')
        page.server.kill()
        await settled(window, lambda: "No answer from hsx" in window.text("#banner"), "nobody answers")
        assert window.number('[data-field="samples"]') == committed


async def test_the_span_of_the_curve_can_be_chosen(window: Browser) -> None:
    window.look(dark=False, size=DESKTOP)
    async with shown("running", window):
        day = window.value("document.querySelector('#chart .curve').getAttribute('d')")
        window.value("document.querySelector('[data-span=recent]').click()")
        assert window.value("document.querySelector('#chart .curve').getAttribute('d')") != day
        assert window.value("document.querySelector('[data-span=recent]').getAttribute('aria-pressed')") == "true"


async def test_a_token_is_asked_for(window: Browser) -> None:
    window.look(dark=False, size=DESKTOP)
    async with shown("running", window, token="0123456789abcdef") as page:
        await settled(window, lambda: "asks for its token" in window.text("#login"), "the form is shown")
        for token in ("wrong", "0123456789abcdef"):
            window.value(
                f"(document.querySelector('#token').value = {token!r}, document.querySelector('#login button').click())"
            )
            if token == "wrong":
                await settled(window, lambda: "not it" in window.text("#login-error"), "it is refused")
        await settled(window, lambda: window.text('[data-field="samples"]') != "", "the run is shown")
        status = await asyncio.to_thread(status_of, page.url, "0123456789abcdef")
        assert window.number('[data-field="samples"]') == status["progress"]["samples"]["committed"]
    window.value("sessionStorage.clear()")
    window.complaints()
