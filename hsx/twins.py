"""Finds the samples whose prompts are identical: they are prefilled once, and stored once.

A hash of each prompt says who may be one; that they are is proved by comparing the ids themselves. Memory is 24 bytes a sample
for a moment, and 8 for what is found; no object is kept for a row.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Protocol

    from numpy.typing import NDArray

    class Prompts(Protocol):
        """The ids of all samples; `hsx.stores.tokens.TokenTable` has them."""

        @property
        def count(self) -> int:
            """Number of samples."""
            ...

        def input_ids(self, index: int) -> NDArray[np.int32]:
            """int32 [tokens] of sample `index`."""
            ...


MOST: Final = 4096
"""Members of a group at most: the next sample with that prompt begins another one. File systems limit the links to a file
(ext4: 65,000), and a group is committed in one transaction."""


def key(ids: NDArray[np.int32]) -> int:
    """A 63-bit hash of a prompt. Equal ones do not prove equal prompts."""
    return int.from_bytes(blake2b(np.ascontiguousarray(ids, "<i4").data, digest_size=8).digest(), "little") >> 1


def find_twins(prompts: Prompts, most: int = MOST) -> NDArray[np.int64]:
    """For each sample the first one of its group, itself for that one; -1 for a sample without a twin. Blocks.

    Args:
        prompts: of all samples; each is read once, those with a twin twice.
        most: members of a group at most.

    Returns:
        int64 [samples]. The members of a group have the very same ids.
    """
    keys = np.fromiter((key(prompts.input_ids(index)) for index in range(prompts.count)), np.int64, prompts.count)
    found = np.full(prompts.count, -1, np.int64)
    for members in _runs(keys):
        for group in _groups(prompts, members, most):
            if len(group) > 1:
                found[group] = group[0]
    return found


def followers(keys: NDArray[np.int64], most: int = MOST) -> NDArray[np.bool_]:
    """Which samples would be committed with an earlier one, going by hashes alone: for forecasts.

    Args:
        keys: int64 [samples], of `key`.
        most: members of a group at most.
    """
    found = np.zeros(len(keys), np.bool_)
    for members in _runs(keys):
        found[members] = np.arange(len(members)) % most != 0
    return found


def _runs(keys: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """The indices of each key that more than one sample has, rising."""
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order], prepend=-1, append=-1))
    for run in np.flatnonzero(np.diff(bounds) > 1).tolist():
        yield order[bounds[run] : bounds[run + 1]]


def _groups(prompts: Prompts, members: NDArray[np.int64], most: int) -> list[list[int]]:
    """Members of one key, told apart by their ids."""
    heads: list[NDArray[np.int32]] = []
    groups: list[list[int]] = []
    for index in members.tolist():
        ids = prompts.input_ids(index)
        for number, head in enumerate(heads):
            if np.array_equal(head, ids) and len(groups[number]) < most:
                groups[number].append(index)
                break
        else:
            heads.append(ids)
            groups.append([index])
    return groups
