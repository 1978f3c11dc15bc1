"""What `hsx.open` returns: a store, read sample by sample.

Reads through the union view, so it needs no ledger and works beside a running job and on a finished store alike.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores.group import open_store, read_final_norm
from hsx.stores.metadata import HIDDEN_STATES
from hsx.stores.shard_reader import ShardFile
from hsx.stores.tokens import TokenTable
from hsx.stores.view import visible

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from pathlib import Path

    import torch
    from numpy.typing import NDArray

    from hsx.stores.group import StoreInfo


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One committed sample.

    The arrays are numpy's; the properties without `_numpy` give torch tensors.

    Attributes:
        index: its index in the store.
        id: its id in the dataset.
        state_names: names of the L states, in stored order.
        input_ids_numpy: int32 [tokens].
        loss_mask_numpy: uint8 [tokens] of 0 and 1.
        hidden_states_numpy: bf16 bits, uint16 [tokens, L, H].
    """

    index: int
    id: str
    state_names: tuple[str, ...]
    input_ids_numpy: NDArray[np.int32]
    loss_mask_numpy: NDArray[np.uint8]
    hidden_states_numpy: NDArray[np.uint16]

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.input_ids_numpy)

    @property
    def input_ids(self) -> torch.Tensor:
        """int64 [tokens]."""
        return _int64(self.input_ids_numpy)

    @property
    def loss_mask(self) -> torch.Tensor:
        """int64 [tokens] of 0 and 1."""
        return _int64(self.loss_mask_numpy)

    @property
    def hidden_states(self) -> torch.Tensor:
        """bfloat16 [tokens, L, H], sharing memory with `hidden_states_numpy`."""
        return _bfloat16(self.hidden_states_numpy)

    def state(self, name: str) -> torch.Tensor:
        """One state, such as `h_2` or `post_norm`: bfloat16 [tokens, H], a view. Raises RunError `sample_unknown`."""
        if name not in self.state_names:
            raise RunError("sample_unknown", f"sample {self.index} has no state {name!r}; it has {', '.join(self.state_names)}")
        return self.hidden_states[:, self.state_names.index(name)]


class Store:
    """A store, open for reading. Cheap to open, picklable, and safe to use from several threads.

    `store[i]` and `store["id"]` read a sample, iterating gives the committed ones in order of their index, `len` counts all
    samples of the job, committed or not.

    Args:
        path: the group's folder.
        check: prove every inner chunk that is read by its crc32c.

    Raises:
        RunError: `store_invalid` where `path` is not an hsx store or its token arrays cannot be read.
    """

    def __init__(self, path: str | PathLike[str], *, check: bool = True) -> None:
        self._info = open_store(path)
        self._check = check
        self._table = TokenTable(self._info.path)
        if self._table.count != self._info.layout.samples:
            raise RunError(
                "store_invalid",
                f"store {self.path} has token arrays of {self._table.count} samples; expected {self._info.layout.samples}",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopen, (str(self.path), self._check))

    @property
    def info(self) -> StoreInfo:
        """What the store says of itself: id, layout, capture spec, model, roots."""
        return self._info

    @property
    def path(self) -> Path:
        """The group's folder."""
        return self._info.path

    @property
    def metadata(self) -> dict[str, Any]:
        """The group's `hsx` attribute: JSON values, see docs/on-disk-format.md."""
        return dict(self._info.attributes["hsx"])

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the L states, in stored order, such as `("h_2", "h_15", "post_norm")`."""
        return self._info.spec.names

    @property
    def hidden_size(self) -> int:
        """H."""
        return self._info.layout.hidden_size

    @property
    def final_norm(self) -> tuple[NDArray[np.float32], float] | None:
        """Weight, float32 [H], and eps of the model's final norm; None where no server has reported it yet."""
        return read_final_norm(self.path)

    @cached_property
    def committed(self) -> NDArray[np.int64]:
        """Indices of the samples that are there, sorted; as of the first use or the last `refresh`."""
        return visible(self.path / HIDDEN_STATES)

    def refresh(self) -> None:
        """Looks again for committed samples, in the store of a running job."""
        self.__dict__.pop("committed", None)

    def __len__(self) -> int:
        return self._info.layout.samples

    def __iter__(self) -> Iterator[StoredSample]:
        return (self.sample(int(index)) for index in self.committed)

    def __contains__(self, key: object) -> bool:
        try:
            index = self.index(key) if isinstance(key, int | str) else -1
        except RunError:
            return False
        return index >= 0 and self._shard(index).is_symlink()

    def __getitem__(self, key: SupportsIndex | str) -> StoredSample:
        return self.sample(key)

    def index(self, key: SupportsIndex | str) -> int:
        """The index of a sample given by index (negative ones count from the end) or id. Raises RunError `sample_unknown`."""
        if isinstance(key, str):
            return self._table.index_of(key)
        index = operator.index(key)
        if not -len(self) <= index < len(self):
            raise RunError("sample_unknown", f"store {self.path} has no sample {index}; it has {len(self)} samples")
        return index % len(self)

    def tokens(self, key: SupportsIndex | str) -> int:
        """Prompt length of a sample, committed or not. Raises RunError `sample_unknown`."""
        return self._table.tokens(self.index(key))

    def input_ids_numpy(self, key: SupportsIndex | str) -> NDArray[np.int32]:
        """Ids of a sample, committed or not: int32 [tokens]. Raises RunError `sample_unknown`."""
        return self._table.input_ids(self.index(key))

    def loss_mask_numpy(self, key: SupportsIndex | str) -> NDArray[np.uint8]:
        """Loss mask of a sample, committed or not: uint8 [tokens]. Raises RunError `sample_unknown`."""
        return self._table.loss_mask(self.index(key))

    def sample_id(self, key: SupportsIndex) -> str:
        """Id of a sample, committed or not. Raises RunError `sample_unknown`."""
        return self._table.sample_id(self.index(key))

    def sample(self, key: SupportsIndex | str) -> StoredSample:
        """Reads a sample by index or id.

        Raises RunError: `sample_unknown` where there is none, or it is not committed; `store_invalid` where its shard is
        missing, torn or changed.
        """
        index = self.index(key)
        return StoredSample(
            index=index,
            id=self._table.sample_id(index),
            state_names=self.state_names,
            input_ids_numpy=self._table.input_ids(index),
            loss_mask_numpy=self._table.loss_mask(index),
            hidden_states_numpy=self.hidden_states_numpy(index),
        )

    def hidden_states_numpy(self, key: SupportsIndex | str, start: int = 0, stop: int | None = None) -> NDArray[np.uint16]:
        """bf16 bits of a sample's tokens from `start` up to `stop` (default: all), uint16 [stop - start, L, H].

        Reads only the inner chunks that hold them. Raises as `sample`, and ValueError for tokens that the sample has not.
        """
        index = self.index(key)
        path = self._shard(index)
        if not path.is_symlink() and not path.exists():
            raise RunError("sample_unknown", f"sample {index} of store {self.path} is not committed")
        with ShardFile(path, self._info.layout, self._table.tokens(index), check=self._check) as shard:
            return shard.read(start, stop)

    def hidden_states(self, key: SupportsIndex | str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """As `hidden_states_numpy`, as bfloat16."""
        return _bfloat16(self.hidden_states_numpy(key, start, stop))

    def _shard(self, index: int) -> Path:
        return self.path / HIDDEN_STATES / shard_key(index)


def _reopen(path: str, check: bool) -> Store:
    return Store(path, check=check)


def _int64(values: NDArray[Any]) -> torch.Tensor:
    import torch  # numpy readers of a store, and the commands, do without it

    return torch.from_numpy(values.astype(np.int64))


def _bfloat16(bits: NDArray[np.uint16]) -> torch.Tensor:
    import torch  # as above

    return torch.from_numpy(bits).view(torch.bfloat16)
