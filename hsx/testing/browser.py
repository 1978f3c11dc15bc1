"""A real browser without a window: Debian's Chromium with its own driver, through Selenium."""

from __future__ import annotations

import base64
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PATIENCE_S: Final = 120
DESKTOP: Final = (1280, 1500)
PHONE: Final = (390, 844)


def obstacle() -> str:
    """Why there can be no browser here; "" where there can."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs Debian's packages chromium and chromium-driver; missing: {', '.join(missing)}" if missing else ""


class Browser:
    """One window. Every call blocks.

    Args:
        driver: Selenium's.
    """

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def look(self, *, dark: bool, size: tuple[int, int]) -> None:
        """Sets the colour scheme, and the size in CSS pixels; below 600 wide it is a phone."""
        width, height = size
        scheme = "dark" if dark else "light"
        self._tell("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        metrics: dict[str, object] = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 2 if width < 600 else 1,
            "mobile": width < 600,
        }
        self._tell("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, url: str) -> None:
        """Goes to a page."""
        self.driver.get(url)

    def until(self, found: Callable[[], object], what: str) -> None:
        """Waits for a condition. Raises TimeoutException, with `what`, after two minutes."""
        WebDriverWait(self.driver, PATIENCE_S, 0.1).until(lambda _: found(), what)

    def value(self, script: str) -> object:
        """What a JavaScript expression comes to."""
        return self.driver.execute_script(f"return {script}")

    def text(self, selector: str) -> str:
        """The visible text of the first element that a CSS selector finds; "" where it finds none."""
        return str(self.value(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def number(self, selector: str) -> float:
        """The exact number behind what an element shows."""
        return float(str(self.value(f"document.querySelector({selector!r}).dataset.value")))

    def complaints(self) -> list[str]:
        """What the console has said since the last call, but for requests that nobody answered."""
        log = self.driver.get_log("browser")  # type: ignore[no-untyped-call] # Selenium has no type for it
        return [entry["message"] for entry in log if "net::ERR_" not in entry["message"]]

    def picture(self, path: Path) -> None:
        """Writes the whole page as PNG."""
        path.parent.mkdir(parents=True, exist_ok=True)
        found = self._tell("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(found["data"]))

    def _tell(self, command: str, parameters: dict[str, object]) -> dict[str, str]:
        answer = self.driver.execute_cdp_cmd(command, parameters)
        return dict(answer)


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser, closed afterwards."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars", "no-first-run"):
        options.add_argument(f"--{argument}")
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium refuses to be root's otherwise
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_page_load_timeout(PATIENCE_S)
        yield Browser(driver)
    finally:
        driver.quit()
