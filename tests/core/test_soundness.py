"""When a run counts as sound: the table of what feeds a service manager's watchdog."""

from __future__ import annotations

import pytest

from hsx.core.soundness import Pulse, fault
from hsx.soundness import PATIENCE_S, Soundness


@pytest.mark.parametrize(
    ("looked_at", "advanced_at", "waits", "says"),
    [
        (999.0, 999.0, "", ""),
        (999.0, 900.0, "", ""),
        (999.0, 899.0, "", "nothing changed for 101 s with 3 attempts under way; expected something within 100 s"),
        (999.0, 0.0, "the engine, which is STARTING", ""),
        (969.0, 999.0, "", "the watchdog has not looked for 31 s; expected that within 30 s: it hangs, or was stopped"),
        (969.0, 0.0, "disks that are synced", "the watchdog has not looked"),
    ],
)
def test_a_run_is_sound_while_it_advances_or_waits_for_something_known(
    looked_at: float, advanced_at: float, waits: str, says: str
) -> None:
    found = fault(Pulse(1000.0, looked_at, advanced_at, waits, "3 attempts"), look_s=30.0, patience_s=100.0)
    assert found.startswith(says)
    assert bool(found) == bool(says)


def test_any_change_and_any_known_wait_begin_the_patience_anew() -> None:
    clock, told = Clock(), list[str]()
    state = {"marks": 0, "waits": ""}
    soundness = Soundness(
        clock,
        marks=lambda: state["marks"],
        waits=lambda: str(state["waits"]),
        looked_at=clock.monotonic,
        look_s=30.0,
        patience_s=lambda: 50.0,
        attempts=lambda: 2,
        tell=told.append,
    )
    assert soundness.ok()
    clock.now += PATIENCE_S + 50
    assert soundness.ok()
    clock.now += 1
    assert not soundness.ok()
    assert not soundness.ok()
    assert len(told) == 1
    state["marks"] = 1
    assert soundness.ok()
    assert told[1:] == [""]
    state["waits"] = "a full disk"
    clock.now += 10 * PATIENCE_S
    assert soundness.ok()
    state["waits"] = ""
    clock.now += PATIENCE_S
    assert soundness.ok()


class Clock:
    """A clock that is set by hand."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
