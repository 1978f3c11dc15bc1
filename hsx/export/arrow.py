"""A folder as `datasets.save_to_disk` leaves it, of `input_ids`, `loss_mask` and `seq_len`: written with pyarrow alone."""

from __future__ import annotations

import hashlib
import importlib
import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.errors import RunError
from hsx.export.files import whole_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from hsx.export.protocol import IndexRow

_DATA: Final = "data-00000-of-00001.arrow"
_BATCH: Final = 1000
_BATCH_TOKENS: Final = 1 << 22
_INT64: Final = {"dtype": "int64", "_type": "Value"}
_LIST: Final = {"feature": _INT64, "_type": "List"}
_FEATURES: Final = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": _INT64}


def require_pyarrow() -> Any:  # noqa: ANN401 - pyarrow ships no types
    """The module pyarrow. Raises RunError `dependency_missing`."""
    try:
        return importlib.import_module("pyarrow")
    except ImportError as error:
        raise RunError(
            "dependency_missing", "an Arrow dataset needs the package pyarrow; expected hsx to be installed as hsx[parquet]"
        ) from error


def write_arrow_dataset(folder: Path, rows: Iterable[IndexRow]) -> list[str]:
    """Writes the dataset into `folder`, a batch of rows in memory at a time; returns the names of its files.

    `datasets.load_from_disk` gives torch tensors of it, as of a dataset on which `set_format("torch")` was called.
    Raises OSError, and RunError `dependency_missing`.
    """
    pa = require_pyarrow()
    types = {"input_ids": pa.list_(pa.int64()), "loss_mask": pa.list_(pa.int64()), "seq_len": pa.int64()}
    about = json.dumps({"info": {"features": _FEATURES}})
    schema = pa.schema(list(types.items()), metadata={"huggingface": about})
    digest = hashlib.sha256()
    with (
        whole_file(folder / _DATA, shared=True) as file,
        pa.ipc.new_stream(pa.PythonFile(_Sink(file), mode="w"), schema) as writer,
    ):
        for batch in _batches(iter(rows)):
            columns = {
                "input_ids": _lists(pa, [row.input_ids for row in batch]),
                "loss_mask": _lists(pa, [row.loss_mask for row in batch]),
                "seq_len": pa.array([len(row.input_ids) for row in batch], pa.int64()),
            }
            for row in batch:
                digest.update(row.input_ids.tobytes() + row.loss_mask.tobytes())
            writer.write_batch(pa.record_batch(list(columns.values()), schema=schema))
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    state: dict[str, Any] = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    for name, document in (("dataset_info.json", info), ("state.json", state)):
        with whole_file(folder / name, shared=True) as file:
            file.write(json.dumps(document, indent=2).encode())
    return [_DATA, "dataset_info.json", "state.json"]


def _batches(rows: Iterator[IndexRow]) -> Iterator[list[IndexRow]]:
    """Rows for one piece of the file, which is in memory whole: bounded in rows and in tokens."""
    batch: list[IndexRow] = []
    tokens = 0
    for row in rows:
        batch.append(row)
        tokens += len(row.input_ids)
        if len(batch) == _BATCH or tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _lists(pa: Any, parts: list[Any]) -> Any:  # noqa: ANN401 - pyarrow ships no types
    ends = np.cumsum([0, *(len(part) for part in parts)], dtype=np.int32)
    values = np.concatenate(parts).astype(np.int64)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(values, pa.int64()))


class _Sink:
    """A `CheckedFile` with what pyarrow asks of a Python file."""

    closed = False

    def __init__(self, file: Any) -> None:  # noqa: ANN401 - a CheckedFile; its type is for checkers only
        self._file = file

    def write(self, data: Any) -> int:  # noqa: ANN401 - a buffer of pyarrow's
        return int(self._file.write(memoryview(data)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        """The file is closed by who opened it."""
