"""What the writer thread asks for, as data: calls of `DumpWriter` and what came of them.

So they can be done in this process (`DumpsHere`) or in another one (`writer_process.DumpsElsewhere`), many at a time. No torch:
the other process has no use for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hsx.capture.dumpwriter import DumpWriter
    from hsx.core.marker import Marker

Kind: TypeAlias = Literal["begin", "write", "publish", "whole", "fail", "drop"]
"""A method of `DumpWriter`; `whole` is `write_whole`."""

_NO_STATES: Final = np.empty((0, 0, 0), np.uint16)
_NO_IDS: Final = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call.

    Attributes:
        kind: of what.
        marker: for which dump.
        offset: `write`: index of the first token.
        states: `write` and `whole`: bits of bf16, uint16 [n, L, H].
        input_ids: `write` and `whole`: int32 [n].
        reason: `fail`: why.
        errno: `fail`: the operating system's word for it, or 0.
    """

    kind: Kind
    marker: Marker
    offset: int = 0
    states: NDArray[np.uint16] = field(default_factory=lambda: _NO_STATES)
    input_ids: NDArray[np.int32] = field(default_factory=lambda: _NO_IDS)
    reason: str = ""
    errno: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one call.

    Attributes:
        sequence: `publish` and `whole`: the number that was given.
        error: why it failed, with the name of the exception; "" where it did not.
        errno: the exception's, or 0.
    """

    sequence: int = 0
    error: str = ""
    errno: int = 0


class Dumps(Protocol):
    """Whoever does calls. One thread at a time."""

    def do(self, calls: Sequence[Call]) -> list[Outcome]:
        """Does calls one after the other, and returns what came of each; see `perform`.

        Raises ValueError, before anything is done, for arrays that do not lie where they should: nothing else.
        """
        ...

    def close(self) -> None:
        """Nothing more is to be done. Idempotent."""
        ...


class DumpsHere:
    """Does them at once, on the thread that asks.

    Args:
        writer: of the epoch.
    """

    def __init__(self, writer: DumpWriter) -> None:
        self._writer = writer

    def do(self, calls: Sequence[Call]) -> list[Outcome]:
        """See `Dumps`."""
        return perform(self._writer, calls)

    def close(self) -> None:
        """See `Dumps`."""


def perform(writer: DumpWriter, calls: Iterable[Call]) -> list[Outcome]:
    """Does calls one after the other. Behind one that failed, calls of its marker are not done, and have failed as it did.

    `fail` and `drop` are always done: they are what one does about it.
    """
    failed: dict[Marker, Outcome] = {}
    outcomes = []
    for call in calls:
        outcome = failed.get(call.marker) if call.kind not in ("fail", "drop") else None
        if outcome is None:
            try:
                outcome = Outcome(_one(writer, call))
            except Exception as error:  # noqa: BLE001 - the boundary: what fails costs its marker
                outcome = failed[call.marker] = failure(error)
        outcomes.append(outcome)
    return outcomes


def failure(error: Exception) -> Outcome:
    """What an exception makes of a call."""
    return Outcome(error=f"{type(error).__name__}: {error}", errno=getattr(error, "errno", None) or 0)


def _one(writer: DumpWriter, call: Call) -> int:
    sequence = 0
    match call.kind:
        case "whole":
            sequence = writer.write_whole(call.marker, call.states, call.input_ids)
        case "begin":
            writer.begin(call.marker)
        case "write":
            writer.write(call.marker, call.offset, call.states, call.input_ids)
        case "publish":
            sequence = writer.publish(call.marker)
        case "fail":
            writer.fail(call.marker, call.reason, call.errno)
        case "drop":
            writer.drop(call.marker)
    return sequence
