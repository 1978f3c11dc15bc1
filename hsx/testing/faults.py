"""The faults that the reference engine commits on command: one table, each with what goes wrong.

A fault is armed with `POST /_fault` and a JSON object {"kind", "count", "match", "value"}; it strikes the next `count`
requests whose rid contains `match`. The engine's argument `--fault` takes the same object and arms it at each start, so that it
outlives a restart. `FAULTS` says what `value` means where it means something. Faults marked `silent` break no invariant of a
single sample: canaries or `hsx verify --against-hf` exist for them.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

_HOLD_POLL_S: Final = 0.002

Stage = Literal["http", "engine", "rows", "file", "answer"]
"""Where a fault strikes: before the request is queued; in the scheduler; in the rows of a finished prompt; when its dump is
published; in the HTTP answer."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table.

    Attributes:
        stage: where it strikes.
        says: what goes wrong, and what `value` means.
        silent: whether no invariant of a single sample can see it.
    """

    stage: Stage
    says: str
    silent: bool = False


FAULTS: Final[dict[str, Fault]] = {
    # before the request is queued
    "http_400": Fault("http", "the request is refused with 400"),
    "http_500": Fault("http", "the request fails with 500"),
    "http_503": Fault("http", "the request is turned away with 503, as when the queue is full"),
    "connection_reset_before": Fault("http", "the connection is cut before the prefill; there is no dump"),
    # in the scheduler
    "hold": Fault("engine", "the prompt waits after its first chunk, and all others with it, until faults are cleared"),
    "hang": Fault("engine", "the scheduler stops for good in the middle of a prompt; /health goes on answering 200"),
    "slow": Fault("engine", "every chunk of the prompt takes `value` times as long (default 10)"),
    "die": Fault("engine", "the process kills itself after the first chunk of the prompt"),
    "retraction": Fault("engine", "the prompt is prefilled twice from its first token, and the answer counts one retraction"),
    "abort": Fault("engine", "the server aborts the request after its first chunk; there is no dump"),
    "connection_reset_during": Fault(
        "engine", "the connection is cut after the prompt's first chunk; the prefill goes on and its dump appears"
    ),
    "swapped_rows_between_two": Fault(
        "engine", "two prompts in one batch get half of each other's rows, ids and states; waits for such a batch"
    ),
    # in the rows of a finished prompt
    "dump_of_another_sample": Fault("rows", "the dump holds ids and states of another prompt of the same length"),
    "shifted_rows": Fault("rows", "rows, ids and states, are one token late, the first being of the prompt's end"),
    "shifted_states": Fault("rows", "states are one token late, ids are right", silent=True),
    "states_of_another_sample": Fault("rows", "the ids are right, the states are another prompt's", silent=True),
    "last_chunk_missing": Fault("rows", "the last chunk (at least one token) was never written: zeros in ids and states"),
    "chunk_doubled": Fault("rows", "the first half of the rows, ids and states, stands in the second half again"),
    "wrong_ids": Fault("rows", "one id of the dump is another"),
    "zero_layer": Fault("rows", "all rows of state `value` (default 0) are zero"),
    "nan_row": Fault("rows", "one row of state `value` (default 0) is NaN"),
    "constant_rows": Fault("rows", "all rows of state `value` (default 0) equal its first row"),
    "equal_layers": Fault("rows", "the first state is a copy of the last one"),
    "wrong_layer": Fault("rows", "the first state is scaled by 1.5, as if it were of another layer", silent=True),
    # when the dump is published
    "dump_late": Fault("file", "the dump is published, and numbered, `value` seconds (default 1) after the answer"),
    "dump_withheld": Fault("file", "the dump is published, and numbered, however late: once this fault is cleared"),
    "dump_never": Fault("file", "no dump appears, and no number is used up"),
    "dump_vanishes": Fault("file", "the dump is numbered and counted as published, and is gone at once"),
    "dump_twice": Fault(
        "file", "the dump is published twice, the second time `value` seconds (default 0) later and with a new sequence"
    ),
    "never_sent": Fault("file", "a second dump appears under the same marker with 1000 more attempts, which was never sent"),
    "truncated_file": Fault("file", "the published file lacks its last `value` bytes (default 1)"),
    "bad_header": Fault("file", "the first byte of the header's JSON is not JSON's"),
    "wrong_epoch": Fault("file", "the header names another epoch"),
    "wrong_marker_inside": Fault("file", "the header names the marker of another sample of the same length"),
    "enospc": Fault("file", "the dump cannot be written: an error file with ENOSPC appears in its place"),
    "sequence_reset": Fault("file", "the header's sequence is 1 again"),
    "sequence_gap": Fault("file", "the sequence jumps: the number before was used up and never seen"),
    "sequence_repeat": Fault("file", "the sequence is the previous dump's once more; an epoch's first dump is left alone"),
    # in the HTTP answer
    "cached_tokens": Fault("answer", "the answer says that `value` tokens (default 1) came from the cache"),
    "wrong_prompt_tokens": Fault("answer", "the answer counts `value` tokens (default 1) more than the prompt has"),
    "no_counts": Fault("answer", "the answer has no cached_tokens"),
    "answer_cut": Fault("answer", "the connection ends in the middle of the answer's body"),
    "connection_reset_after": Fault("answer", "the connection is cut after the dump is published, before the answer"),
}


@dataclass(slots=True)
class Armed:
    """A fault waiting to strike `count` more times at rids that contain `match`; a count of -1 never runs out."""

    kind: str
    count: int
    match: str
    value: float | None

    def number(self, default: float) -> float:
        """`value`, or what the table names as its default."""
        return default if self.value is None else self.value


class Faults:
    """The armed faults. Thread-safe: the scheduler and the HTTP loop both ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._armed: list[Armed] = []
        self._struck: dict[str, int] = {}

    def arm(self, kind: str, count: int = 1, match: str = "", value: float | None = None) -> None:
        """Adds a fault. Raises ValueError, naming the argument, for an unknown kind or a count of 0."""
        if kind not in FAULTS:
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(FAULTS)}")
        if count == 0 or count < -1:
            raise ValueError(f"count is {count}; expected at least 1, or -1 for ever")
        with self._lock:
            self._armed.append(Armed(kind, count, match, value))

    def arm_json(self, text: str) -> None:
        """Adds the fault that a JSON object with the arguments of `arm` describes. Raises ValueError where it does not."""
        try:
            self.arm(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"fault {text!r} cannot be armed: {error}") from error

    def clear(self, kind: str = "", match: str = "") -> None:
        """Disarms faults of one kind, or all; with `match`, those armed for exactly that. What has struck stays counted."""
        with self._lock:
            gone = [fault for fault in self._armed if kind in {"", fault.kind} and match in {"", fault.match}]
            self._armed = [fault for fault in self._armed if fault not in gone]

    def take(self, kind: str, rid: str) -> Armed | None:
        """The fault of this kind that strikes `rid` now, which uses up one of its count; None if there is none."""
        if not self._armed:
            return None
        with self._lock:
            for fault in self._armed:
                if fault.kind == kind and fault.match in rid:
                    if fault.count > 0:
                        fault.count -= 1
                    if fault.count == 0:
                        self._armed.remove(fault)
                    self._count(kind)
                    return fault
        return None

    def armed(self, kind: str, rid: str) -> bool:
        """Whether a fault of this kind waits for `rid`; uses up nothing."""
        if not self._armed:
            return False
        with self._lock:
            return any(fault.kind == kind and fault.match in rid for fault in self._armed)

    def hold(self, rid: str, dropped: Callable[[], bool], kind: str = "hold") -> None:
        """Blocks while a `hold`, or another `kind`, waits for `rid` and it is not dropped; counts as one strike."""
        if not self.armed(kind, rid):
            return
        with self._lock:
            self._count(kind)
        while self.armed(kind, rid) and not dropped():
            time.sleep(_HOLD_POLL_S)

    def _count(self, kind: str) -> None:
        self._struck[kind] = self._struck.get(kind, 0) + 1

    def struck(self) -> dict[str, int]:
        """How often each kind has struck so far."""
        with self._lock:
            return dict(self._struck)
