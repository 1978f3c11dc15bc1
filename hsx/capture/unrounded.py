"""A test aid: the states as they were before rounding to bf16.

With `HSX_CAPTURE_FLOAT32=<folder>` in the server's environment the plugin also writes `<folder>/<marker>.npy`, float32
[tokens, L, H], so that a test can compare the capture itself, without the store's rounding, with another implementation.
Twice the size of the dump and slow: not for runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.dump import PART_SUFFIX

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.marker import Marker

VARIABLE: Final = "HSX_CAPTURE_FLOAT32"


class Unrounded:
    """Writes one .npy per marker.

    Args:
        folder: made if missing.
        states: L.
        hidden_size: H.
    """

    def __init__(self, folder: Path, states: int, hidden_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shape = (states, hidden_size)
        self._open: dict[Marker, NDArray[np.float32]] = {}

    def begin(self, marker: Marker) -> None:
        """Starts, or starts again."""
        self._open[marker] = np.zeros((marker.tokens, *self._shape), np.float32)

    def write(self, marker: Marker, offset: int, states: NDArray[np.float32]) -> None:
        """Takes n tokens, float32 [n, L, H], the first being token `offset`."""
        self._open[marker][offset : offset + len(states)] = states

    def publish(self, marker: Marker) -> None:
        """Writes the file and renames it to its name."""
        part = self._folder / f"{marker}.npy{PART_SUFFIX}"
        with part.open("wb") as file:
            np.save(file, self._open.pop(marker))
        part.rename(self._folder / f"{marker}.npy")

    def drop(self, marker: Marker) -> None:
        """Forgets a marker."""
        self._open.pop(marker, None)
