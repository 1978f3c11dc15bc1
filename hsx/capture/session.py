"""One epoch's capture in one server process: from a forward's plan and its tensors to dumps.

Knows nothing of SGLang; `hooks.py` feeds it. A fault never leaves `Session`: it costs the markers concerned their dump, and
each of them gets an error file that says why. The server goes on.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hsx.capture.assembly import Assembly, Piece, Plan
from hsx.capture.states import stack_states
from hsx.core.marker import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    import numpy as np
    from numpy.typing import NDArray

    from hsx.capture.counter import Counter
    from hsx.capture.dumpwriter import DumpWriter
    from hsx.capture.unrounded import Unrounded
    from hsx.core.marker import Marker

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Batch:
    """One prefill forward under way.

    Attributes:
        plan: what it brings.
        input_ids: int32 [rows] on the model's device, copied before the forward (padding may change the original).
        states: [rows, L, H] as they were captured, in float32 (with the test aid) or bf16; None until the tensors were seen.
    """

    plan: Plan
    input_ids: torch.Tensor
    states: torch.Tensor | None = None

    @property
    def markers(self) -> list[Marker]:
        """The markers that want rows of this batch."""
        return [piece.marker for piece in self.plan.pieces]


class Session:
    """Assembles and writes the dumps of one epoch. All calls come from the thread that runs the model.

    Args:
        writer: where dumps go.
        counter: keeps the epoch's state file.
        layers: number of captured layers, without the final state.
        unrounded: the test aid, or None.
    """

    def __init__(self, writer: DumpWriter, counter: Counter, layers: int, unrounded: Unrounded | None = None) -> None:
        self._writer = writer
        self._counter = counter
        self._layers = layers
        self._unrounded = unrounded
        self._assembly = Assembly()

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
        with self.contained([marker for rid in rids if (marker := parse(rid))]):
            plan = self._assembly.forward(rids, prefix_lens, extend_lens)
            self._counter.add(foreign=plan.foreign, incomplete=len(plan.gone))
            for marker in plan.gone:
                log.info("capture.dropped marker=%s", marker)
                self._drop(marker)
            for failure in plan.failures:
                self._fail(failure.marker, failure.reason)
            if plan.pieces:
                if input_ids is None or input_ids.dim() != 1 or input_ids.shape[0] < plan.rows:
                    raise ValueError(f"the batch has no input ids for its {plan.rows} tokens")
                return Batch(plan, input_ids[: plan.rows].to(torch.int32, copy=True))
        return None

    def tensors(self, batch: Batch, aux: torch.Tensor | Sequence[torch.Tensor] | None, final: torch.Tensor | None) -> None:
        """The states of `batch` are there: the layers as the model gives them, and the final state [R, H]."""
        with self.contained(batch.markers):
            if final is None:
                raise ValueError("the final norm did not run as a module; its input is unknown")
            dtype = torch.bfloat16 if self._unrounded is None else torch.float32
            batch.states = stack_states(aux, final, batch.plan.rows, self._layers, dtype)

    def finish(self, batch: Batch) -> None:
        """The forward returned: writes its pieces, and publishes the dumps that are whole now."""
        pieces = [piece for piece in batch.plan.pieces if not self._assembly.is_settled(piece.marker)]
        if not pieces:
            return
        with self.contained([piece.marker for piece in pieces]):
            if batch.states is None:
                raise ValueError(
                    "the forward showed no states (replayed from a graph?); start the server without prefill graphs"
                )
            # Synchronous on a GPU: simple and right; staging through pinned memory is the way to hide the copy.
            states = batch.states.to("cpu")
            ids: NDArray[np.int32] = batch.input_ids.to("cpu").numpy()
            for piece in pieces:
                rows = slice(piece.row, piece.row + piece.count)
                with self.contained([piece.marker]):
                    self._write(piece, states[rows], ids[rows])

    def save(self) -> None:
        """The forward is over, whether anything was taken of it or not: the state file tells of what it changed.

        At most one small write; none where nothing changed.
        """
        with self.contained([]):
            self._counter.save()

    def _write(self, piece: Piece, states: torch.Tensor, ids: NDArray[np.int32]) -> None:
        marker = piece.marker
        if piece.begins:
            self._writer.begin(marker)
        self._writer.write(marker, piece.offset, states.to(torch.bfloat16), ids)
        if self._unrounded is not None:
            if piece.begins:
                self._unrounded.begin(marker)
            self._unrounded.write(marker, piece.offset, states.numpy())
            if piece.whole:
                self._unrounded.publish(marker)
        if piece.whole:
            sequence = self._writer.publish(marker)
            self._assembly.settle(marker)
            self._counter.add(sequence=sequence, published=1)
            log.debug("capture.published marker=%s sequence=%d", marker, sequence)

    def contained(self, markers: Iterable[Marker]) -> AbstractContextManager[None, bool]:
        """The boundary: whatever goes wrong inside fails `markers`, is logged, and ends here."""
        return _Boundary(self._fail, markers)

    def _fail(self, marker: Marker, reason: str, errno: int = 0) -> None:
        if self._assembly.is_settled(marker):
            return
        log.error("capture.marker_failed marker=%s reason=%s", marker, reason)
        self._assembly.settle(marker)
        self._drop(marker)
        try:
            self._writer.fail(marker, reason, errno)
        except OSError:
            log.exception("capture.error_file_failed marker=%s", marker)
            self._counter.add(incomplete=1)
        else:
            self._counter.add(failed=1)

    def _drop(self, marker: Marker) -> None:
        self._writer.drop(marker)
        if self._unrounded is not None:
            self._unrounded.drop(marker)


class _Boundary:
    """The one place where an exception of any kind ends. Not a generator, so that a type checker sees that it swallows."""

    def __init__(self, fail: Callable[[Marker, str, int], None], markers: Iterable[Marker]) -> None:
        self._fail = fail
        self._markers = list(markers)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        log.error("capture.failed", exc_info=error)
        for marker in self._markers:
            self._fail(marker, f"{type(error).__name__}: {error}", getattr(error, "errno", None) or 0)
        return True
