"""Holds a store against states computed independently: what every test of the whole pipeline ends with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.stores.fp8 import row_error
from hsx.stores.group import open_store
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store
from hsx.testing.reference_model import ReferenceModel, reference_states

if TYPE_CHECKING:
    from hsx.config_load import LoadedConfig

BF16_ROUNDING = 2.0**-8
"""Relative error that rounding to bf16 may leave in a row."""


def wrong_samples(loaded: LoadedConfig) -> list[int]:
    """Indices of the committed samples of a job on the reference engine whose stored states are not the truth.

    Of a store that keeps fewer tokens, the rows have to be those of the tokens that the job file asks for.

    Raises:
        AssertionError: the ledger's committed samples and the shards that the store shows are not the same set, or a
            sample's ids are not the dataset's.
    """
    store = Store(loaded.store)
    spec = open_store(loaded.store).spec
    model = ReferenceModel(loaded.model)
    storage = loaded.config.storage
    tolerance = BF16_ROUNDING + (0.0 if storage.dtype == "bf16" else row_error(store.hidden_size))
    with LedgerReader(loaded.state_dir / FILE_NAME) as ledger:
        committed = [row.index for row in ledger.committed()]
    shown = [int(index) for index in store.committed]
    assert shown == committed, f"the ledger has {len(committed)} committed samples, the store shows {len(shown)}"
    wrong = []
    for index in committed:
        sample = store[index]
        truth = reference_states(model, sample.input_ids.numpy(), spec)
        if storage.tokens == "loss":
            near = np.convolve(sample.loss_mask.numpy(), np.ones(2 * storage.context + 1, np.int64))
            wanted = np.flatnonzero(near[storage.context :][: sample.tokens])
            assert sample.positions.tolist() == wanted.tolist(), f"sample {index} has other tokens than were asked for"
            truth = truth[wanted]
        stored = sample.hidden_states.float().numpy()
        error = np.linalg.norm(stored - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
        if stored.shape != truth.shape or not (error <= tolerance).all():
            wrong.append(index)
    return wrong
