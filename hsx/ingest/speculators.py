"""speculators' folder: rows of an Arrow dataset, and `hidden_states/hs_<row>.safetensors`."""

from __future__ import annotations

import importlib
import json
import re
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.errors import RunError
from hsx.ingest.files import files_below
from hsx.ingest.protocol import Entry, Head, RejectedSampleError, checked_ids, checked_mask, checked_shape, number_of
from hsx.ingest.safetensors_file import connector_states

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState
    from hsx.ingest.safetensors_file import SafetensorsFile

_NAME: Final = re.compile(r"hs_[0-9]+\.safetensors")
"""As speculators' own reader names them: what it writes beside them, locks and parts, are no samples."""


class SpeculatorsFolder:
    """Implements `hsx.ingest.protocol.Source`. `token_ids` of a file must be the `input_ids` of its row."""

    final: FinalState = "pre_norm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._table = _table(folder)

    def entries(self) -> Iterator[Entry]:
        """See the protocol."""
        folder = self._folder / "hidden_states"
        if not folder.is_dir():
            raise RunError("import_refused", f"{self._folder} has no folder hidden_states; expected one of speculators")
        there = np.zeros(self._table.num_rows, np.bool_)
        for path in files_below(folder, (".safetensors",)):
            if path.parent == folder and _NAME.fullmatch(path.name):
                row = number_of(path)
                there[row : row + 1] = True
                yield Entry(row, path)
        yield from (Entry(row, folder / f"hs_{row}.safetensors") for row in np.flatnonzero(~there).tolist())

    def head(self, entry: Entry, states: int) -> Head:
        """See the protocol."""
        return self._head(connector_states(entry.file), entry.row, states)

    def sample(self, entry: Entry, states: int) -> tuple[Head, NDArray[np.uint16]]:
        """See the protocol."""
        file = connector_states(entry.file)
        return self._head(file, entry.row, states), file.read("hidden_states")

    def _head(self, file: SafetensorsFile, row: int, states: int) -> Head:
        if not 0 <= row < self._table.num_rows:
            raise RejectedSampleError(
                "missing_key", f"the dataset has {self._table.num_rows} rows; expected one of number {row}"
            )
        wanted = checked_ids(self._column("input_ids", row))
        mask = checked_mask(self._column("loss_mask", row), len(wanted))
        ids = checked_ids(file.read("token_ids"))
        if not np.array_equal(ids, wanted):
            raise RejectedSampleError("tokens_differ", "token_ids are not the input_ids of the dataset's row")
        return Head(ids, mask, states, checked_shape(file.shape("hidden_states"), len(ids), states))

    def _column(self, name: str, row: int) -> NDArray[Any]:
        value = self._table.column(name)[row]
        if not value.is_valid or not hasattr(value, "values"):
            reason = "bad_ids" if name == "input_ids" else "bad_mask"
            raise RejectedSampleError(
                reason, f"{name} of row {row} is {value.type}, {value.as_py()!r}; expected a list of numbers"
            )
        return np.asarray(value.values.to_numpy(zero_copy_only=False))


def _table(folder: Path) -> Any:  # noqa: ANN401 - pyarrow ships no types
    try:
        pa = importlib.import_module("pyarrow")
    except ImportError as error:
        raise RunError(
            "dependency_missing", "an Arrow dataset needs the package pyarrow; expected hsx to be installed as hsx[parquet]"
        ) from error
    try:
        names = [entry["filename"] for entry in json.loads((folder / "state.json").read_bytes())["_data_files"]]
        parts = [pa.ipc.open_stream(pa.memory_map(str(folder / name))).read_all() for name in names]
        table = pa.concat_tables(parts)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, pa.ArrowException) as error:
        raise RunError(
            "import_refused", f"{folder} is no dataset of speculators: {error}; expected one of save_to_disk"
        ) from error
    lacking = [name for name in ("input_ids", "loss_mask") if name not in table.column_names]
    if lacking:
        raise RunError("import_refused", f"{folder} has columns {', '.join(table.column_names)}; expected {lacking[0]} too")
    return table


def open_folder(folder: Path) -> SpeculatorsFolder:
    """The source on a folder. Raises RunError `import_refused`, `dependency_missing`."""
    return SpeculatorsFolder(folder)
