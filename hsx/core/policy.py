"""What is done about a violation or an error: the policy table.

A violation that speaks of the sample alone (its content) is retried and then quarantined. One that speaks of identity
(token and counter groups) is retried too, but each is also held against the epoch: several within a window mean that the
server mixes requests, and nothing it says can be trusted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final

from hsx.core.invariants import INVARIANTS, Group


class Action(Enum):
    """What happens to the sample whose attempt failed."""

    RETRY = "retry"
    QUARANTINE = "quarantine"


EPOCH_GROUPS: Final[frozenset[Group]] = frozenset({"token", "counter"})
"""Groups of invariants that speak against the server and not only against the sample."""

UNPROVED: Final[frozenset[str]] = frozenset({"dump_invalid", "answer_invalid"})
"""Error kinds under which nothing could be proved, by the server's fault."""

HOPELESS: Final[frozenset[str]] = frozenset({"request_refused"})
"""Error kinds that another attempt cannot mend: the server said no to this very prompt."""


def on_failure(reason: str, failures: int, retries: int) -> Action:
    """What to do with a sample after its `failures`-th failure (from 1), given `retries` further attempts allowed.

    Args:
        reason: name of the violated invariant, or an error kind.
        failures: failures of this sample so far, this one included.
        retries: how many failures are forgiven.
    """
    if reason in HOPELESS or failures > retries:
        return Action.QUARANTINE
    return Action.RETRY


def against_epoch(reason: str) -> bool:
    """Whether `reason` counts towards voiding the epoch."""
    invariant = INVARIANTS.get(reason)
    return reason in UNPROVED or (invariant is not None and invariant.group in EPOCH_GROUPS)


class Streak:
    """Counts different samples that failed with no sample committed in between: is it they, or the server?

    Refusals do not count: there the server said no to this very prompt, and said so.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._samples: set[int] = set()

    def add(self, index: int, reason: str) -> bool:
        """Records a failure of sample `index`; True when the server has to be put to the test."""
        if reason not in HOPELESS:
            self._samples.add(index)
        return len(self._samples) >= self._limit

    def clear(self) -> None:
        """A sample was committed, or the server stood the test."""
        self._samples.clear()


@dataclass(frozen=True, slots=True)
class WindowLimit:
    """So many events within so many seconds are too many."""

    count: int
    seconds: float


class ViolationWindow:
    """Counts the violations held against an epoch within a sliding window of time."""

    def __init__(self, limit: WindowLimit) -> None:
        self._limit = limit
        self._times: deque[float] = deque()

    def add(self, now: float) -> bool:
        """Records one at monotonic time `now` (seconds); True when the limit is reached."""
        self._times.append(now)
        while self._times and self._times[0] <= now - self._limit.seconds:
            self._times.popleft()
        return len(self._times) >= self._limit.count

    def clear(self) -> None:
        """Forgets everything: a new epoch starts clean."""
        self._times.clear()
