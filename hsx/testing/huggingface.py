"""Hugging Face in float32 as the judge: the states of one prompt, computed alone and in one piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hsx.stores.group import open_store
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.testing.truth import BF16_ROUNDING

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.config_load import LoadedConfig


class HuggingFace:
    """A model folder, loaded with transformers. Needs the extra `hf`.

    Args:
        folder: the model.
    """

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        # On a busy machine threads that wait for each other cost more than they bring.
        torch.set_num_threads(1)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
        self._before_norm: list[torch.Tensor] = []
        self._model.model.norm.register_forward_pre_hook(lambda _, inputs: self._before_norm.append(inputs[0]))

    def states(self, ids: NDArray[np.int32]) -> list[NDArray[np.float32]]:
        """h_0 to h_N, then the state after the final norm: N + 2 arrays of [tokens, H]."""
        import torch

        self._before_norm.clear()
        with torch.no_grad():
            found = self._model.model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states
        return [state[0].numpy() for state in (*found[:-1], self._before_norm[0], found[-1])]


def relative_error(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Per token: the norm of the difference over the norm of what is wanted; [tokens]."""
    error: NDArray[np.float32] = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return error


def wrong_by_hugging_face(loaded: LoadedConfig, judge: HuggingFace, prompts: list[list[int]]) -> list[int]:
    """Indices of the committed samples of a job whose stored ids or states are not those of the prompt with that index.

    Raises AssertionError where the ledger's committed samples and the shards that the store shows are not the same set.
    """
    store = Store(loaded.store)
    spec = open_store(loaded.store).spec
    with LedgerReader(loaded.state_dir / FILE_NAME) as ledger:
        committed = [row.index for row in ledger.committed()]
    shown = [int(index) for index in store.committed]
    assert shown == committed, f"the ledger has {len(committed)} committed samples, the store shows {len(shown)}"
    wrong = []
    for index in committed:
        ids, sample = np.array(prompts[index], np.int32), store[index]
        every = judge.states(ids)
        last = len(every) - 1 if spec.final == "post_norm" else len(every) - 2
        truth = np.stack([every[k] for k in (*spec.layers, last)], axis=1)
        stored = sample.hidden_states.float().numpy()
        same = sample.input_ids.tolist() == prompts[index] and stored.shape == truth.shape
        if not same or not (relative_error(stored, truth) <= BF16_ROUNDING).all():
            wrong.append(index)
    return wrong
