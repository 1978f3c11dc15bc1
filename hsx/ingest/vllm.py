"""A folder of files as vLLM's connector leaves them: `token_ids` and `hidden_states`; every token counts for the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.ingest.files import files_below
from hsx.ingest.protocol import Entry, Head, checked_ids, checked_shape
from hsx.ingest.safetensors_file import connector_states

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState
    from hsx.ingest.safetensors_file import SafetensorsFile


class ConnectorFolder:
    """Implements `hsx.ingest.protocol.Source`. Files are taken in order of their paths."""

    final: FinalState = "pre_norm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """See the protocol."""
        yield from (Entry(-1, path) for path in files_below(self._folder, (".safetensors",)))

    def head(self, entry: Entry, states: int) -> Head:
        """See the protocol."""
        return _head(connector_states(entry.file), states)

    def sample(self, entry: Entry, states: int) -> tuple[Head, NDArray[np.uint16]]:
        """See the protocol."""
        file = connector_states(entry.file)
        return _head(file, states), file.read("hidden_states")


def _head(file: SafetensorsFile, states: int) -> Head:
    ids = checked_ids(file.read("token_ids"))
    width = checked_shape(file.shape("hidden_states"), len(ids), states)
    return Head(ids, np.ones(len(ids), np.uint8), states, width)


def open_folder(folder: Path) -> ConnectorFolder:
    """The source on a folder."""
    return ConnectorFolder(folder)
