"""Between the forward and the files: states wait in a bounded pool until one writer thread has written them.

The thread that runs the model copies states into slabs, hands them over and goes on; it does no file I/O of any kind. The
writer thread does everything else, in the order in which it was handed over: it begins, fills, publishes and drops dump files,
numbers dumps, leaves error files, and saves the state file. So dumps are published in the order of the forwards that captured
them, the state file is never ahead of the renames that it counts, and what fails costs a marker and never the server.

One `Go` is one try to assemble a marker. A request that begins again, or ends early, voids its go: what waits of it is taken
out of the queue at once and its slabs come free, without waiting for the writer. A marker that has failed in the writer thread
stays failed, whatever is still handed over of it: its error file is never followed by a dump.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from hsx.capture.assembly import MAX_SETTLED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hsx.capture.counter import Counter
    from hsx.capture.pool import Pool, Slab
    from hsx.capture.unrounded import Unrounded
    from hsx.core.marker import Marker

log = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 0.1
"""How often the state file is written under load: each time costs as many turns at the interpreter lock as a dump."""
CLOSING_S: Final = 10.0
"""How long the end of the process waits for what is still queued."""


class Dumps(Protocol):
    """What the writer thread asks of `DumpWriter`; see there."""

    def begin(self, marker: Marker) -> None:
        """Opens the partial file, or starts again."""
        ...

    def write(
        self, marker: Marker, offset: int, states: torch.Tensor | NDArray[np.uint16], input_ids: NDArray[np.int32]
    ) -> None:
        """Writes tokens from `offset` on."""
        ...

    def publish(self, marker: Marker) -> int:
        """Gives the dump its number and its final name."""
        ...

    def write_whole(self, marker: Marker, states: torch.Tensor | NDArray[np.uint16], input_ids: NDArray[np.int32]) -> int:
        """All three of these at once."""
        ...

    def fail(self, marker: Marker, reason: str, errno: int = 0) -> None:
        """Leaves an error file instead."""
        ...

    def drop(self, marker: Marker) -> None:
        """Forgets the marker."""
        ...


@dataclass(slots=True, eq=False)
class Go:
    """One try to assemble a marker's dump; `Staging` changes it, under its lock.

    Attributes:
        marker: whose.
        void: nothing of it is written any more: it was given up, begun again, or has failed.
        failed: it failed in the writer thread.
        whole: all its tokens were handed over, and its forwards are over.
        published: its dump has its name.
    """

    marker: Marker
    void: bool = False
    failed: bool = False
    whole: bool = False
    published: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `row` to `row + count` of `slab` are tokens `offset` onwards of the go's marker."""

    go: Go
    offset: int
    count: int
    slab: Slab
    row: int


@dataclass(frozen=True, slots=True)
class _Whole:
    go: Go


@dataclass(frozen=True, slots=True)
class _Dropped:
    marker: Marker


@dataclass(frozen=True, slots=True)
class _Failed:
    marker: Marker
    reason: str
    errno: int
    trace: BaseException | None


@dataclass(frozen=True, slots=True)
class _Tally:
    foreign: int


@dataclass(frozen=True, slots=True)
class _Work:
    do: Callable[[], None]


_Item: TypeAlias = Part | _Whole | _Dropped | _Failed | _Tally | _Work


class Staging:
    """The pool, its queue, and the writer thread, which starts at once and ends with `close` or with the process.

    All methods but `close` and `flush` are for the thread that runs the model.

    Args:
        writer: where dumps go.
        counter: keeps the epoch's state file.
        pool: the host buffers.
        unrounded: the test aid, or None; the pool's dtype is float32 with it.
    """

    def __init__(self, writer: Dumps, counter: Counter, pool: Pool, unrounded: Unrounded | None = None) -> None:
        self.pool = pool
        self._writer = writer
        self._counter = counter
        self._unrounded = unrounded
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._busy = self._closing = self._closed = False
        self._begun: dict[Marker, Go] = {}
        self._given_up: OrderedDict[Marker, None] = OrderedDict()
        self._unsaved = self._asked = False
        self._changed_at = self._save_at = 0.0
        self._spent_ns = self._forwards = self._chunks = self._bytes = 0
        # A daemon: a server must be able to end while a disk hangs.
        self._thread = threading.Thread(target=self._run, name="hsx-capture-writer", daemon=True)
        self._thread.start()

    # --- the model's thread

    def hand_over(self, slab: Slab, parts: Sequence[Part]) -> None:
        """A slab that `Pool.take` gave, with what was copied into it; parts of a void go are left out.

        The writer is left asleep until the forward is over (`tally`): it would take turns with the model's thread at the GIL.
        Only where slabs get scarce it begins at once: whoever waits for one has handed over the last of them here.
        """
        with self._changed:
            live = [part for part in parts if not part.go.void]
            slab.users = len(live)
            self._queue.extend(live)
            if 2 * self.pool.staged_bytes >= self.pool.limit_bytes:
                self._changed.notify()
        if not live:
            self.pool.give_back(slab)

    def void(self, go: Go) -> None:
        """Nothing of this go is to be written any more; what waits of it comes free now."""
        with self._changed:
            self._void(go)

    def whole(self, go: Go) -> None:
        """All its tokens were handed over: publish it, once the forward is over (`tally`)."""
        with self._changed:
            go.whole = True
            self._queue.append(_Whole(go))

    def drop(self, marker: Marker) -> None:
        """The marker was given up; its partial file goes."""
        self._put(_Dropped(marker))

    def fail(self, marker: Marker, reason: str, errno: int = 0, error: BaseException | None = None) -> None:
        """The marker gets an error file instead of a dump; `error` is logged with its traceback."""
        self._put(_Failed(marker, reason, errno, error))

    def tally(self, foreign: int, chunks: int, spent_ns: int) -> None:
        """A prefill forward is over; the writer begins with what was handed over in it.

        Args:
            foreign: requests that began with it and whose rid is no marker.
            chunks: pieces of markers that were taken of it.
            spent_ns: nanoseconds that the plugin spent in it, waiting for slabs included.
        """
        self._forwards += 1
        self._chunks += chunks
        self._spent_ns += spent_ns
        self._put(_Tally(foreign))

    def later(self, work: Callable[[], None]) -> None:
        """Runs `work` on the writer thread, in its turn; what it raises is logged."""
        self._put(_Work(work))

    def _put(self, item: _Whole | _Dropped | _Failed | _Tally | _Work) -> None:
        with self._changed:
            self._queue.append(item)
            self._changed.notify()

    # --- any thread

    def flush(self, timeout_s: float) -> bool:
        """Waits until everything handed over so far is done and the state file says so, or cannot be written.

        False where it is not done by then.
        """
        until = time.monotonic() + timeout_s
        with self._changed:
            self._asked = True
            self._changed.notify_all()
            while self._queue or self._busy or (self._unsaved and self._asked):
                left = until - time.monotonic()
                if left <= 0 or self._closed:
                    return False
                self._changed.wait(left)
        return True

    def close(self, timeout_s: float = CLOSING_S) -> None:
        """Writes what is queued, for so long at most, drops the rest, and says in the log what it was all about. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            self._closed = True
            left = sum(isinstance(item, Part) for item in self._queue) + self._busy
            self._queue.clear()
            self._changed.notify_all()
        forward_us, pool = self._forward_us(), self.pool
        log.info(
            "capture.closed forwards=%d chunks=%d us_per_chunk=%.1f us_per_forward=%.1f bytes=%d peak_bytes=%d of=%d "
            "blocked_us=%d published=%d failed=%d incomplete=%d left=%d",
            *(
                self._forwards,
                self._chunks,
                forward_us / max(1, self._chunks),
                forward_us / max(1, self._forwards),
                self._bytes,
            ),
            *(pool.peak_bytes, pool.limit_bytes, pool.blocked_ns // 1000, self._counter.state.published),
            *(self._counter.state.failed, self._counter.state.incomplete, left),
        )

    def _forward_us(self) -> int:
        return max(0, self._spent_ns - self.pool.blocked_ns) // 1000

    def _void(self, go: Go) -> None:
        """Under the lock."""
        go.void = True
        kept: list[_Item] = []
        for item in self._queue:
            if isinstance(item, Part) and item.go is go:
                self._release(item.slab)
            elif not (isinstance(item, _Whole) and item.go is go):
                kept.append(item)
        if len(kept) < len(self._queue):
            self._queue = deque(kept)
            self._changed.notify_all()

    def _release(self, slab: Slab) -> None:
        """Under the lock."""
        slab.users -= 1
        if not slab.users:
            self.pool.give_back(slab)

    # --- the writer thread

    def _run(self) -> None:
        while (item := self._next()) is not None:
            go = item.go if isinstance(item, Part | _Whole) else None
            try:
                self._do(item)
            except Exception as error:  # the boundary: what fails costs its marker, and the thread lives on
                if go is not None:
                    self._give_up(go.marker, f"{type(error).__name__}: {error}", getattr(error, "errno", None) or 0, error)
                else:
                    log.exception("capture.failed")
            if isinstance(item, Part):
                with self._changed:
                    self._release(item.slab)
            self._save_if_due(item)

    def _next(self) -> _Item | None:
        """What is to be done next; None at the end. While there is nothing, the state file is written, once that is due."""
        tried = False
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._queue and not self._closing:
                    left = self._save_at - time.monotonic()
                    if self._unsaved and (self._asked or left <= 0):
                        break
                    self._changed.wait(left if self._unsaved else None)
                ends = self._closed or (self._closing and not self._queue)
                if ends and (tried or not self._unsaved):
                    return None
                self._busy = True
                if self._queue and not ends:
                    return self._queue.popleft()
                tried, self._asked = ends, False
            self._save()

    def _save_if_due(self, item: _Item) -> None:
        """Behind a forward, if it is time; in the midst of a long one, where something has been unsaved for so long."""
        now = time.monotonic()
        if not self._unsaved:
            self._unsaved, self._changed_at = True, now
        if now >= self._save_at and (isinstance(item, _Tally) or now - self._changed_at >= SAVE_EVERY_S):
            self._save()

    def _save(self) -> None:
        self._save_at = time.monotonic() + SAVE_EVERY_S
        pool = self.pool
        self._counter.gauge(
            staged_bytes=pool.staged_bytes,
            staged_peak_bytes=pool.peak_bytes,
            blocked_us=pool.blocked_ns // 1000,
            forward_us=self._forward_us(),
            forwards=self._forwards,
        )
        self._unsaved = not self._counter.save()

    def _do(self, item: _Item) -> None:
        if isinstance(item, Part):
            self._write(item)
        elif isinstance(item, _Whole):
            go = item.go
            self._publish(go, lambda: self._writer.publish(go.marker))
        elif isinstance(item, _Failed):
            self._give_up(item.marker, item.reason, item.errno, item.trace)
        elif isinstance(item, _Dropped):
            self._forget(item.marker)
            if item.marker not in self._given_up:
                log.info("capture.dropped marker=%s", item.marker)
                self._counter.add(incomplete=1)
        elif isinstance(item, _Work):
            item.do()
        else:
            self._counter.add(foreign=item.foreign)

    def _write(self, part: Part) -> None:
        go, slab = part.go, part.slab
        marker = go.marker
        if go.void or marker in self._given_up:
            # It failed here while its next part was on its way, or it was begun again before that was known.
            go.failed |= marker in self._given_up
            return
        if slab.event is not None:
            slab.event.synchronize()  # lets go of the GIL
        rows = slice(part.row, part.row + part.count)
        states: torch.Tensor | NDArray[np.uint16] = slab.bits[rows]
        ids = slab.ids_array[rows]
        self._bytes += slab.bits[rows].nbytes
        begins = self._begun.get(marker) is not go
        if self._unrounded is not None:
            if begins:
                self._unrounded.begin(marker)
            self._unrounded.write(marker, part.offset, slab.states[rows].numpy())
            states = slab.states[rows].to(torch.bfloat16)
        if go.whole and part.count == marker.tokens:
            # The usual case, and the cheap one: the whole prompt is in this slab, and may be published.
            self._publish(go, lambda: self._writer.write_whole(marker, states, ids))
            return
        if begins:
            self._writer.begin(marker)
            self._begun[marker] = go
        self._writer.write(marker, part.offset, states, ids)

    def _publish(self, go: Go, publish: Callable[[], int]) -> None:
        marker = go.marker
        if go.void or go.published or marker in self._given_up:
            return
        if self._unrounded is not None:
            self._unrounded.publish(marker)
        sequence = publish()
        go.published = True
        self._begun.pop(marker, None)
        self._counter.add(sequence=sequence, published=1)
        log.debug("capture.published marker=%s sequence=%d", marker, sequence)

    def _give_up(self, marker: Marker, reason: str, errno: int, error: BaseException | None) -> None:
        if marker in self._given_up:
            return
        log.error("capture.marker_failed marker=%s reason=%s", marker, reason, exc_info=error)
        self._given_up[marker] = None
        while len(self._given_up) > MAX_SETTLED:
            self._given_up.popitem(last=False)
        go = self._begun.get(marker)
        with self._changed:
            # Its newest go may not have begun here yet.
            for live in {item.go for item in self._queue if isinstance(item, Part) and item.go.marker == marker} | (
                {go} if go is not None else set()
            ):
                live.failed = True
                self._void(live)
        self._forget(marker)
        try:
            self._writer.fail(marker, reason, errno)
        except OSError:
            log.exception("capture.error_file_failed marker=%s", marker)
            self._counter.add(incomplete=1)
        else:
            self._counter.add(failed=1)

    def _forget(self, marker: Marker) -> None:
        self._begun.pop(marker, None)
        self._writer.drop(marker)
        if self._unrounded is not None:
            self._unrounded.drop(marker)
