"""A real Prometheus, and promtool, from Debian's package `prometheus`: scrapes a run, and evaluates rules."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hsx.testing.commands import wait_until
from hsx.testing.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SCRAPE_MS: Final = 500
_UNITS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION: Final = re.compile(r"(?P<before>\bfor: |\[|\boffset )(?P<count>[0-9]+)(?P<unit>ms|s|m|h|d)\b")


def obstacle() -> str:
    """Why there can be no Prometheus here; "" where there can."""
    missing = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
    return f"needs Debian's package prometheus; missing: {', '.join(missing)}" if missing else ""


def promtool(*arguments: str | Path, text: bytes = b"") -> tuple[int, str]:
    """Runs promtool with `text` as its input; returns its exit code, and what it printed."""
    done = subprocess.run(["promtool", *map(str, arguments)], input=text, capture_output=True, check=False)  # noqa: S607 - where the distribution has it
    return done.returncode, (done.stdout + done.stderr).decode()


def faster(rules: str, times: float) -> str:
    """Rules whose durations are divided: what takes half an hour is seen within seconds."""

    def shorter(found: re.Match[str]) -> str:
        milliseconds = int(found["count"]) * _UNITS[found["unit"]] / times
        return f"{found['before']}{max(1, round(milliseconds))}ms"

    return _DURATION.sub(shorter, rules)


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running one. Attributes: `url`, where it answers."""

    url: str

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """(labels, value) of each series of an instant vector."""
        found = self._get("query", query=expression)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def value(self, expression: str) -> float | None:
        """The value of the only series; None where there is none. Raises ValueError where there are several."""
        found = self.query(expression)
        if len(found) > 1:
            raise ValueError(f"{expression} has {len(found)} series; expected one")
        return found[0][1] if found else None

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire, by name."""
        alerts: list[dict[str, Any]] = self._get("alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert for alert in alerts if alert["state"] == "firing"}

    def _get(self, what: str, **parameters: str) -> dict[str, Any]:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as answer:  # noqa: S310 - http, by the line above
            document: dict[str, Any] = json.load(answer)
        data: dict[str, Any] = document["data"]
        return data


@contextmanager
def running_prometheus(folder: Path, target: str, rules: Sequence[Path]) -> Iterator[Prometheus]:
    """Prometheus, scraping `target` (HOST:PORT) as job `hsx` every `SCRAPE_MS`, with these rules. Blocks while it comes up.

    Args:
        folder: an existing one, for its configuration, data and log.
        target: the endpoint.
        rules: files of rules.

    Raises AssertionError, with the end of its log, where it does not come up.
    """
    port, every = free_port(), f"{SCRAPE_MS}ms"
    scrape = {"job_name": "hsx", "static_configs": [{"targets": [target]}]}
    settings = {
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [scrape],
    }
    config, log = folder / "prometheus.json", folder / "prometheus.log"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML too
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:

        def up() -> bool:
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5) as answer:
                    return bool(answer.status == 200)
            except OSError:
                return False

        wait_until(up, "Prometheus is ready")
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()
