"""Is a run sound? It is while it advances, and while it waits for something that is known and bounded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """A run at one moment; times in monotonic seconds.

    Attributes:
        now: the moment.
        looked_at: when the part of it that judges the server last looked.
        advanced_at: when something last changed: a commit, a failure, an answer, a request, the engine's state.
        waits: what it soundly waits for; "" for nothing.
        under_way: what has to come out of it, in words, such as "3 attempts".
    """

    now: float
    looked_at: float
    advanced_at: float
    waits: str
    under_way: str


def fault(pulse: Pulse, look_s: float, patience_s: float) -> str:
    """Why the run is not sound; "" where it is.

    Args:
        pulse: the run.
        look_s: the judge of the server may be silent for so long; then nobody ends a stall.
        patience_s: nothing may change for so long.
    """
    unseen, still = pulse.now - pulse.looked_at, pulse.now - pulse.advanced_at
    if unseen > look_s:
        return f"the watchdog has not looked for {unseen:.0f} s; expected that within {look_s:.0f} s: it hangs, or was stopped"
    if pulse.waits or still <= patience_s:
        return ""
    return f"nothing changed for {still:.0f} s with {pulse.under_way} under way; expected something within {patience_s:.0f} s"
