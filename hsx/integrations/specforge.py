"""SpecForge's EAGLE-3 samples straight out of a store: `Eagle3Dataset` in place of its `OfflineEagle3Dataset`.

    dataset = Eagle3Dataset("/data/qwen3-8b.zarr", max_len=4096)
    loader = DataLoader(dataset, batch_size=1, collate_fn=DataCollatorWithPadding())  # SpecForge's own collator

Needs torch, and nothing of SpecForge.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from hsx.errors import RunError
from hsx.export import load_format
from hsx.export.mapping import map_states
from hsx.export.norm import apply_final_norm
from hsx.exporting import refuse_partial
from hsx.stores.reader import Store

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

Item = dict[str, torch.Tensor]


class Eagle3Dataset(Dataset[Item]):
    """Committed samples with the keys, shapes and values that SpecForge's loader gives of `hsx export --to specforge`.

    Items: `input_ids`, `loss_mask` (its last token 0) and `attention_mask` int64 [1, S], `target` bfloat16 [1, S, H], the final
    state after the norm, `hidden_state` bfloat16 [1, S, 3H], the layers. Works with any number of workers, forked or spawned.

    Args:
        path: the store.
        max_len: samples are cut to their first so many tokens; the rest is not read.
        layers: the k of three layers h_k; default: the store's, if it has three.
        indices: samples to use, in this order; default: all that are committed now.
        roots: where roots are mounted today, by name, if neither where the store says nor beside it.
        check: prove what is read by its checksums.

    Raises:
        RunError: `store_invalid`; `export_refused` where the store has not what SpecForge wants; `sample_unknown` where one of
            `indices` is not committed.
        ValueError: `max_len` is less than 1.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        max_len: int = 2048,
        *,
        layers: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        roots: Mapping[str, str | PathLike[str]] | None = None,
        check: bool = True,
    ) -> None:
        if max_len < 1:
            raise ValueError(f"max_len is {max_len}; expected at least 1")
        self.store = Store(path, roots=roots, check=check)
        refuse_partial(self.store)
        norm = self.store.final_norm
        self._mapping = map_states(load_format("specforge"), self.store.info.spec, layers, has_norm=norm is not None)
        self._norm = norm if self._mapping.computed else None
        self._max_len = max_len
        committed = set(self.store.committed.tolist())
        self.indices = sorted(committed) if indices is None else [int(index) for index in indices]
        """Indices in the store of the items."""
        missing = [index for index in self.indices if index not in committed]
        if missing:
            raise RunError("sample_unknown", f"sample {missing[0]} of store {self.store.path} is not committed")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> Item:
        """Reads one item. Raises IndexError past the end, RunError `store_invalid` for a damaged shard."""
        index = self.indices[item]
        stop = min(self.store.tokens(index), self._max_len)
        sample = self.store.sample(index, 0, stop, states=self._mapping.stored)
        states = sample.hidden_states
        final = states[:, -1]
        loss_mask = sample.loss_mask.unsqueeze(0)
        loss_mask[0, -1] = 0  # as SpecForge has it: nothing follows the last token
        return {
            "input_ids": sample.input_ids.unsqueeze(0),
            "loss_mask": loss_mask,
            "attention_mask": torch.ones_like(loss_mask),
            "target": (final if self._norm is None else apply_final_norm(final, *self._norm)).unsqueeze(0),
            "hidden_state": states[:, :-1].flatten(1).unsqueeze(0),
        }
