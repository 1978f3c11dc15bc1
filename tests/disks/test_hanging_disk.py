"""A mount that hangs: who asks it for its room gets no answer. The other root goes on, and it is used again when it answers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hsx.clock import SystemClock
from hsx.space import RootsSettings, Space
from hsx.stores.root import ShardRoot
from hsx.telemetry import Telemetry
from hsx.testing.forgetful_disk import PAGE, forgetful_disks
from hsx.testing.stores import build_store, random_states

if TYPE_CHECKING:
    from pathlib import Path


def test_a_mount_that_hangs_holds_up_no_other_root(tmp_path: Path) -> None:
    built = build_store(tmp_path, [random_states(np.random.default_rng(0), 3, 2, 8)], roots=("sound",))
    (tmp_path / "image").write_bytes(bytes(PAGE))
    with forgetful_disks(tmp_path / "disk", tmp_path / "log", [tmp_path / "image"]) as disks:
        hanging = ShardRoot("hanging", disks.folder, built.info)
        roots = [hanging, built.roots[0]]
        telemetry = Telemetry()

        def state() -> str:
            return str(telemetry.snapshot()["roots"]["hanging"]["state"])

        async def until(space: Space, wanted: str) -> set[str]:
            """Books until the root is in that state; returns who got something on the way."""
            got = set()
            async with asyncio.timeout(300):
                while True:
                    booking = await space.book(1)
                    got.add(booking.root)
                    space.release(booking)
                    if state() == wanted:
                        return got
                    await asyncio.sleep(0.01)

        async def steps() -> None:
            space = Space(roots, RootsSettings(patience_s=0.5), SystemClock(), telemetry)
            assert hanging.free() > 0
            await until(space, "in_service")
            disks.hang()
            assert await until(space, "silent") == {"sound"}
            assert {(await space.book(1)).root for _ in range(20)} == {"sound"}
            disks.answer()
            await until(space, "in_service")
            assert space.lost == {}
            disks.hang()
            await until(space, "silent")
            space.shutdown()  # is not held up by the look that hangs

        asyncio.run(steps())
