"""The faults of a simulated server: what it does to one request, and by which reasons hsx may hold that against the sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.dump import decode_header, encode_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.dump import DumpHeader

FAULTS: Final[dict[str, frozenset[str]]] = {
    # the request never reaches the scheduler
    "refused": frozenset({"request_refused"}),
    "failed": frozenset({"request_failed"}),
    "reset_before": frozenset({"request_failed"}),
    "full": frozenset(),
    # in the scheduler
    "die": frozenset({"server_killed"}),
    "hang": frozenset({"request_timeout", "server_killed"}),
    "slow": frozenset(),
    "lost": frozenset({"request_failed"}),
    # in the rows
    "other_sample": frozenset({"tokens_equal"}),
    "swapped": frozenset({"tokens_equal"}),
    "late_rows": frozenset({"tokens_equal"}),
    "nan": frozenset({"finite"}),
    "zero": frozenset({"nonzero_rows"}),
    # in the file
    "never": frozenset({"published"}),
    "late": frozenset({"published"}),
    "twice": frozenset(),
    "truncated": frozenset({"dump_invalid"}),
    "bad_header": frozenset({"dump_invalid"}),
    "other_epoch": frozenset({"epoch"}),
    "other_marker": frozenset({"expected"}),
    "gap": frozenset(),
    "reset": frozenset({"sequence"}),
    "no_space": frozenset(),
    # in the answer
    "cached": frozenset({"uncached"}),
    "miscounted": frozenset({"prompt_tokens"}),
    "reset_after": frozenset({"request_failed"}),
}
"""Kinds of fault, each with the reasons (invariants and error kinds) for which the attempt that it strikes may fail."""

ROWS: Final = frozenset({"late_rows", "nan", "zero"})
"""Those that `spoil_rows` does."""


@dataclass(slots=True)
class Planned:
    """A fault that strikes the next `count` requests for sample `index`.

    `value`: for `late`, seconds from answer to dump; for `slow`, how many times as long each chunk takes.
    """

    kind: str
    index: int
    count: int = 1
    value: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ValueError(f"kind is {self.kind!r}; expected one of {', '.join(FAULTS)}")


@dataclass(slots=True)
class Rows:
    """What a prompt leaves behind: int32 [tokens], and bf16 bits [tokens, L, H]."""

    ids: NDArray[np.int32]
    states: NDArray[np.uint16]


def swap(one: Rows, other: Rows) -> None:
    """Two prompts of one batch get the first rows of each other, ids and states."""
    count = min(len(one.ids), len(other.ids))
    for a, b in ((one.ids, other.ids), (one.states, other.states)):
        kept = a[:count].copy()
        a[:count] = b[:count]
        b[:count] = kept


def spoil_rows(kind: str, rows: Rows) -> None:
    """Does to the rows what a fault of this kind does; nothing for kinds that leave them alone."""
    if kind == "late_rows":
        rows.ids[:], rows.states[:] = np.roll(rows.ids, 1), np.roll(rows.states, 1, axis=0)
    elif kind == "nan":
        rows.states[len(rows.ids) // 2, 0] = 0x7FC0
    elif kind == "zero":
        rows.states[-1] = 0


def spoil_file(kind: str, path: Path) -> None:
    """Does to a dump file, before it is published, what a fault of this kind does."""
    with path.open("r+b") as file:
        if kind == "truncated":
            file.truncate(path.stat().st_size - 1)
        elif kind == "bad_header":
            file.seek(8)
            file.write(b"?")
        elif kind in _HEADERS:
            header, start = decode_header(file.read(1 << 16), path.stat().st_size)
            altered = encode_header(_HEADERS[kind](header), start)
            assert len(altered) == start
            file.seek(0)
            file.write(altered)


_HEADERS: Final[dict[str, Callable[[DumpHeader], DumpHeader]]] = {
    "other_epoch": lambda header: replace(header, epoch="00000000-0000-4000-8000-000000000000"),
    "other_marker": lambda header: replace(header, marker=replace(header.marker, index=header.marker.index + 1)),
    "reset": lambda header: replace(header, sequence=1),
}
