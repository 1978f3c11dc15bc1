"""The hunt for a poison sample: one that kills the server, or makes it stall, whenever the server works on it.

A server dies for many reasons, so one death convicts nobody. The samples that were at the server are suspects; after the
restart half of them are tried, and everybody else waits, so that a second poison sample cannot mislead. A suspect that is
answered is cleared. Another death keeps only those that were at the server then, and half of them are tried. Who was alone on
trial when the server died, twice, is convicted: a server that is killed from outside at just that moment must not cost an
innocent sample. A poison sample costs at most log2(concurrency) + 3 deaths, and the trials of a server that died for another
reason cost no death at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class Hunt:
    """The suspects, in the order of their indices.

    Args:
        suspects: those of an earlier life of hsx.
    """

    def __init__(self, suspects: Iterable[int] = ()) -> None:
        self._suspects = sorted(set(suspects))
        self._trial: set[int] = set()
        self._died_alone: int | None = None
        self._next_trial()

    @property
    def suspects(self) -> tuple[int, ...]:
        """Samples that may have killed the server; empty when there is no hunt."""
        return tuple(self._suspects)

    @property
    def trial(self) -> frozenset[int]:
        """The suspects that may be sent now; empty when there is no hunt."""
        return frozenset(self._trial)

    def admits(self, index: int) -> bool:
        """Whether sample `index` may be sent now."""
        return not self._suspects or index in self._trial

    def died(self, at_server: Iterable[int]) -> tuple[int | None, bool]:
        """The server died or stalled with these samples at it.

        Returns:
            The convicted sample, if there is one; and whether this death brought the hunt further.
        """
        present = sorted(set(at_server))
        if not present:
            return None, False
        tried = set(present) <= self._trial
        alone = present[0] if tried and len(present) == 1 else None
        if alone is not None and alone == self._died_alone:
            self.clear(alone)
            return alone, True
        self._died_alone = alone
        self._suspects = present
        self._next_trial()
        return None, tried

    def clear(self, index: int) -> bool:
        """Sample `index` was answered, or is out of the job: it is no suspect. True where that lets others in."""
        if index not in self._suspects:
            return False
        self._suspects.remove(index)
        self._trial.discard(index)
        if self._trial:
            return False
        self._next_trial()
        return True

    def _next_trial(self) -> None:
        self._trial = set(self._suspects[: (len(self._suspects) + 1) // 2])
