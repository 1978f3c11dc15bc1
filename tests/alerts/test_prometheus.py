"""A real Prometheus scrapes a run on the reference engine: a rule fires while the server holds still, none once it is done."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hsx.cli import main
from hsx.exit_codes import ExitCode
from hsx.metrics import METRICS
from hsx.testing.commands import PATIENCE_S, hsx_running, wait_until
from hsx.testing.holding import held_at
from hsx.testing.prometheus import faster, obstacle, promtool, running_prometheus
from hsx.testing.servers import free_port, running_reference
from hsx.testing.tiny_job import LAYERS, make_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.testing.servers import RunningServer

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "hsx-rules.yml"
TIMES = 90.0
HELD = 5

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(obstacle()), reason=obstacle())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_reference(tmp_path_factory.mktemp("server") / "dumps", LAYERS) as running:
        yield running


def test_a_run_that_stalls_is_scraped_and_fires(
    tmp_path: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    port, rules = free_port(), tmp_path / "rules.yml"
    rules.write_text(faster(RULES.read_text(encoding="utf-8"), TIMES), encoding="utf-8")
    # The watchdog must not end the stall before the alert; nor, on a busy machine, may a request's time run out.
    patient = {"grace_s": 3600.0}
    # One after the other, so that the one that is held is the only one under way.
    job = make_job(tmp_path, 8, 60, server, status={"port": port}, watchdog=patient, pipeline={"concurrency": 1})
    with held_at(job, server, HELD) as held, hsx_running(job.loaded.path, "run") as run:
        held()
        # What is exposed may be half a second old, and more on a busy machine.
        wait_until(lambda: f"\nhsx_samples_committed_total {HELD}.0\n" in metrics(port), "the last commit is exposed")
        exposed = metrics(port).encode()
        assert promtool("check", "metrics", text=exposed) == (0, "")
        assert {spec.name for spec in METRICS} - names(exposed) <= {"hsx_attempts_failed_total"}
        assert main(["status", str(job.loaded.path)]) == ExitCode.DONE
        assert f"committed    {HELD} of 8 samples" in capsys.readouterr().out
        with running_prometheus(tmp_path, f"127.0.0.1:{port}", [rules]) as prometheus:
            wait_until(lambda: prometheus.value("hsx_samples_committed_total") == HELD, f"{HELD} samples, as scraped")
            wait_until(lambda: prometheus.value('up{job="hsx"}') == 1, "the target is up")
            firing: dict[str, Any] = {}

            def stalled() -> bool:
                firing.update(prometheus.firing())
                return "HsxStalled" in firing

            wait_until(stalled, "HsxStalled fires")
            alert = firing["HsxStalled"]
            assert alert["labels"]["severity"] == "page"
            assert alert["annotations"]["summary"].startswith(f"127.0.0.1:{port}: nothing was committed")
            unwanted = {"HsxUnsound", "HsxNotReady", "HsxRestarting", "HsxRootLost"}
            if not prometheus.value("count_over_time((up == 0)[1h:500ms])"):
                unwanted.add("HsxGone")  # a busy machine may let seconds pass without an answer in time, which are minutes here
            assert not unwanted & set(firing)
            release(server)
            assert run.wait() == ExitCode.DONE
            # Long enough for HsxGone, were this a job that was not done: 5 min / 90 and more, by Prometheus' own clock.
            wait_until(lambda: (prometheus.value("count_over_time((up == 0)[1h:500ms])") or 0) > 10, "the target is away")
            assert {"HsxGone", "HsxStalled"} & set(prometheus.firing()) == set()
    assert main(["status", str(job.loaded.path)]) == ExitCode.DONE
    assert re.match(r"tiny  complete .*\nhsx was not asked: nobody listens on", capsys.readouterr().out)


def test_a_run_that_is_killed_is_called_gone(tmp_path: Path, server: RunningServer) -> None:
    port, rules = free_port(), tmp_path / "rules.yml"
    rules.write_text(faster(RULES.read_text(encoding="utf-8"), TIMES), encoding="utf-8")
    job = make_job(tmp_path, 8, 60, server, status={"port": port}, pipeline={"concurrency": 1})
    with held_at(job, server, 0) as held, hsx_running(job.loaded.path, "run") as run:
        held()
        with running_prometheus(tmp_path, f"127.0.0.1:{port}", [rules]) as prometheus:
            wait_until(lambda: prometheus.value("hsx_samples_pending") == 8, "8 samples pending, as scraped")
            run.kill()
            wait_until(lambda: "HsxGone" in prometheus.firing(), "HsxGone fires")
            assert "HsxStalled" not in prometheus.firing()


def metrics(port: int) -> str:
    """What the endpoint exposes now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        return str(answer.read().decode())


def names(exposed: bytes) -> set[str]:
    """The metrics that an exposition has samples of."""
    lines = [line for line in exposed.decode().splitlines() if line and not line.startswith("#")]
    return {line.partition("{")[0].partition(" ")[0] for line in lines}


def release(server: RunningServer) -> None:
    """Lets the held prompt go, before the block that holds it is left."""
    asyncio.run(server.clear_faults("hold"))
