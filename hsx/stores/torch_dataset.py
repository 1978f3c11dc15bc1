"""A `torch.utils.data.Dataset` over a store, for training, and the joining of its items to batches.

dataset = HiddenStatesDataset(path, states=["h_2", "post_norm"])
sampler = TokenBudgetSampler(dataset.lengths, 16384, seed=1, rank=rank, world_size=world_size)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_packed, num_workers=2)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from hsx.errors import RunError
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

    from numpy.typing import NDArray

Item = dict[str, torch.Tensor]


class HiddenStatesDataset(Dataset[Item]):
    """Map-style dataset of the committed samples. Works with any number of DataLoader workers, forked or spawned.

    Items are dictionaries of tensors: `index` int64 [], `input_ids` int64 [tokens], `loss_mask` int64 [tokens] and
    `hidden_states` bfloat16 [tokens, L, H]. Of a store that keeps the states of some tokens alone, `hidden_states` is [rows,
    L, H], and there is `positions` int64 [rows] too, the token that each row is of. A DataLoader fetches the items of a batch
    at once, which puts their states one behind the other into one piece of memory: `collate_packed` then has nothing to copy,
    nor has a worker on its way to the trainer.

    Args:
        path: the store.
        indices: samples to use, in this order; default: all that are committed now.
        states: names of the states to read, in this order; default: all.
        max_tokens: longer samples are cut to their first so many tokens; the rest is not read.
        roots: where roots are mounted today, by name, if neither where the store says nor beside it.
        check: prove every inner chunk by its crc32c.

    Raises:
        RunError: `store_invalid`; `root_unusable`; `sample_unknown` where one of `indices` is not committed, or there is no
            such state.
        ValueError: `max_tokens` is less than 1.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        indices: Sequence[int] | None = None,
        *,
        states: Sequence[str] | None = None,
        max_tokens: int | None = None,
        roots: Mapping[str, str | PathLike[str]] | None = None,
        check: bool = True,
    ) -> None:
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; expected at least 1")
        self.store = Store(path, roots=roots, check=check)
        """The store; shared with forked workers, opened again in spawned ones."""
        committed = self.store.committed
        self.indices = committed if indices is None else np.asarray(indices, np.int64)
        """Indices in the store of the items, int64."""
        missing = np.setdiff1d(self.indices, committed)
        if missing.size:
            raise RunError("sample_unknown", f"sample {missing[0]} of store {self.store.path} is not committed")
        self._states = None if states is None else self.store.require_states(states)
        lengths = self.store.lengths[self.indices]
        self.lengths = lengths if max_tokens is None else np.minimum(lengths, max_tokens)
        """Tokens of each item, int64: what a sampler goes by."""
        self.rows = self.lengths
        """Rows of states of each item, int64: fewer than tokens where the store keeps fewer; a sampler may go by them
        instead."""
        if self.store.info.layout.selects:
            self.rows = self.store.row_counts[self.indices]
            for at in np.flatnonzero(lengths > self.lengths).tolist():
                self.rows[at] = np.searchsorted(self.store.positions_numpy(int(self.indices[at])), self.lengths[at])

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the L states, in the order of the items."""
        return self.store.state_names if self._states is None else self._states

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> Item:
        """Reads one item. Raises IndexError past the end, and RunError `store_invalid` for a damaged shard."""
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int]) -> list[Item]:
        """Reads the items of a batch; a DataLoader calls this. Raises as `__getitem__`."""
        indices = [int(self.indices[item]) for item in items]
        lengths = [int(self.lengths[item]) for item in items]
        rows = [int(self.rows[item]) for item in items]
        selects = self.store.info.layout.selects
        shape = (sum(rows), len(self.state_names), self.store.hidden_size)
        buffer, states = self._memory(shape)
        made: list[Item] = []
        at = 0
        for index, tokens, count in zip(indices, lengths, rows, strict=True):
            self.store.hidden_states_numpy(index, 0, tokens, states=self._states, out=buffer[at : at + count])
            made.append(
                {
                    "index": torch.tensor(index),
                    "input_ids": torch.from_numpy(self.store.input_ids_numpy(index)[:tokens].astype(np.int64)),
                    "loss_mask": torch.from_numpy(self.store.loss_mask_numpy(index)[:tokens].astype(np.int64)),
                    "hidden_states": states[at : at + count],
                }
            )
            if selects:
                made[-1]["positions"] = torch.from_numpy(self.store.positions_numpy(index)[:count])
            at += count
        return made

    def _memory(self, shape: tuple[int, int, int]) -> tuple[NDArray[np.uint16], torch.Tensor]:
        """Memory for states, as bits and as the bfloat16 tensor of them.

        In a worker it is shared memory, in which the tensor travels to the trainer without being copied.
        """
        if get_worker_info() is None:
            bits = self.store.empty(shape)
            return bits, torch.from_numpy(bits).view(torch.bfloat16)
        nbytes = int(np.prod(shape)) * torch.bfloat16.itemsize
        storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]  # as default_collate in a worker
        states = torch.empty(0, dtype=torch.bfloat16).set_(storage).view(shape)
        return states.view(torch.uint16).numpy(), states


def collate_padded(items: Sequence[Item]) -> Item:
    """Joins items to a batch, padded with zeros on the right to the longest of it.

    Returns `index` [B], `input_ids`, `loss_mask` and `attention_mask` int64 [B, S], `hidden_states` bfloat16 [B, S, L, H].
    Where the store keeps the states of some tokens alone, `hidden_states` is [B, R, L, H], R the most rows of a sample, and
    `positions` int64 [B, R] says which token each row is of; -1 for a row that is padding.
    """
    pad = torch.nn.utils.rnn.pad_sequence
    some = "positions" in items[0]
    return {
        "index": torch.stack([item["index"] for item in items]),
        **{key: pad([item[key] for item in items], batch_first=True) for key in ("input_ids", "loss_mask", "hidden_states")},
        "attention_mask": pad([torch.ones_like(item["input_ids"]) for item in items], batch_first=True),
        **({"positions": pad([item["positions"] for item in items], batch_first=True, padding_value=-1)} if some else {}),
    }


def collate_packed(items: Sequence[Item]) -> Item:
    """Joins items to a batch without padding, one behind the other, as variable-length attention wants them.

    Returns `index` int64 [B], `input_ids`, `loss_mask` and `position_ids` int64 [T], with positions that begin at 0 in each
    sample, `cu_seqlens` int32 [B + 1], where each sample begins and the last one ends, `max_seqlen` int64 [], the longest
    sample, and `hidden_states` bfloat16 [T, L, H]. Where the store keeps the states of some tokens alone, `hidden_states` is
    [R, L, H], and `positions` int64 [R] says which of the T tokens each row is of.
    """
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    return {
        "index": torch.stack([item["index"] for item in items]),
        "input_ids": torch.cat([item["input_ids"] for item in items]),
        "loss_mask": torch.cat([item["loss_mask"] for item in items]),
        "position_ids": torch.cat([torch.arange(tokens) for tokens in lengths.tolist()]),
        "cu_seqlens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        "max_seqlen": lengths.max(),
        "hidden_states": _joined([item["hidden_states"] for item in items]),
        **({"positions": _moved(items, lengths)} if "positions" in items[0] else {}),
    }


def _moved(items: Sequence[Item], lengths: torch.Tensor) -> torch.Tensor:
    """The positions of all items' rows, among the tokens of all items."""
    begins = (lengths.cumsum(0) - lengths).tolist()
    return torch.cat([item["positions"] + begin for item, begin in zip(items, begins, strict=True)])


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors [tokens, L, H] one behind the other: without copying where they lie so already, as `__getitems__` makes them."""
    at = parts[0].storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != parts[0].untyped_storage().data_ptr() or part.storage_offset() != at:
            return torch.cat(list(parts))
        at += part.numel()
    rows = sum(len(part) for part in parts)
    return torch.as_strided(parts[0], (rows, *parts[0].shape[1:]), parts[0].stride())
