"""Room on roots: promised before it is needed, never twice, and waited for where there is none."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsx.clock import SystemClock
from hsx.errors import EngineError, RunError
from hsx.space import POLL_S, REFUSED_S, Booking, RootsSettings, Space
from hsx.telemetry import Telemetry
from hsx.testing.disks import MemoryRoot
from hsx.testing.virtual_time import VirtualClock, run_in_virtual_time

if TYPE_CHECKING:
    from hsx.ports import Clock


class Bench:
    """Roots of given sizes; in virtual time, unless there is another clock."""

    def __init__(self, sizes: dict[str, int], clock: Clock | None = None, **known: Any) -> None:
        self.roots = {name: MemoryRoot(name, size) for name, size in sizes.items()}
        self.telemetry = Telemetry()
        self.clock = clock or VirtualClock()
        self.space = Space(list(self.roots.values()), RootsSettings(**known), self.clock, self.telemetry)

    def write(self, booking: Booking) -> None:
        """Puts a shard where it is booked."""
        self.roots[booking.root].take(booking.size)
        self.space.release(booking)

    @property
    def pauses(self) -> list[str]:
        """What is said about the pauses that are going on."""
        return [pause["message"] for pause in self.telemetry.snapshot()["intake"]["pauses"]]

    def state(self, name: str) -> str:
        """A root's state in the status document."""
        return str(self.telemetry.snapshot()["roots"][name]["state"])


def test_a_full_root_pauses_the_intake_until_somebody_frees_enough() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000}, reserves={"a": 100}, needed=lambda: 5_000_000)
        bench.roots["a"].used = 500
        waiting = asyncio.create_task(bench.space.book(600))
        await bench.clock.sleep(60.0)
        assert not waiting.done()
        assert bench.pauses == [
            "free at least 200 bytes on root a (the rest of the job needs up to 5 MB): no root has room for a shard of 600 "
            "bytes: a has 500 bytes free, 100 bytes of it reserved"
        ]
        bench.roots["a"].used = 299
        await bench.clock.sleep(2 * POLL_S)
        assert (await waiting).root == "a"
        assert bench.pauses == []

    run_in_virtual_time(steps())


def test_room_is_promised_once_and_a_writer_in_the_middle_pauses_nobody() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000})
        first = await bench.space.book(600)
        waiting = asyncio.create_task(bench.space.book(400))
        second = await waiting
        third = asyncio.create_task(bench.space.book(1))
        await asyncio.sleep(POLL_S / 2)
        assert not third.done()
        assert bench.pauses == [], "the room of the other two may still come back"
        bench.space.release(second)
        assert (await third).root == "a"
        bench.write(first)
        assert bench.roots["a"].free() == 400

    run_in_virtual_time(steps())


def test_a_lost_root_is_told_and_its_bookings_go_elsewhere() -> None:
    async def steps() -> None:
        bench = Bench({"a": 10_000, "b": 1000})
        booking = await bench.space.book(100)
        assert booking.root == "a"
        bench.space.failed("a", RunError("root_unusable", "root a: EIO"))
        bench.space.failed("a", RunError("root_unusable", "root a: EIO again"))
        await bench.space.place(booking)
        assert booking.root == "b"
        assert bench.state("a") == "lost"
        assert bench.telemetry.snapshot()["roots"]["a"]["reason"] == "root a: EIO"
        bench.roots["b"].failure = RunError("root_unusable", "root b: ENOENT")
        with pytest.raises(RunError, match=r"every root is out of service\n  a: root a: EIO\n  b: root b: ENOENT") as caught:
            await bench.space.book(1)
        assert caught.value.kind == "root_unusable"

    run_in_virtual_time(steps())


def test_a_root_that_is_drained_takes_nothing_new() -> None:
    async def steps() -> None:
        draining = {"b"}
        bench = Bench({"a": 1000, "b": 9000}, draining=lambda name: name in draining)
        assert (await bench.space.book(1000)).root == "a"
        waiting = asyncio.create_task(bench.space.book(1000))
        await bench.clock.sleep(5 * POLL_S)
        assert bench.state("b") == "draining"
        assert "b is being emptied" in bench.pauses[0]
        draining.clear()
        await bench.clock.sleep(2 * POLL_S)
        assert (await waiting).root == "b"

    run_in_virtual_time(steps())


def test_a_root_that_refuses_against_its_own_word_is_tried_again_later() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000})
        booking = await bench.space.book(100)
        bench.space.failed("a", RunError("roots_full", "root a: no space (EDQUOT)"))
        began = bench.clock.monotonic()
        await bench.space.place(booking)
        assert bench.clock.monotonic() - began >= REFUSED_S
        assert [error["kind"] for error in bench.telemetry.snapshot()["last_errors"]] == ["roots_full", "roots_full"]
        # With room for one more than it had then it is tried at once; with less it is not, whatever comes and goes there.
        bench.space.failed("a", RunError("roots_full", "root a: no space (EDQUOT)"), wanted=100)
        waiting = asyncio.create_task(bench.space.place(booking))
        await asyncio.sleep(2 * POLL_S)
        assert bench.state("a") == "refusing"
        assert "a answers ENOSPC with 1 kB free" in bench.pauses[0]
        bench.roots["a"].size += 99
        await asyncio.sleep(2 * POLL_S)
        assert bench.state("a") == "refusing"
        bench.roots["a"].size += 1
        began = bench.clock.monotonic()
        await waiting
        assert bench.clock.monotonic() - began <= POLL_S

    run_in_virtual_time(steps())


def test_in_a_drained_run_nobody_waits() -> None:
    async def steps() -> None:
        bench = Bench({"a": 10})
        waiting = asyncio.create_task(bench.space.book(11))
        await bench.clock.sleep(3 * POLL_S)
        bench.space.drain()
        with pytest.raises(EngineError, match="no root has room for a shard of 11 bytes") as caught:
            await waiting
        assert caught.value.kind == "roots_full"
        assert bench.pauses == []

    run_in_virtual_time(steps())


def test_roots_on_one_disk_share_its_room_and_honour_each_others_reserve() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000, "b": 1000}, disks={"a": 7, "b": 7}, reserves={"b": 200})
        assert [bool((await bench.space.book(400)).root) for _ in range(2)] == [True, True]
        waiting = asyncio.create_task(bench.space.book(1))
        await bench.clock.sleep(3 * POLL_S)
        assert not waiting.done()
        waiting.cancel()

    run_in_virtual_time(steps())


def test_a_slow_disk_gets_less() -> None:
    async def steps() -> None:
        bench = Bench({"fast": 10**9, "slow": 10**9})
        taken = Counter[str]()
        for _ in range(200):
            booking = await bench.space.book(1000)
            name = booking.root
            taken[name] += 1
            bench.write(booking)
            bench.space.wrote(name, 1000, 0.001 if name == "fast" else 0.004)
        assert 3.5 < taken["fast"] / taken["slow"] < 4.5

    run_in_virtual_time(steps())


async def until(bench: Bench, name: str, state: str) -> None:
    """Books until a root is in a state, and hands the room back."""
    async with asyncio.timeout(300):
        while True:
            bench.space.release(await bench.space.book(1))
            if bench.state(name) == state:
                return
            await asyncio.sleep(0.01)


def test_a_root_that_hangs_holds_up_no_other_and_comes_back_by_itself() -> None:
    async def steps() -> None:  # in real time: a thread that hangs stops a virtual clock
        bench = Bench({"a": 10_000, "b": 1000}, SystemClock(), patience_s=0.5)
        promised = await bench.space.book(100)
        while promised.root != "a":  # a busy machine may let half a second pass without an answer
            bench.space.release(promised)
            promised = await bench.space.book(100)
        bench.roots["a"].answers.clear()
        await until(bench, "a", "silent")
        root = bench.telemetry.snapshot()["roots"]["a"]
        assert (root["free_bytes"], root["room_bytes"]) == (10_000, 0)
        assert root["reason"] == "root a did not answer for 0.5 s: its mount hangs"
        assert {(await bench.space.book(1)).root for _ in range(20)} == {"b"}
        await bench.space.place(promised)
        assert promised.root == "b", "what was promised before goes elsewhere"
        assert "root_silent" in {error["kind"] for error in bench.telemetry.snapshot()["last_errors"]}
        assert bench.space.lost == {}
        bench.roots["a"].answers.set()
        await until(bench, "a", "in_service")
        assert bench.telemetry.snapshot()["roots"]["a"]["reason"] == ""
        assert "a" in {(await bench.space.book(1)).root for _ in range(20)}
        bench.space.shutdown()

    asyncio.run(steps())


def test_while_every_root_hangs_the_intake_pauses() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000}, SystemClock(), patience_s=0.1)
        bench.roots["a"].answers.clear()
        waiting = asyncio.create_task(bench.space.book(100))
        async with asyncio.timeout(300):
            while not bench.pauses:
                await bench.clock.sleep(0.01)
        assert bench.pauses == ["no root has room for a shard of 100 bytes: a does not answer"]
        assert not waiting.done()
        bench.roots["a"].answers.set()
        assert (await waiting).root == "a"
        assert bench.pauses == []
        bench.space.shutdown()

    asyncio.run(steps())


def test_a_root_that_fails_while_it_hangs_is_lost() -> None:
    async def steps() -> None:
        bench = Bench({"a": 10_000, "b": 1000}, SystemClock(), patience_s=0.1)
        bench.roots["a"].answers.clear()
        await until(bench, "a", "silent")
        bench.space.failed("a", RunError("root_unusable", "root a: EIO"))
        assert (await bench.space.book(1)).root == "b"
        assert bench.state("a") == "lost"
        bench.roots["a"].answers.set()
        bench.space.shutdown()

    asyncio.run(steps())


def test_an_answer_to_a_question_of_before_is_not_taken() -> None:
    async def steps() -> None:
        bench = Bench({"a": 1000}, SystemClock(), patience_s=300.0)
        bench.roots["a"].answers.clear()
        given_up = asyncio.create_task(bench.space.book(100))
        await asyncio.sleep(0.01)
        given_up.cancel()
        waiting = asyncio.create_task(bench.space.book(600))
        await asyncio.sleep(0.01)
        bench.roots["a"].used = 300
        bench.roots["a"].answers.set()
        assert (await waiting).root == "a"
        assert bench.telemetry.snapshot()["roots"]["a"]["free_bytes"] == 700
        bench.space.shutdown()

    asyncio.run(steps())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 300), st.integers(0, 1)), min_size=1, max_size=3),
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.integers(1, 6),
)
def test_whatever_is_under_way_no_reserve_is_touched(disks: list[tuple[int, int, int]], sizes: list[int], at_once: int) -> None:
    """Several samples at a time; some hand their room back unused, and a reader's look and a write may cross."""

    async def steps() -> None:
        names = [str(number) for number in range(len(disks))]
        bench = Bench(
            {name: size for name, (size, _, _) in zip(names, disks, strict=True)},
            reserves={name: reserve for name, (_, reserve, _) in zip(names, disks, strict=True)},
        )
        queue = list(enumerate(sizes))

        async def worker() -> None:
            while queue:
                number, size = queue.pop()
                booking = await bench.space.book(size)
                await asyncio.sleep(number % 3)
                if number % 4 == 3:
                    bench.space.release(booking)
                else:
                    bench.write(booking)

        workers = [asyncio.create_task(worker()) for _ in range(at_once)]
        await asyncio.wait(workers, timeout=600.0)
        stuck = [one for one in workers if not one.done()]
        for one in stuck:
            one.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert [one.exception() for one in workers if one not in stuck] == [None] * (at_once - len(stuck))
        for name, (size, reserve, _) in zip(names, disks, strict=True):
            assert bench.roots[name].used <= max(0, size - reserve)
        if stuck:
            largest = max(sizes)
            assert all(bench.roots[n].free() - r < largest for n, (_, r, _) in zip(names, disks, strict=True))

    run_in_virtual_time(steps())
