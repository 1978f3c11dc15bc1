"""Room in the dump directory: asked of its file system, since others fill it too, and waited for where there is none."""

from __future__ import annotations

import asyncio

import pytest

from hsx.core.admission import InFlight
from hsx.errors import EngineError
from hsx.space import POLL_S, SLACK_BYTES, Staging
from hsx.telemetry import Telemetry
from hsx.testing.virtual_time import VirtualClock, run_in_virtual_time

MB = 1_000_000


class Directory:
    """A dump directory of `size` bytes, apart from the slack."""

    def __init__(self, size: int) -> None:
        self.size = size + SLACK_BYTES
        self.others = 0
        self.dumps: dict[str, int] = {}

    def free(self) -> int:
        return self.size - self.others - sum(self.dumps.values())

    def sizes(self) -> dict[str, int]:
        return dict(self.dumps)


class Bench:
    """A directory with what is asked of it."""

    def __init__(self, size: int) -> None:
        self.directory = Directory(size)
        self.telemetry = Telemetry()
        self.clock = VirtualClock()
        self.staging = Staging(self.directory, lambda name: name.startswith("ours"), self.clock, self.telemetry)
        self.now = InFlight()

    @property
    def pauses(self) -> list[str]:
        return [pause["message"] for pause in self.telemetry.snapshot()["intake"]["pauses"]]


def test_room_that_was_promised_counts_once_whether_its_dump_is_there_or_not() -> None:
    async def steps() -> None:
        bench = Bench(10 * MB)
        bench.now.staging_bytes = 8 * MB
        assert not await bench.staging.admit(bench.now, 2 * MB), "all of it is yet to come"
        bench.directory.dumps = {"ours-1": 5 * MB}
        assert not await bench.staging.admit(bench.now, 2 * MB), "some of it has come"
        bench.directory.dumps = {"ours-1": 5 * MB, "theirs": 1 * MB}
        waiting = asyncio.create_task(bench.staging.admit(bench.now, 2 * MB))
        await bench.clock.sleep(3 * POLL_S)
        assert bench.pauses == [
            "free at least 1 MB in the dump directory: its file system has 4.07 MB free, 8 MB are promised to dumps under way, "
            "which take 5 MB of it now; expected room for a dump of 2 MB"
        ]
        del bench.directory.dumps["theirs"]
        assert await waiting
        assert bench.pauses == []

    run_in_virtual_time(steps())


def test_others_fill_it_and_leave_again() -> None:
    async def steps() -> None:
        bench = Bench(10 * MB)
        bench.directory.others = 9 * MB
        waiting = asyncio.create_task(bench.staging.admit(bench.now, 2 * MB))
        await bench.clock.sleep(3600.0)
        assert not waiting.done()
        bench.directory.others = 0
        await bench.clock.sleep(POLL_S)
        assert await waiting

    run_in_virtual_time(steps())


def test_after_a_refusal_prompts_go_out_one_at_a_time_until_a_dump_arrives() -> None:
    async def steps() -> None:
        bench = Bench(10 * MB)
        bench.staging.refused("the dump could not be written: EIO")
        assert bench.pauses == ["the dump could not be written: EIO"]
        assert not await bench.staging.admit(bench.now, MB), "nothing is at the server: this one shall show"
        bench.now.requests = 1
        waiting = asyncio.create_task(bench.staging.admit(bench.now, MB))
        await bench.clock.sleep(10 * POLL_S)
        assert not waiting.done()
        assert bench.pauses == ["the dump could not be written: EIO"]
        bench.staging.took()
        assert await waiting
        assert bench.pauses == []
        assert not await bench.staging.admit(bench.now, MB)

    run_in_virtual_time(steps())


def test_in_a_drained_run_nobody_waits() -> None:
    async def steps() -> None:
        bench = Bench(MB)
        waiting = asyncio.create_task(bench.staging.admit(bench.now, 2 * MB))
        await bench.clock.sleep(POLL_S / 2)
        bench.staging.drain()
        with pytest.raises(EngineError, match="free at least 1 MB in the dump directory") as caught:
            await waiting
        assert caught.value.kind == "staging_full"
        assert bench.pauses == []

    run_in_virtual_time(steps())
