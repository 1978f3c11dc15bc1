"""Between the forward and the files: states wait in a bounded pool until they are written, behind one writer thread.

The thread that runs the model copies states into slabs, hands them over and goes on; it does no file I/O of any kind. The
writer thread has everything else done, in the order in which it was handed over: dump files are begun, filled, numbered,
published and dropped, error files left, and the state file saved. What concerns dumps it does not do itself, as a rule: it
sends a slab's worth of calls to the writer process (`writer_process.py`) and sleeps until they are done. So dumps are published
in the order of the forwards that captured them, the state file is never ahead of the renames that it counts, and what fails
costs a marker and never the server.

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
from typing import TYPE_CHECKING, Final, TypeAlias

from hsx.capture.assembly import MAX_SETTLED
from hsx.capture.calls import Call, Outcome, failure
from hsx.capture.states import rounded_in_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hsx.capture.calls import Dumps
    from hsx.capture.counter import Counter
    from hsx.capture.pool import Pool, Slab
    from hsx.capture.unrounded import Unrounded
    from hsx.core.marker import Marker

log = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 0.1
"""How often the state file is written under load: each time costs four turns at the interpreter lock."""
CLOSING_S: Final = 10.0
"""How long the end of the process waits for what is still queued."""
AT_ONCE: Final = 64
"""Pieces of one slab, and prompts that are whole, that are seen to at once, at most."""


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
        dumps: does what is asked of a dump writer.
        counter: keeps the epoch's state file.
        pool: the host buffers.
        unrounded: the test aid, or None; the pool's dtype is float32 with it.
    """

    def __init__(self, dumps: Dumps, counter: Counter, pool: Pool, unrounded: Unrounded | None = None) -> None:
        self.pool = pool
        self._dumps = dumps
        self._counter = counter
        self._unrounded = unrounded
        self._changed = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._busy = 0
        self._closing = self._closed = False
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
        if not self._thread.is_alive():
            self._dumps.close()
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
        while items := self._next():
            try:
                self._do(items)
            except Exception as error:  # the boundary: what fails costs its markers, and the thread lives on
                log.exception("capture.failed")
                for go in {item.go for item in items if isinstance(item, Part | _Whole)}:
                    if not go.void and not go.published:
                        self._give_up(go.marker, failure(error), None)
            with self._changed:
                for item in items:
                    if isinstance(item, Part):
                        self._release(item.slab)
            self._save_if_due(items[-1])

    def _next(self) -> list[_Item]:
        """What is to be done next: pieces of one slab, or one other thing; nothing at the end.

        While there is nothing, the state file is written, once that is due.
        """
        tried = False
        while True:
            with self._changed:
                self._busy = 0
                self._changed.notify_all()
                while not self._queue and not self._closing:
                    left = self._save_at - time.monotonic()
                    if self._unsaved and (self._asked or left <= 0):
                        break
                    self._changed.wait(left if self._unsaved else None)
                ends = self._closed or (self._closing and not self._queue)
                if ends and (tried or not self._unsaved):
                    return []
                self._busy = 1
                if self._queue and not ends:
                    items = self._take()
                    self._busy = max(1, sum(isinstance(item, Part) for item in items))
                    return items
                tried, self._asked = ends, False
            self._save()

    def _take(self) -> list[_Item]:
        """Under the lock."""
        items = [self._queue.popleft()]
        slab = items[0].slab if isinstance(items[0], Part) else None
        if not isinstance(items[0], Part | _Whole):
            return items
        while self._queue and len(items) < AT_ONCE:
            item = self._queue[0]
            if isinstance(item, Part):
                # A slab comes free with its last piece, and somebody may be waiting for it.
                if slab is not None and item.slab is not slab:
                    break
                slab = item.slab
            elif not isinstance(item, _Whole):
                break
            items.append(self._queue.popleft())
        return items

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

    def _do(self, items: list[_Item]) -> None:
        item = items[0]
        if isinstance(item, Part | _Whole):
            self._write([piece for piece in items if isinstance(piece, Part | _Whole)])
        elif isinstance(item, _Failed):
            self._give_up(item.marker, Outcome(error=item.reason, errno=item.errno), item.trace)
        elif isinstance(item, _Dropped):
            self._forget(item.marker)
            self._dumps.do([Call("drop", item.marker)])
            if item.marker not in self._given_up:
                log.info("capture.dropped marker=%s", item.marker)
                self._counter.add(incomplete=1)
        elif isinstance(item, _Work):
            item.do()
        else:
            self._counter.add(foreign=item.foreign)

    def _write(self, pieces: list[Part | _Whole]) -> None:
        """Has pieces written, and dumps published that are whole."""
        planned: list[tuple[Go, Call]] = []
        for piece in pieces:
            go = piece.go
            try:
                if go.void or go.marker in self._given_up:
                    # It failed here while its next part was on its way, or it was begun again before that was known.
                    go.failed |= go.marker in self._given_up
                elif isinstance(piece, Part):
                    planned += [(go, call) for call in self._calls(piece)]
                elif not go.published and not any(other is go and call.kind == "whole" for other, call in planned):
                    self._round_up(go)
                    planned.append((go, Call("publish", go.marker)))
            except Exception as error:  # noqa: BLE001 - the boundary: it costs this marker, is logged, and the others go on
                planned = [(other, call) for other, call in planned if other is not go]
                self._give_up(go.marker, failure(error), error)
        for (go, call), outcome in zip(planned, self._dumps.do([call for _, call in planned]), strict=True):
            if outcome.error:
                self._give_up(go.marker, outcome, None)
            elif outcome.sequence:
                go.published = True
                self._begun.pop(go.marker, None)
                self._counter.add(sequence=outcome.sequence, published=1)
                log.debug("capture.published marker=%s sequence=%d", call.marker, outcome.sequence)

    def _calls(self, part: Part) -> list[Call]:
        """What writes a part."""
        go, slab = part.go, part.slab
        if slab.event is not None:
            slab.event.synchronize()  # lets go of the GIL
        rows = slice(part.row, part.row + part.count)
        states, ids = slab.bits[rows], slab.ids_array[rows]
        self._bytes += states.nbytes
        begins = self._begun.get(go.marker) is not go
        if self._unrounded is not None:
            if begins:
                self._unrounded.begin(go.marker)
            self._unrounded.write(go.marker, part.offset, slab.states[rows].numpy())
            states = rounded_in_place(slab.states[rows])
        if go.whole and part.count == go.marker.tokens:
            # The usual case, and the cheap one: the whole prompt is in this slab, and may be published.
            self._round_up(go)
            return [Call("whole", go.marker, 0, states, ids)]
        write = Call("write", go.marker, part.offset, states, ids)
        if not begins:
            return [write]
        self._begun[go.marker] = go
        return [Call("begin", go.marker), write]

    def _round_up(self, go: Go) -> None:
        if self._unrounded is not None:
            self._unrounded.publish(go.marker)

    def _give_up(self, marker: Marker, failed: Outcome, error: BaseException | None) -> None:
        if marker in self._given_up:
            return
        log.error("capture.marker_failed marker=%s reason=%s", marker, failed.error, exc_info=error)
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
        (left,) = self._dumps.do([Call("fail", marker, reason=failed.error, errno=failed.errno)])
        if left.error:
            log.error("capture.error_file_failed marker=%s reason=%s", marker, left.error)
            self._counter.add(incomplete=1)
        else:
            self._counter.add(failed=1)

    def _forget(self, marker: Marker) -> None:
        self._begun.pop(marker, None)
        if self._unrounded is not None:
            self._unrounded.drop(marker)
