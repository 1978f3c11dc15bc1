"""What a kind of folder has to give: its samples, first their ids and masks, then their states."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState


class RejectedSampleError(Exception):
    """A sample that cannot be taken.

    `reason` is a stable word: `unreadable`, `missing_file`, `missing_key`, `bad_shape`, `bad_type`, `bad_ids`, `bad_mask`,
    `tokens_differ`, `duplicate_id`, `fp8`, `changed`, or the name of an invariant.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Entry:
    """One sample of a folder.

    Attributes:
        row: its number there, from 0, by which samples are ordered; rows may be missing. -1 where its file says none: such
            samples are ordered by their paths.
        file: its file.
    """

    row: int
    file: Path


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of a sample without its states.

    Attributes:
        input_ids: int32 [S].
        loss_mask: uint8 [S] of 0 and 1.
        states: L, the final state included.
        hidden_size: H.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    states: int
    hidden_size: int


class Source(Protocol):
    """One folder. Methods may be called from several threads."""

    @property
    def final(self) -> FinalState:
        """The final state that this kind of folder has."""
        ...

    def entries(self) -> Iterator[Entry]:
        """Its samples, in no particular order, however many: none is held. Raises RunError `import_refused`."""
        ...

    def head(self, entry: Entry, states: int) -> Head:
        """Ids, mask and shape of a sample that is to have so many states. Raises RejectedSampleError."""
        ...

    def sample(self, entry: Entry, states: int) -> tuple[Head, NDArray[np.uint16]]:
        """As `head`, and the bf16 bits, uint16 [S, L, H], the final state last; its file is read once.

        The bits are in memory of their own: a file that is cut short meanwhile is an error, not the end of the process.
        Raises RejectedSampleError.
        """
        ...


def checked_ids(values: NDArray[np.generic]) -> NDArray[np.int32]:
    """Token ids as int32 [S]. Raises RejectedSampleError `bad_ids`."""
    if values.ndim != 1 or not values.size or values.dtype.kind not in "iu":
        raise RejectedSampleError(
            "bad_ids", f"ids are {values.dtype} {list(values.shape)}; expected whole numbers [S], S at least 1"
        )
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= 2**31:
        raise RejectedSampleError("bad_ids", f"ids are {low} to {high}; expected 0 up to 2^31 - 1")
    return values.astype(np.int32)


def checked_mask(values: NDArray[np.generic], tokens: int) -> NDArray[np.uint8]:
    """A loss mask as uint8 [S]. Raises RejectedSampleError `bad_mask`."""
    if values.shape != (tokens,) or not bool(((values == 0) | (values == 1)).all()):
        raise RejectedSampleError("bad_mask", f"loss mask is {values.dtype} {list(values.shape)}; expected 0 and 1, [{tokens}]")
    return values.astype(np.uint8)


def checked_shape(found: tuple[int, ...], tokens: int, states: int) -> int:
    """H of states of shape [S, L, H]. Raises RejectedSampleError `bad_shape`, `tokens_differ`."""
    if len(found) != 3 or found[1] != states or found[2] < 1:
        raise RejectedSampleError("bad_shape", f"hidden states are {list(found)}; expected [S, {states}, H]")
    if found[0] != tokens:
        raise RejectedSampleError("tokens_differ", f"hidden states are of {found[0]} tokens; expected {tokens}")
    return found[2]


def number_of(path: Path) -> int:
    """The last number in a file's name, by which its row is known; -1 where there is none."""
    found = re.findall(r"\d+", path.name.partition(".")[0])
    return min(int(found[-1]), 2**63 - 1) if found else -1
