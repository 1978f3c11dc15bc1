"""Moves beside a real job, to and fro, some of them killed, with a revocation in the middle and `hsx verify` beside it all."""

from __future__ import annotations

import json
import random
import time
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from hsx.exit_codes import ExitCode
from hsx.testing.commands import PATIENCE_S, hsx_done, hsx_running, wait_until
from hsx.testing.tiny_job import TinyJob, make_job
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLES, HELD = 60, 30
HOLD = {"kind": "hold", "count": -1, "match": f"-{HELD}-1-"}


def homes(job: TinyJob) -> dict[int, str]:
    """The root of each committed sample."""
    with job.ledger() as ledger:
        return {row.index: row.root for row in ledger.committed()}


def fault(job: TinyJob, method: str, body: dict[str, Any] | None = None, query: str = "") -> dict[str, int]:
    """Arms, disarms or lists faults of the job's server; returns how often each has struck."""
    url = f"http://127.0.0.1:{job.loaded.config.engine.port}/_fault{query}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            text = answer.read()
    except OSError:
        return {}
    return dict(json.loads(text)["struck"]) if text else {}


def prove(job: TinyJob) -> None:
    """Everything is committed, right, whole, shown, and there once."""
    done = hsx_done(job.loaded.path, "verify")
    assert done.process.returncode == ExitCode.DONE, done.out.read_text()
    assert sorted(homes(job)) == list(range(SAMPLES))
    assert wrong_samples(job.loaded) == []
    files = [path.name for root in job.loaded.roots for path in root.path.rglob("c.*")]
    assert sorted(files) == sorted(f"c.{index}.0.0.0" for index in range(SAMPLES))


def test_to_and_fro_while_samples_come_and_go(tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        samples=SAMPLES,
        longest=60,
        engine={"ownership": "spawn", "args": ["--allow-faults", "--fault", json.dumps(HOLD)]},
        pipeline={"commit_samples": 4, "concurrency": 2},
        watchdog={"canary_every": 10, "grace_s": 600.0},
    )
    rng = random.Random(3)
    file = job.loaded.path
    moved = kills = 0
    with hsx_running(file, "run") as running:
        wait_until(lambda: bool(fault(job, "GET").get("hold")), "a prompt that is held")
        # Everything up to here is moved once, in peace, beside the job that waits for its server.
        done = hsx_done(file, "move", "a", "--json")
        assert done.process.returncode == ExitCode.DONE, done.error()
        moved += json.loads(done.out.read_text())["moved"]
        assert "a" not in homes(job).values()
        done = hsx_done(file, "verify")
        assert done.process.returncode == ExitCode.DONE, done.out.read_text()
        # From here on every state is another token's; the next canary tells, and what came since the last one is revoked.
        fault(job, "POST", {"kind": "shifted_states", "count": -1})
        fault(job, "DELETE", query="?kind=hold")
        source, target = "b", "a"
        while running.process.poll() is None:
            hsx_done(file, "move", target, "--cancel")
            with hsx_running(file, "move", source, "--json") as move:
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 2.0)  # somewhere between its start and its end
                    move.kill()
                    kills += 1
                else:
                    assert move.wait() == ExitCode.DONE, move.error()
                    moved += json.loads(move.out.read_text())["moved"]
            source, target = target, source
        assert running.wait() == ExitCode.DONE, running.error()
    assert running.events("samples.revoked"), "there was nothing to take back"
    assert moved > 0
    for name in ("a", "b"):
        hsx_done(file, "move", name, "--cancel")
    prove_after_a_last_start(job)


def prove_after_a_last_start(job: TinyJob) -> None:
    """A start puts in order what the last killed move left; then everything is drained once more, at rest."""
    assert hsx_done(job.loaded.path, "run").process.returncode == ExitCode.DONE
    prove(job)
    done = hsx_done(job.loaded.path, "move", "a")
    assert done.process.returncode == ExitCode.DONE, done.error()
    assert set(homes(job).values()) == {"b"}
    prove(job)
