"""Opens a job: makes its index, store and ledger at the first run, and checks at every other that it is still the same job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hsx.core.fingerprint import Change, changes
from hsx.core.layout import StoreLayout
from hsx.datasets import longest_allowed, open_dataset, open_source
from hsx.errors import RunError
from hsx.index import build_index, recorded_bad_rows
from hsx.model_config import model_fingerprint, read_model_shape
from hsx.stores import ledger
from hsx.stores.durable import write_json
from hsx.stores.group import (
    FORMAT,
    REDUCED_FORMAT,
    StoreInfo,
    create_store,
    open_store,
    refuse_populated,
    require_run,
    require_unsealed,
)
from hsx.stores.ledger_backup import refuse_copy
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME, translated
from hsx.stores.selection import StoredPrompts
from hsx.stores.tokens import TokenTable
from hsx.twins import find_twins

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from hsx.config import Storage
    from hsx.config_load import LoadedConfig
    from hsx.core.spec import CaptureSpec, ModelShape
    from hsx.ports import Dataset

_OWN: Final = ("capture.", "store.", "storage.")
"""Fields of the fingerprint that come from the job file alone; `dataset.max_tokens`, too."""
MANIFEST_FILE: Final = "dataset.json"
"""In the state folder: the dataset's files, their sizes and hashes, and how many rows each has."""


@dataclass(frozen=True, slots=True)
class OpenJob:
    """A job that may run.

    Attributes:
        spec: what is captured.
        shape: the model's facts.
        store: the store, with the roots that it knows.
        samples: the indexed dataset.
        ledger: the ledger file.
    """

    spec: CaptureSpec
    shape: ModelShape
    store: StoreInfo
    samples: TokenTable
    ledger: Path


def fingerprint(loaded: LoadedConfig, dataset: Dataset, shape: ModelShape) -> dict[str, str]:
    """The settings that decide what is stored; a job resumes under no other. Reads the dataset file once, for its hash."""
    return {
        **dataset.fingerprint(),
        **model_fingerprint(loaded.model, loaded.config.model.revision),
        **_settings(loaded, shape),
    }


def _settings(loaded: LoadedConfig, shape: ModelShape) -> dict[str, str]:
    """Those of them that are read in the job file alone."""
    config = loaded.config
    return {
        "dataset.max_tokens": str(longest_allowed(config, shape)),
        "capture.layers": str(list(config.capture.layers)),
        "capture.final": config.capture.final,
        "store.format": REDUCED_FORMAT if _less(config.storage) else FORMAT,
        "store.chunk_tokens": str(config.storage.chunk_tokens),
        "storage.codec": config.storage.codec,
        **_less(config.storage),
    }


def changed_settings(loaded: LoadedConfig, shape: ModelShape) -> list[Change]:
    """The settings in which the job file contradicts the job that was begun with it; of dataset and model nothing is read.

    None for a job that was not begun. Raises RunError as `LedgerReader`.
    """
    path = loaded.state_dir / FILE_NAME
    if not path.exists():
        return []
    with LedgerReader(path) as reader:
        recorded = reader.fingerprint
    own = {key: value for key, value in recorded.items() if key == "dataset.max_tokens" or key.startswith(_OWN)}
    return changes(own, _settings(loaded, shape))


def job_changed(loaded: LoadedConfig, differing: Sequence[Change]) -> RunError:
    """The error of a job file that says otherwise than the job that was begun with it."""
    return RunError(
        "job_changed",
        f"job {loaded.config.job.name} cannot be continued with other settings:\n  "
        + "\n  ".join(map(str, differing))
        + f"\nput them back, or start another store ({loaded.store} keeps what it has)",
    )


def _less(storage: Storage) -> dict[str, str]:
    """What makes the store keep less than is captured; nothing for a whole one, as in jobs of before there was a choice."""
    whole = {"tokens": "all", "context": 0, "dtype": "bf16"}
    return {f"storage.{key}": str(getattr(storage, key)) for key in whole if getattr(storage, key) != whole[key]}


def store_layout(loaded: LoadedConfig, samples: TokenTable, shape: ModelShape) -> StoreLayout:
    """The shape of the store that a job file asks for."""
    storage = loaded.config.storage
    return StoreLayout(
        samples.count,
        int(samples.lengths.max()),
        loaded.spec.states,
        shape.hidden_size,
        chunk_tokens=storage.chunk_tokens,
        codec=storage.codec,
        kept=storage.tokens,
        context=storage.context if storage.tokens != "all" else 0,
        dtype=storage.dtype,
    )


def prepare(loaded: LoadedConfig, progress: Callable[[int, int], None]) -> OpenJob:
    """Opens the job. Blocks; at a first run it reads and tokenises the whole dataset.

    The ledger is made last: where it is, everything else is whole. A first run that was cut short begins again. Store and
    ledger carry one run id, so that neither is ever used with another's: a store with shards needs the ledger that knows them.

    Args:
        loaded: the job file.
        progress: called now and then, while the dataset is read, with (rows, tokens).

    Raises:
        RunError: `store_sealed`; `job_changed`, naming each field that differs, or where the store belongs to another ledger;
            what `build_index`, `create_store` and the ledger raise.
    """
    shape = read_model_shape(loaded.model)
    source = open_source(loaded.config)
    dataset = open_dataset(loaded.config, shape, source)
    current = fingerprint(loaded, dataset, shape)
    path = loaded.state_dir / FILE_NAME
    if path.exists():
        with LedgerReader(path) as reader:
            run, differing = reader.run, changes(reader.fingerprint, current)
        if differing:
            raise job_changed(loaded, differing)
        store = open_store(loaded.store)
        require_run(store, run, path)
        refuse_copy(path)
        require_unsealed(store)
        return OpenJob(loaded.spec, shape, store, TokenTable(loaded.store), path)
    refuse_populated(loaded.store)
    with translated(path):
        loaded.state_dir.mkdir(parents=True, exist_ok=True)
    chosen = loaded.config.dataset
    build_index(dataset, loaded.store, chosen.on_bad_row, progress, loaded.state_dir, zero_masks=chosen.zero_masks)
    with translated(path):
        write_json(loaded.state_dir / MANIFEST_FILE, source.manifest())
    samples = TokenTable(loaded.store)
    layout = store_layout(loaded, samples, shape)
    model = {"path": str(loaded.model), "revision": loaded.config.model.revision, "layers": shape.layers}
    run = ledger.new_run()
    store = create_store(loaded.store, layout, loaded.spec, model, run)
    same_as = find_twins(StoredPrompts(samples, layout)) if loaded.config.dataset.identical == "share" else None
    ledger.create(path, run, current, samples.lengths, recorded_bad_rows(loaded.state_dir), same_as)
    return OpenJob(loaded.spec, shape, store, samples, path)
