"""How much may be under way at once: pure budget arithmetic.

Four budgets bound a run, so that memory and tmpfs stay flat whatever the length of the dataset: request slots, tokens in
flight, and, from the request until the commit, the number of samples under way and the bytes of their dumps on the tmpfs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """The budgets.

    Attributes:
        requests: requests at the server at once.
        tokens: sum of their prompt tokens.
        staging_bytes: bytes of dumps in the dump directory, those still being written included.
        samples: samples under way, from request to commit.
    """

    requests: int
    tokens: int
    staging_bytes: int
    samples: int


@dataclass(slots=True)
class InFlight:
    """What is under way now."""

    requests: int = 0
    tokens: int = 0
    staging_bytes: int = 0
    samples: int = 0


def blocked_by(limits: Limits, now: InFlight, tokens: int, dump_bytes: int) -> str | None:
    """The first budget that has no room for a prompt of `tokens` whose dump takes `dump_bytes`; None when it may start.

    A prompt that is larger than the token budget alone may run when nothing else does: a budget paces, it does not
    exclude. The staging budget is hard, and the config check refuses one smaller than the largest sample.
    """
    if now.requests >= limits.requests:
        return "requests"
    if now.tokens and now.tokens + tokens > limits.tokens:
        return "tokens"
    if now.staging_bytes + dump_bytes > limits.staging_bytes:
        return "staging"
    if now.samples >= limits.samples:
        return "samples"
    return None
