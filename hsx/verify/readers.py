"""Keeps every root's disk busy: reading threads of its own for each root, so that a slow disk holds up no other."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

R = TypeVar("R")
_AHEAD: Final = 64
"""So many results may wait to be collected."""
_LOOK_S: Final = 0.1
"""So often a thread that waits to hand over a result looks whether anybody takes it still."""


class RootReaders(Generic[R]):
    """Runs a function on the samples of each root in threads.

    Args:
        prove: called with (root, index) in a reading thread.
        threads: threads of each root.
    """

    def __init__(self, prove: Callable[[str, int], R], threads: int) -> None:
        self._prove = prove
        self._threads = threads
        self._results: queue.Queue[R | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()

    @property
    def stopped(self) -> bool:
        """The caller has given up: what is being read is not waited for."""
        return self._stop.is_set()

    def run(self, work: Mapping[str, Sequence[int]]) -> Iterator[R]:
        """The results, as they come; those of one root roughly in order. What `prove` raises is raised here.

        Args:
            work: by root, the indices of its samples.
        """
        threads = [
            threading.Thread(target=self._read, args=(root, shared), name=f"hsx-verify-{root}")
            for root, indices in work.items()
            for shared in [_Shared(indices)]
            for _ in range(min(self._threads, len(indices)))
        ]
        try:
            for thread in threads:
                thread.start()
            reading = len(threads)
            while reading:
                result = self._results.get()
                if result is None:
                    reading -= 1
                elif isinstance(result, BaseException):
                    raise result
                else:
                    yield result
        finally:
            # Each ends with the piece that it is at, also where a second Ctrl-C keeps this from waiting for it: the interpreter
            # waits then, which must not take away the memory that is being read into.
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()

    def _read(self, root: str, shared: _Shared) -> None:
        try:
            while not self.stopped and (index := shared.next()) is not None:
                self._hand_over(self._prove(root, index))
        except BaseException as error:  # noqa: BLE001 - carried to the caller's thread
            self._hand_over(error)
        finally:
            self._hand_over(None)

    def _hand_over(self, result: R | BaseException | None) -> None:
        """Waits until there is room for a result, or nobody takes any more."""
        while True:
            try:
                self._results.put(result, timeout=_LOOK_S)
            except queue.Full:
                if self.stopped:
                    return
            else:
                return


class _Shared:
    """Indices that several threads share out among themselves."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._rest = iter(indices)
        self._lock = threading.Lock()

    def next(self) -> int | None:
        with self._lock:
            return next(self._rest, None)
