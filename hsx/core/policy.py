"""What is done about a violation or an error: the policy table.

A violation that speaks of the sample alone (its content) is retried and then quarantined. One that speaks of identity
(token and counter groups) is retried too, but each is also held against the epoch: several within a window mean that the
server mixes requests, and nothing it says can be trusted. Failures of whatever kind, of many samples in a row, put the server
to the test of a canary. What shows the server itself to be another or dead voids the epoch at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal


class Action(Enum):
    """What happens to the sample whose attempt failed."""

    RETRY = "retry"
    QUARANTINE = "quarantine"


ForSample = Literal["retry", "quarantine", "give back", "-"]
"""`retry`: tried again `pipeline.retries` times, then quarantined. `quarantine`: at once, another attempt cannot mend it.
`give back`: to the queue, held against nobody. `-`: it concerns no single sample; those in flight are given back."""
ForEpoch = Literal["count", "test", "void", "refuse", "-"]
"""`count`: `watchdog.violations` of these within `watchdog.violation_window_s` void the epoch. `test`: as many different
samples that fail without a commit in between bring a canary, and the epoch is void if it fails. `void`: at once, and the
server is restarted. `refuse`: the server is not used, and the run ends. `-`: nothing."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done about one invariant or error kind.

    Attributes:
        sample: what happens to the sample.
        epoch: what happens to the epoch.
        because: why.
    """

    sample: ForSample
    epoch: ForEpoch
    because: str


_MIXED = "a server that mixes requests breaks it again and again"
_CONTENT = "one bad prompt may cause it; a broken server causes it everywhere, its canary included"
_CONGESTED = "it passes when less is under way; `pipeline.congestion_s` bounds the wait"
_NO_ROOM = "the intake pauses until somebody has freed some"

POLICY: Final[dict[str, Rule]] = {
    # invariants
    "prompt_tokens": Rule("retry", "count", _MIXED),
    "uncached": Rule("retry", "count", "a cached or restarted prefill leaves rows of another request"),
    "epoch": Rule("retry", "count", "a server that was replaced still writes"),
    "expected": Rule("retry", "count", _MIXED),
    "rows": Rule("retry", "count", _MIXED),
    "tokens_equal": Rule("retry", "count", _MIXED),
    "finite": Rule("retry", "test", _CONTENT),
    "nonzero_rows": Rule("retry", "test", _CONTENT),
    "not_repeated": Rule("retry", "test", _CONTENT),
    "published": Rule("retry", "count", "one dump may be lost; a capture that is off loses all"),
    "sequence": Rule("-", "void", "a counter that goes back or repeats is another process; a mere gap is only counted"),
    "sole_writer": Rule("-", "void", "two processes number and overwrite each other's dumps"),
    "twins": Rule("-", "void", "the server mixes or shifts rows; commits since the last sound canary are revoked"),
    "fingerprint": Rule("-", "void", "the states are not those of the first boot; as for `twins`"),
    "canary": Rule("-", "void", "it follows many failed samples: then it is the server, and not they"),
    "advancing": Rule("-", "void", "a stalled server does not recover by waiting; those in flight are suspects of a hunt"),
    "alive": Rule("-", "void", "the process is gone; those in flight are suspects of a hunt"),
    # error kinds of a sample
    "request_refused": Rule("quarantine", "-", "the server said no to this very prompt"),
    "request_failed": Rule("retry", "test", "the connection broke, or the server answered 5xx"),
    "request_timeout": Rule("retry", "test", "its budget of time grows with the tokens in flight"),
    "request_duplicate": Rule("retry", "test", "an attempt that was given up still runs at the server"),
    "answer_invalid": Rule("retry", "count", "without its counts nothing is proved"),
    "dump_invalid": Rule("retry", "count", "without its header nothing is proved"),
    "dump_failed": Rule("retry", "test", "the capture side gave this dump up, and says why"),
    "server_killed": Rule("quarantine", "-", "the server died whenever this sample alone was on trial"),
    # error kinds of the server
    "server_full": Rule("give back", "-", _CONGESTED),
    "staging_full": Rule("give back", "-", _NO_ROOM),
    "roots_full": Rule("give back", "-", f"{_NO_ROOM}; dumps wait, also for the next run where this one is drained"),
    "server_gone": Rule("give back", "void", "nobody answers on its port"),
    "server_protocol": Rule("give back", "void", "what answers is no such server"),
    "staging_gone": Rule("give back", "void", "the server writes into a folder that nobody can see any more"),
    "hsx_stopped": Rule("give back", "-", "its own silence is nobody's fault"),
    "epoch_void": Rule("give back", "-", "the verdict was given elsewhere"),
    "server_start_failed": Rule("-", "void", "it ended or stayed silent before it was ready"),
    "epoch_unknown": Rule("-", "void", "no server is recognised"),
    "canary_failed": Rule("-", "void", "at boot: the states are not what they must be"),
    "server_refused": Rule("-", "refuse", "another start with the same arguments would change nothing"),
    "capture_off": Rule("-", "refuse", "another start in the same environment would change nothing"),
}
"""Every invariant, and every error kind that a sample or a server can meet."""


def on_failure(reason: str, failures: int, retries: int) -> Action:
    """What to do with a sample after its `failures`-th failure (from 1), given `retries` further attempts allowed.

    Args:
        reason: name of the violated invariant, or an error kind.
        failures: failures of this sample so far, this one included.
        retries: how many failures are forgiven.
    """
    if POLICY[reason].sample == "quarantine" or failures > retries:
        return Action.QUARANTINE
    return Action.RETRY


class Streak:
    """Counts different samples that failed with no sample committed in between: is it they, or the server?

    Refusals do not count: there the server said no to this very prompt, and said so.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._samples: set[int] = set()

    def add(self, index: int, reason: str) -> bool:
        """Records a failure of sample `index`; True when the server has to be put to the test."""
        if POLICY[reason].epoch != "-":
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
