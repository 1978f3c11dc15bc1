"""Roots that fail or fill up on command, around real ones."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hsx.ports import Root
    from hsx.records import Payload, Receipt


class FailingRoot:
    """A root whose disk can break; implements `hsx.ports.Root`.

    Args:
        root: the real root behind it.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.failing: set[str] = set()
        """Names of the methods that fail from now on, as they do after EIO."""
        self.crowded = 0
        """Bytes that somebody else takes on this disk."""
        self.discarding = threading.Event()
        """While it is cleared, `discard` waits."""
        self.discarding.set()

    def _pass(self, method: str) -> None:
        if method in self.failing:
            raise RunError("root_unusable", f"root {self.name}: {method} failed: Input/output error")

    @property
    def name(self) -> str:
        """See the port."""
        return self._root.name

    def free(self) -> int:
        """See the port."""
        self._pass("free")
        return self._root.free() - self.crowded

    def write(self, payload: Payload) -> Receipt:
        """See the port."""
        self._pass("write")
        return self._root.write(payload)

    def read(self, index: int, tokens: int, captured_as: int | None = None) -> NDArray[np.uint16]:
        """See the port."""
        self._pass("read")
        return self._root.read(index, tokens, captured_as)

    def checksum(self, index: int, tokens: int, captured_as: int | None = None) -> int:
        """See the port."""
        self._pass("read")
        return self._root.checksum(index, tokens, captured_as)

    def link(self, index: int, others: Sequence[int]) -> list[int]:
        """See the port; while `link_refused` is in `failing`, its file system has no hard links."""
        self._pass("link")
        return [] if "link_refused" in self.failing else self._root.link(index, others)

    def sync(self) -> None:
        """See the port."""
        self._pass("sync")
        self._root.sync()

    def flush(self) -> None:
        """See the port."""
        self._pass("flush")
        self._root.flush()

    def discard(self, index: int) -> None:
        """See the port."""
        self.discarding.wait()
        self._pass("discard")
        self._root.discard(index)

    def sweep(self) -> int:
        """See the port."""
        return self._root.sweep()
