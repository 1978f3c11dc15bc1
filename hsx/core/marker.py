"""The marker: the name under which one attempt of one sample travels.

It is the request's `rid`, the dump's file name and a field of the dump's metadata. It is never reused, because the
attempt number is made durable in the ledger before the request is sent.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_LENGTH = 64
_FORMAT = "hsx1"
_PATTERN = re.compile(_FORMAT + r"-([0-9a-f]{8})-(c?)(0|[1-9][0-9]*)-(0|[1-9][0-9]*)-([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Marker:
    """`hsx1-<run>-<index>-<attempt>-<tokens>`, with a `c` before the index of a canary.

    Attributes:
        run: 8 hex digits, drawn once per job and kept in the ledger.
        index: sample index in the store; for a canary, its number.
        attempt: counts from 1 for each sample.
        tokens: length of the prompt, so that the capture side knows when a chunked prompt is whole.
        canary: a probe prompt of hsx's own, never stored.
    """

    run: str
    index: int
    attempt: int
    tokens: int
    canary: bool = False

    def __post_init__(self) -> None:
        if parse(str(self)) is None:
            raise ValueError(f"not a valid marker: {self}")

    def __str__(self) -> str:
        return f"{prefix(self.run)}{'c' if self.canary else ''}{self.index}-{self.attempt}-{self.tokens}"


ANY_PREFIX = f"{_FORMAT}-"
"""What every marker of every run begins with."""


def prefix(run: str) -> str:
    """What every marker of `run` begins with, and no marker of another run."""
    return f"{_FORMAT}-{run}-"


def parse(rid: str) -> Marker | None:
    """The marker that `rid` spells, or None where `rid` is foreign (health checks, warm-ups, other clients)."""
    match = _PATTERN.fullmatch(rid) if len(rid) <= MAX_LENGTH else None
    if match is None:
        return None
    marker = object.__new__(Marker)
    run, canary, index, attempt, tokens = match.groups()
    for name, value in (
        ("run", run),
        ("index", int(index)),
        ("attempt", int(attempt)),
        ("tokens", int(tokens)),
        ("canary", canary == "c"),
    ):
        object.__setattr__(marker, name, value)
    return marker
