"""A `torch.utils.data.Dataset` over a store, for training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from hsx.errors import RunError
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

Item = dict[str, torch.Tensor]


class HiddenStatesDataset(Dataset[Item]):
    """Map-style dataset of the committed samples. Works with any number of DataLoader workers, forked or spawned.

    Items are dictionaries of tensors: `index` int64 [], `input_ids` int64 [tokens], `loss_mask` int64 [tokens] and
    `hidden_states` bfloat16 [tokens, L, H].

    Args:
        path: the store.
        indices: samples to use, in this order; default: all that are committed now.
        check: prove every inner chunk by its crc32c.

    Raises:
        RunError: `store_invalid`; `sample_unknown` where one of `indices` is not committed.
    """

    def __init__(self, path: str | PathLike[str], indices: Sequence[int] | None = None, *, check: bool = True) -> None:
        self.store = Store(path, check=check)
        """The store; shared with forked workers, opened again in spawned ones."""
        committed = self.store.committed
        self.indices = committed if indices is None else np.asarray(indices, np.int64)
        """Indices in the store of the items, int64."""
        missing = np.setdiff1d(self.indices, committed)
        if missing.size:
            raise RunError("sample_unknown", f"sample {missing[0]} of store {self.store.path} is not committed")

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the L states, in stored order."""
        return self.store.state_names

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> Item:
        """Reads one item. Raises IndexError past the end, and RunError `store_invalid` for a damaged shard."""
        sample = self.store.sample(int(self.indices[item]))
        return {
            "index": torch.tensor(sample.index),
            "input_ids": sample.input_ids,
            "loss_mask": sample.loss_mask,
            "hidden_states": sample.hidden_states,
        }


def collate_padded(items: Sequence[Item]) -> Item:
    """Joins items to a batch, padded with zeros on the right to the longest of it.

    Returns `index` [B], `input_ids`, `loss_mask` and `attention_mask` int64 [B, S], `hidden_states` bfloat16 [B, S, L, H].
    """
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "index": torch.stack([item["index"] for item in items]),
        **{key: pad([item[key] for item in items], batch_first=True) for key in ("input_ids", "loss_mask", "hidden_states")},
        "attention_mask": pad([torch.ones_like(item["input_ids"]) for item in items], batch_first=True),
    }
