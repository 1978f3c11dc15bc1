"""Runs as they would look after hours, told to a telemetry within a second: what the dashboard is looked at with.

Their numbers are those of a real kind of job: 37,312 samples, 87.8 million tokens, 57,344 bytes a token, four disks.
"""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import structlog

from hsx.core.lifecycle import State
from hsx.core.marker import Marker
from hsx.records import Counts
from hsx.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES: Final = 37_312
TOKENS: Final = 87_800_000
BYTES_PER_TOKEN: Final = 57_344
RUN: Final = "5e1f09ab"
EPOCHS: Final = ("c41f9d52-7a0e-4f7e-9d1c-6f2b8a3e5d10", "0b7e66a1-93d4-4c8e-8b15-2f9f0c7d4a83")
DISK: Final = 1_920_000_000_000
LIMITS: Final = {"requests": 64, "tokens": 262_144, "staging_bytes": 32 << 30}


class Past:
    """Time that is moved by hand up to the present, from which on it is the real one.

    Args:
        seconds: how long ago it begins.
    """

    def __init__(self, seconds: float) -> None:
        self._lag = seconds
        self._now: tuple[float, float] | None = (time.monotonic(), time.time())

    def monotonic(self) -> float:
        """Monotonic seconds."""
        return (self._now[0] if self._now else time.monotonic()) - self._lag

    def wall(self) -> float:
        """Seconds since 1970."""
        return (self._now[1] if self._now else time.time()) - self._lag

    @property
    def is_over(self) -> bool:
        """Whether the present is reached."""
        return self._lag == 0.0

    def pass_by(self, seconds: float) -> None:
        """Moves on, at most to the present."""
        self._lag = max(0.0, self._lag - seconds)

    def arrive(self) -> None:
        """The present, and on with it."""
        self._lag, self._now = 0.0, None


@dataclass(slots=True)
class Scene:
    """A run at some point of its life.

    Attributes:
        telemetry: what it has told.
        past: its clock.
        index: number of the next sample.
    """

    telemetry: Telemetry
    past: Past
    index: int = 11_204

    def facts(self) -> dict[str, Any]:
        """For `hsx.status.StatusServer`."""
        return {
            "limits": dict(LIMITS),
            "capture": {"states": ["h_4", "h_32", "h_60", "post_norm"], "hidden_size": 7168},
        }

    def commit(self, seconds: float, tokens_per_second: float, rng: random.Random) -> None:
        """Samples are committed for so many seconds, at about this rate."""
        left = seconds
        while left > 0 and not self.past.is_over and self.index < SAMPLES:
            tokens = min(8192, int(rng.lognormvariate(7.35, 0.85)) + 24)
            took = tokens / (tokens_per_second * rng.uniform(0.88, 1.12))
            left -= took
            self.past.pass_by(took)
            marker = Marker(RUN, self.index, 1, tokens)
            timings = {"request": 1.9, "dump": 0.02, "validate": 0.03, "write": 0.2}
            root = f"nvme{self.index % 4}"
            nbytes = tokens * BYTES_PER_TOKEN
            self.telemetry.sample_committed(
                self.index, marker, EPOCHS[0], self.index, tokens, nbytes, root, 1, timings, adopted=False
            )
            self.index += 1
            if self.index % 500 == 0:
                self.telemetry.canary_passed(EPOCHS[0], self.index)

    def disks(self, used: float, **lost: str) -> None:
        """The roots have so much of them in use; those named are lost, with the reason."""
        for number in range(4):
            name = f"nvme{number}"
            self.telemetry.root_known(name, f"/mnt/{name}/hsx", DISK, 20_000_000_000)
            free = int(DISK * (1 - used - 0.03 * number))
            speed = 2.1e9 + 1e8 * number
            room = max(0, free - 20_000_000_000 - 4_000_000_000)
            self.telemetry.root_space(name, free, room=room, booked=4_000_000_000, speed=speed)
            if name in lost:
                self.telemetry.root_lost(name, "root_unusable", lost[name])


def _scene(hours: float) -> Scene:
    past = Past(hours * 3600)
    quiet = structlog.wrap_logger(
        structlog.PrintLogger(), processors=[_drop], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )
    return Scene(Telemetry(clock=past.monotonic, wall=past.wall, logger=quiet), past)


def _drop(_logger: object, _method: str, _event: object) -> str:
    raise structlog.DropEvent


def _begun(hours: float, *, committed: int = 11_204) -> Scene:
    scene = _scene(hours)
    scene.index = committed
    done = TOKENS * committed // SAMPLES
    counts = Counts(SAMPLES - committed - 2, committed, 2, 7, TOKENS, done, done * BYTES_PER_TOKEN)
    telemetry = scene.telemetry
    telemetry.job_began("kimi-k2.5-eagle3", RUN, "/data/kimi-k2.5.zarr", counts, {"finite": 6}, {"finite": 2})
    telemetry.log.info("status.listening", url="http://127.0.0.1:8470")
    telemetry.phase("extracting")
    telemetry.engine_state(State.STARTING)
    return scene


def _extracted(hours: float, *, committed: int = 11_204) -> tuple[Scene, random.Random]:
    scene, rng = _begun(hours, committed=committed), random.Random(6)
    scene.past.pass_by(240)
    scene.telemetry.epoch_began(EPOCHS[0], continued=False)
    scene.telemetry.canary_passed(EPOCHS[0], 2)
    scene.telemetry.engine_state(State.READY)
    return scene, rng


def empty() -> Scene:
    """A job that begins: nothing is committed, the server comes up."""
    scene = _scene(0.01)
    telemetry = scene.telemetry
    telemetry.job_began("kimi-k2.5-eagle3", RUN, "/data/kimi-k2.5.zarr", Counts(SAMPLES, 0, 0, 0, TOKENS, 0, 0))
    telemetry.phase("extracting")
    telemetry.engine_state(State.STARTING)
    telemetry.engine_waiting("no server answers on 127.0.0.1:30000 yet")
    scene.past.arrive()
    return scene


def running() -> Scene:
    """In full swing for 100 minutes, with one restart behind it."""
    scene, rng = _extracted(1.7, committed=5_204)
    telemetry = scene.telemetry
    scene.commit(3400, 9200, rng)
    lost = Marker(RUN, 20_117, 3, 7_911)
    evidence = "h_60 has 3 NaN values in rows 4096 to 4098; expected none"
    for number in range(3):
        telemetry.violation(Marker(RUN, 20_117, number + 1, 7_911), "finite", evidence)
        telemetry.attempt_failed(lost, "finite", evidence, quarantined=number == 2)
    telemetry.violation(
        None, "advancing", "no dump for 97 s with 61 requests and 150,112 tokens in flight; expected one within 61 s"
    )
    telemetry.engine_state(State.BACKOFF, "advancing: no dump for 97 s with 61 requests in flight")
    telemetry.engine_restarted("advancing", "no dump for 97 s with 61 requests in flight; expected one within 61 s", 61, 2.0)
    scene.past.pass_by(2)
    telemetry.engine_state(State.STARTING)
    scene.past.pass_by(410)
    telemetry.epoch_began(EPOCHS[1], continued=False)
    telemetry.canary_passed(EPOCHS[1], 2)
    telemetry.engine_state(State.READY)
    scene.commit(3600, 9350, rng)
    scene.past.arrive()
    scene.disks(0.52)
    telemetry.gauges(61, 148_220, 8_499_200_000)
    return scene


def full() -> Scene:
    """Every disk is full: the intake waits until somebody makes room."""
    scene, rng = _extracted(0.8, committed=29_800)
    scene.commit(2300, 9100, rng)
    telemetry = scene.telemetry
    for number in range(4):
        name = f"nvme{number}"
        telemetry.root_known(name, f"/mnt/{name}/hsx", DISK, 20_000_000_000)
        telemetry.root_space(name, 20_300_000_000 - number * 90_000_000, room=300_000_000 - number * 90_000_000, speed=2.2e9)
    telemetry.gauges(0, 0, 0)
    telemetry.intake_paused(
        "roots_full",
        "free at least 169.8 MB on root nvme0 (the rest of the job needs up to 640.1 GB): no root has room for a shard of "
        "469.8 MB: nvme0 has 20.3 GB free, 20.0 GB of it reserved; nvme1 has 20.2 GB free, 20.0 GB of it reserved",
    )
    scene.past.arrive()
    return scene


def restarting() -> Scene:
    """The server died a moment ago, and is being started again."""
    scene, rng = _extracted(0.45)
    scene.commit(1150, 9000, rng)
    scene.disks(0.4, nvme3="root nvme3 cannot be written: Input/output error")
    telemetry = scene.telemetry
    telemetry.gauges(58, 140_000, 3_000_000_000)
    telemetry.violation(None, "alive", "process 41822 ended (SIGKILL); expected it to live")
    telemetry.engine_state(State.BACKOFF, "alive: process 41822 ended (SIGKILL)")
    telemetry.engine_restarted("alive", "process 41822 ended (SIGKILL); expected it to live", 58, 2.0)
    telemetry.gauges(0, 0, 3_000_000_000)
    scene.past.arrive()
    return scene


def failed() -> Scene:
    """The restart budget is spent."""
    scene, rng = _extracted(0.6)
    scene.commit(900, 8800, rng)
    scene.disks(0.45)
    telemetry = scene.telemetry
    for number in range(6):
        telemetry.violation(None, "alive", f"process {41822 + number} ended (SIGABRT); expected it to live")
        telemetry.engine_state(State.BACKOFF, "alive: the server process ended (SIGABRT)")
        telemetry.engine_restarted(
            "alive", f"process {41822 + number} ended (SIGABRT); expected it to live", 12, 2.0 * 2**number
        )
        scene.past.pass_by(30)
        if number < 5:
            telemetry.engine_state(State.STARTING)
            scene.past.pass_by(60)
    telemetry.engine_state(State.FAILED, "6 restarts within 3600 s; expected at most watchdog.restart_budget, 5")
    telemetry.phase(
        "failed",
        kind="restart_budget",
        reason="the server needed 6 restarts within 3600 s; expected at most watchdog.restart_budget, 5; the last: alive",
    )
    telemetry.gauges(0, 0, 0)
    scene.past.arrive()
    return scene


def done() -> Scene:
    """Everything is committed, but for what is quarantined."""
    scene, rng = _extracted(0.9, committed=SAMPLES - 12_000)
    before = scene.index
    telemetry = scene.telemetry
    scene.commit(2800, 9100, rng)
    # The rest at once, so that the totals come out even whatever the dice said.
    left = SAMPLES - 2 - scene.index
    tokens = TOKENS - TOKENS * before // SAMPLES - telemetry.snapshot()["progress"]["tokens"]["committed_by_run"]
    for number in range(left):
        share = tokens // (left - number)
        tokens -= share
        marker = Marker(RUN, scene.index, 1, share)
        telemetry.sample_committed(
            scene.index, marker, EPOCHS[0], scene.index, share, share * BYTES_PER_TOKEN, "nvme1", 1, {}, adopted=False
        )
        scene.index += 1
    telemetry.canary_passed(EPOCHS[0], SAMPLES)
    scene.disks(0.6)
    telemetry.engine_state(State.DRAINING)
    telemetry.engine_state(State.STOPPED)
    telemetry.gauges(0, 0, 0)
    telemetry.phase("done")
    scene.past.arrive()
    return scene


SCENES: Final[dict[str, Callable[[], Scene]]] = {
    "empty": empty,
    "running": running,
    "full": full,
    "restarting": restarting,
    "failed": failed,
    "done": done,
}
"""All of them, by name."""
