"""Is the engine advancing? Judged from what came out, never from a health endpoint."""

from __future__ import annotations

from dataclasses import dataclass

from hsx.core.invariants import Violation


@dataclass(frozen=True, slots=True)
class ProgressLimits:
    """How long silence may last.

    Attributes:
        grace_s: silence that is always allowed, in seconds.
        slowest_tokens_per_s: the slowest prefill rate that still counts as working. Every token in flight extends the deadline
            by its reciprocal, so a long prompt, or a server slowed down twenty times, is not killed for nothing.
    """

    grace_s: float
    slowest_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's progress at one moment.

    Attributes:
        now: monotonic seconds.
        last_advance: monotonic seconds of the last sign of work: a dump, an answer, or the first request after idleness.
        requests_in_flight: requests sent and not yet answered.
        tokens_in_flight: sum of their prompt lengths.
    """

    now: float
    last_advance: float
    requests_in_flight: int
    tokens_in_flight: int


def deadline_s(limits: ProgressLimits, tokens: int) -> float:
    """Seconds of silence allowed with `tokens` prompt tokens in flight."""
    return limits.grace_s + tokens / limits.slowest_tokens_per_s


def advancing(limits: ProgressLimits, snapshot: Snapshot) -> Violation | None:
    """With requests in flight, something came out within a deadline that grows with the tokens in flight."""
    if snapshot.requests_in_flight == 0:
        return None
    silence = snapshot.now - snapshot.last_advance
    allowed = deadline_s(limits, snapshot.tokens_in_flight)
    if silence <= allowed:
        return None
    return Violation(
        "advancing",
        f"nothing came out for {silence:.1f} s with {snapshot.requests_in_flight} requests and "
        f"{snapshot.tokens_in_flight} tokens in flight; expected something within {allowed:.1f} s",
    )
