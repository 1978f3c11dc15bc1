"""One epoch's capture in one server process: from a forward's plan and its tensors to what the writer thread is given.

Knows nothing of SGLang; `hooks.py` feeds it. It does no file I/O: `staging.py` does, on a thread of its own. A fault never
leaves `Session`: it costs the markers concerned their dump, and each of them gets an error file that says why. The server goes
on.
"""

from __future__ import annotations

import errno
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

import torch

from hsx.capture.assembly import Assembly, Piece, Plan
from hsx.capture.staging import Go, Part
from hsx.capture.states import copy_rows, split_states
from hsx.core.marker import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from hsx.capture.pool import Slab
    from hsx.capture.staging import Staging
    from hsx.core.marker import Marker

log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Longest time that one forward waits for room in the pool: far less than SGLang's watchdog (`--watchdog-timeout`, 300 s) takes
for a hanging scheduler, which it kills."""


@dataclass(slots=True)
class Batch:
    """One prefill forward under way.

    Attributes:
        plan: what it brings.
        input_ids: int32 [rows] on the model's device, copied before the forward (padding may change the original).
        seen: whether its states were shown.
        done: the goes that are whole with it, once all their states are on their way.
    """

    plan: Plan
    input_ids: torch.Tensor
    seen: bool = False
    done: list[Go] = field(default_factory=list)

    @property
    def markers(self) -> list[Marker]:
        """The markers that want rows of this batch."""
        return [piece.marker for piece in self.plan.pieces]


class Session:
    """Assembles the dumps of one epoch. All calls come from the thread that runs the model.

    Args:
        staging: the way to the files.
        layers: number of captured layers, without the final state.
        when_full: `block` waits for room in the pool, `fail` fails the dump that finds none.
        patience_s: longest wait of one forward under `block`.
    """

    def __init__(
        self, staging: Staging, layers: int, when_full: Literal["block", "fail"] = "block", patience_s: float = PATIENCE_S
    ) -> None:
        self._staging = staging
        self._layers = layers
        self._when_full = when_full
        self._patience_s = patience_s
        self._assembly = Assembly()
        self._goes: dict[Marker, Go] = {}
        self._foreign = self._chunks = 0
        self._unfinished: Batch | None = None

    def begin(
        self, rids: Sequence[str], prefix_lens: Sequence[int], extend_lens: Sequence[int], input_ids: torch.Tensor | None
    ) -> Batch | None:
        """A prefill forward is about to run. None where nothing of it is to be taken.

        Args:
            rids: request ids in batch order.
            prefix_lens: tokens of each that came before this forward.
            extend_lens: tokens of each in this forward.
            input_ids: ids of the batch on any device, perhaps padded; None where the server has none.
        """
        if self._unfinished is not None:
            # The assembly counts tokens when a forward begins: the next chunk would be taken for the end of a whole prompt.
            for lacking in self._unfinished.markers:
                self._fail(lacking, "a forward with tokens of this prompt did not return")
            self._unfinished = None
        with self.contained(marker for rid in rids if (marker := parse(rid))):
            plan = self._assembly.forward(rids, prefix_lens, extend_lens)
            self._foreign += plan.foreign
            for marker in plan.gone:
                self._void(marker)
                self._staging.drop(marker)
            for failure in plan.failures:
                self._fail(failure.marker, failure.reason)
            if plan.pieces:
                if input_ids is None or input_ids.dim() != 1 or input_ids.shape[0] < plan.rows:
                    raise ValueError(f"the batch has no input ids for its {plan.rows} tokens")
                self._unfinished = Batch(plan, input_ids[: plan.rows].to(torch.int32, copy=True))
                return self._unfinished
        return None

    def refuse(self, rid: str, reason: str) -> None:
        """The request `rid` is one that cannot be captured: where it has a marker, that fails, and nothing of it is taken."""
        marker = parse(rid)
        if marker is not None:
            self._fail(marker, reason)

    def tensors(self, batch: Batch, aux: torch.Tensor | Sequence[torch.Tensor] | None, final: torch.Tensor | None) -> None:
        """The states of `batch` are there: the layers as the model gives them, and the final state [R, H].

        What is wanted of them is copied before this returns, or will be before anything later on this stream runs. Waits for
        room in the pool where it has to.
        """
        with self.contained(batch.markers):
            if batch.seen:
                raise ValueError("the forward showed its states twice; which of them are the prompts' is unknown")
            batch.seen = True
            if final is None:
                raise ValueError("the final norm did not run as a module; its input is unknown")
            parts = split_states(aux, final, batch.plan.rows, self._layers)
            filling = _Filling(self._staging, parts, batch.input_ids, self._until())
            try:
                for piece in batch.plan.pieces:
                    go = self._go(piece)
                    if go is None:
                        continue
                    self._chunks += 1
                    if not filling.take(piece, go):
                        self._fail(piece.marker, *self._no_room(batch.plan.rows))
                    elif piece.whole:
                        batch.done.append(go)
            finally:
                filling.hand_over()

    def finish(self, batch: Batch) -> None:
        """The forward returned: the dumps that are whole now may be published."""
        self._unfinished = None
        with self.contained(batch.markers):
            if not batch.seen:
                raise ValueError(
                    "the forward showed no states (replayed from a graph?); start the server without prefill graphs"
                )
            for go in batch.done:
                if self._goes.get(go.marker) is go:
                    del self._goes[go.marker]
                    self._assembly.settle(go.marker)
                    self._staging.whole(go)

    def save(self, spent_ns: int = 0) -> None:
        """The forward is over, whether anything was taken of it or not; the plugin spent so many nanoseconds in it."""
        with self.contained([]):
            self._staging.tally(self._foreign, self._chunks, spent_ns)
            self._foreign = self._chunks = 0

    def later(self, work: Callable[[], None]) -> None:
        """Does some file I/O on the writer thread, behind what was handed over so far; what it raises is logged there."""
        self._staging.later(work)

    def close(self) -> None:
        """The process ends: what is queued is written, for a bounded time."""
        self._staging.close()

    def contained(self, markers: Iterable[Marker]) -> AbstractContextManager[None, bool]:
        """The boundary: whatever goes wrong inside fails `markers`, is logged, and ends here."""
        return _Boundary(self._fail, markers)

    def _go(self, piece: Piece) -> Go | None:
        """The go that a piece belongs to; None where nothing of its marker is wanted any more."""
        marker = piece.marker
        go = self._goes.get(marker)
        if self._assembly.is_settled(marker):
            return None
        if go is not None and go.failed:
            # The writer thread failed it and left its error file; it is told here, where the assembly lives.
            del self._goes[marker]
            self._assembly.settle(marker)
            return None
        if piece.begins or go is None:
            self._void(marker)
            go = self._goes[marker] = Go(marker)
        return go

    def _until(self) -> float:
        return time.monotonic() + self._patience_s if self._when_full == "block" else 0.0

    def _no_room(self, rows: int) -> tuple[str, int]:
        pool = self._staging.pool
        if self._when_full == "fail" and rows > pool.capacity:
            # It would find no room however empty the pool is: that is for somebody to change, and no matter of time.
            return f"a forward of {rows} tokens; the pool (capture.staging_bytes) holds {pool.capacity}, when_full is 'fail'", 0
        waited = "at once" if self._when_full == "fail" else f"within {self._patience_s:.0f} s"
        return f"no room in the pool of {pool.limit_bytes} bytes (capture.staging_bytes) {waited}", errno.ENOBUFS

    def _fail(self, marker: Marker, reason: str, code: int = 0, error: BaseException | None = None) -> None:
        if self._assembly.is_settled(marker):
            return
        self._assembly.settle(marker)
        self._void(marker)
        self._staging.fail(marker, reason, code, error)

    def _void(self, marker: Marker) -> None:
        go = self._goes.pop(marker, None)
        if go is not None:
            self._staging.void(go)


class _Filling:
    """Fills slabs with the rows of one batch, and hands each over as soon as it is full.

    So a batch that is larger than the whole pool goes through it: the writer empties one slab while the next is filled.
    """

    def __init__(self, staging: Staging, states: Sequence[torch.Tensor], ids: torch.Tensor, until: float) -> None:
        self._staging = staging
        self._states = states
        self._ids = ids
        self._until = until
        self._slab: Slab | None = None
        self._used = 0
        self._parts: list[Part] = []
        self._runs: list[tuple[int, int, int]] = []

    def take(self, piece: Piece, go: Go) -> bool:
        """Takes all rows of a piece; False where there was no room for them all."""
        done = 0
        while done < piece.count:
            if self._slab is not None and self._used == self._staging.pool.rows:
                self.hand_over()
            if self._slab is None:
                self._slab = self._staging.pool.take(self._until)
                if self._slab is None:
                    return False
            count = min(piece.count - done, self._staging.pool.rows - self._used)
            self._parts.append(Part(go, piece.offset + done, count, self._slab, self._used))
            self._extend_run(piece.row + done, count)
            self._used += count
            done += count
        return True

    def hand_over(self) -> None:
        """Copies what was taken into the slab at hand, and gives that to the writer thread."""
        slab = self._slab
        if slab is None:
            return
        try:
            for row, place, count in self._runs:
                copy_rows(self._states, row, slab.states[place : place + count])
                slab.ids[place : place + count].copy_(self._ids[row : row + count], non_blocking=slab.event is not None)
            if slab.event is not None:
                slab.event.record()  # on the current stream, behind the copies
        except BaseException:
            self._parts.clear()  # nobody may read what was not copied; the slab comes back
            raise
        finally:
            self._staging.hand_over(slab, self._parts)
            self._slab, self._used, self._parts, self._runs = None, 0, [], []

    def _extend_run(self, row: int, count: int) -> None:
        """Rows that follow each other in the batch are copied in one go: pieces of other requests do not lie between them."""
        if self._runs:
            first, place, length = self._runs[-1]
            if first + length == row:
                self._runs[-1] = (first, place, length + count)
                return
        self._runs.append((row, self._used, count))


class _Boundary:
    """The one place where an exception of any kind ends. Not a generator, so that a type checker sees that it swallows."""

    def __init__(self, fail: Callable[[Marker, str, int, BaseException], None], markers: Iterable[Marker]) -> None:
        self._fail = fail
        self._markers = markers  # looked at in case of need only: this is entered several times in each forward

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        markers = list(self._markers)
        if not markers:
            log.error("capture.failed", exc_info=error)
        for marker in markers:
            self._fail(marker, f"{type(error).__name__}: {error}", getattr(error, "errno", None) or 0, error)
        return True
