"""The reference engine's scheduler: one thread that prefills queued prompts in chunks, oldest first.

Every step has a budget of tokens, shared by the prompts at the head of the queue, so that chunks are of any size and several
prompts travel in one batch, as in SGLang.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from hsx.core.marker import parse
from hsx.testing.reference_dumps import Publisher, Rows
from hsx.testing.reference_model import Cache

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hsx.core.spec import CaptureSpec
    from hsx.testing.faults import Faults
    from hsx.testing.reference_model import ReferenceModel


@dataclass(slots=True, eq=False)
class Work:
    """One queued prompt.

    Attributes:
        rid: request id.
        ids: int32 [tokens].
        done: called once, from the scheduler's thread, when the prompt is finished or dropped.
        skip: leading tokens that a prefix cache is said to hold; they are not forwarded.
        retractions: how often it was started again.
        aborted: whether it was dropped.
        slowness: how many times as long as the computing each chunk takes.
        begun: called once, from the scheduler's thread, after its first chunk.
        cache: its keys and values, from its first chunk on.
        rows: what it leaves behind, from its first chunk on.
    """

    rid: str
    ids: NDArray[np.int32]
    done: Callable[[], None]
    skip: int = 0
    retractions: int = 0
    aborted: bool = False
    slowness: float = 1.0
    begun: Callable[[], None] | None = None
    cache: Cache | None = None
    rows: Rows | None = field(default=None, repr=False)


class Scheduler:
    """Runs the model over what is submitted.

    Args:
        model: computes.
        spec: states to take.
        chunk: tokens per step.
        faults: the armed faults.
        publisher: takes the dumps of prompts whose rid is a marker; None: nothing is captured.
        pace: tokens per second at most, in the long run, as a device of its own has; None: as fast as it computes.
    """

    def __init__(
        self,
        model: ReferenceModel,
        spec: CaptureSpec,
        chunk: int,
        faults: Faults,
        publisher: Publisher | None,
        pace: float | None = None,
    ) -> None:
        self._pace = pace
        self._due = 0.0
        self._model = model
        self._spec = spec
        self._chunk = chunk
        self._faults = faults
        self._publisher = publisher
        self._queue: deque[Work] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="scheduler", daemon=True).start()

    @property
    def waiting(self) -> int:
        """Prompts queued and not yet begun."""
        with self._changed:
            return sum(work.cache is None for work in self._queue)

    def submit(self, work: Work) -> None:
        """Queues a prompt."""
        with self._changed:
            self._queue.append(work)
            self._changed.notify()

    def abort(self, work: Work) -> None:
        """Drops a prompt before its next chunk; harmless when it is finished."""
        with self._changed:
            work.aborted = True
            self._changed.notify()

    def _run(self) -> None:
        # A crash of this thread must be the death of the process: a server without a scheduler would look alive.
        try:
            while True:
                self._step()
        except BaseException:
            os.kill(os.getpid(), signal.SIGABRT)
            raise

    def _step(self) -> None:
        batch = self._batch()
        began, worked = time.monotonic(), time.thread_time()
        self._forward([part for part in batch if part[2] > part[1]])
        # Of the processor's time: that this thread had to wait for it is nothing that `slow` should make twenty times as long.
        took = time.thread_time() - worked
        if self._pace is not None:
            self._due = max(self._due, began) + sum(stop - start for _, start, stop in batch) / self._pace
            time.sleep(max(0.0, self._due - time.monotonic()))
        for work, _, stop in batch:
            self._strike(work, stop, took)
        self._swap(batch)
        ended = [work for work, _, stop in batch if stop == len(work.ids) or work.aborted]
        for work in ended:
            self._finish(work)
        # As in the plugin: once a forward, after its dumps and before the answers.
        if self._publisher is not None:
            self._publisher.counter.save()
        for work in ended:
            work.done()

    def _batch(self) -> list[tuple[Work, int, int]]:
        """The next chunks, as (prompt, first token, end); waits until there is one."""
        with self._changed:
            while not self._queue:
                self._changed.wait()
            left, batch = self._chunk, []
            for work in self._queue:
                start = work.cache.length if work.cache else 0
                stop = start if work.aborted else min(len(work.ids), start + left)
                if work.aborted or stop > start:
                    batch.append((work, start, stop))
                    left -= stop - start
                if not left:
                    break
        return batch

    def _forward(self, batch: list[tuple[Work, int, int]]) -> None:
        chunks = []
        for work, start, stop in batch:
            if work.cache is None or work.rows is None:
                work.cache = Cache(self._model.config, len(work.ids))
                if self._publisher is not None and parse(work.rid) is None:
                    self._publisher.counter.add(foreign=1)
                shape = (len(work.ids), self._spec.states, self._model.config.hidden_size)
                work.rows = Rows(np.zeros(len(work.ids), dtype=np.int32), np.zeros(shape, dtype=np.uint16))
            ids = work.ids[start:stop]
            if int(ids.min()) < 0 or int(ids.max()) >= len(self._model.embedding):
                # An id outside the embedding table takes the whole server down, as a failed device assertion does.
                os.kill(os.getpid(), signal.SIGKILL)
            work.rows.ids[start:stop] = ids
            chunks.append((ids, work.cache))
        if not chunks:
            return
        for (work, start, stop), states in zip(batch, self._model.forward(chunks, self._spec), strict=True):
            if work.rows is not None:
                work.rows.states[start:stop] = _bits(states)

    def _strike(self, work: Work, stop: int, took: float) -> None:
        if work.begun is not None:
            work.begun()
            work.begun = None
        slow = self._faults.take("slow", work.rid)
        if slow:
            work.slowness = slow.number(10.0)
        if work.slowness > 1:
            time.sleep(took * (work.slowness - 1))
        if self._faults.take("die", work.rid):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._faults.take("hang", work.rid):
            threading.Event().wait()
        self._faults.hold(work.rid, lambda: work.aborted)
        if self._faults.take("abort", work.rid):
            work.aborted = True
        if stop == len(work.ids) and self._faults.take("retraction", work.rid):
            work.retractions += 1
            work.cache = None
            self._forward([(work, 0, stop)])

    def _swap(self, batch: list[tuple[Work, int, int]]) -> None:
        """Exchanges half of the rows of the first two prompts of this batch for which that fault waits."""
        struck = [part for part in batch if self._faults.armed("swapped_rows_between_two", part[0].rid)]
        if len(struck) < 2:
            return
        (one, first, stop), (two, second, end) = struck[:2]
        if one.rows is None or two.rows is None or not self._faults.take("swapped_rows_between_two", one.rid):
            return
        count = max(1, min(stop - first, end - second) // 2)
        mine, other = slice(first, first + count), slice(second, second + count)
        one.rows.ids[mine], two.rows.ids[other] = two.rows.ids[other].copy(), one.rows.ids[mine].copy()
        one.rows.states[mine], two.rows.states[other] = two.rows.states[other].copy(), one.rows.states[mine].copy()

    def _finish(self, work: Work) -> None:
        with self._changed:
            self._queue.remove(work)
        marker = parse(work.rid)
        # A prompt whose cached prefix was not forwarded is never whole: the capture side waits for it in vain.
        whole = marker is not None and marker.tokens == len(work.ids) and not work.skip
        if marker is not None and self._publisher is not None and work.rows is not None:
            if whole and not work.aborted:
                self._publisher.publish(marker, work.rows)
            else:
                self._publisher.counter.add(incomplete=1)
        work.cache = work.rows = None


def _bits(states: torch.Tensor) -> NDArray[np.uint16]:
    return states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def recompute(model: ReferenceModel, spec: CaptureSpec, ids: NDArray[np.int32]) -> NDArray[np.uint16]:
    """The bits of bf16 [tokens, L, H] of a prompt in one chunk."""
    return _bits(model.forward([(ids, Cache(model.config, len(ids)))], spec)[0])
