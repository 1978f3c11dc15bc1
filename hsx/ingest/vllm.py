"""A folder of files as vLLM's connector leaves them: `token_ids` and `hidden_states`; every token counts for the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.ingest.protocol import Entry, Head, checked_ids, checked_shape
from hsx.ingest.safetensors_file import connector_states

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.spec import FinalState


class ConnectorFolder:
    """Implements `hsx.ingest.protocol.Source`. Files are taken in order of their paths."""

    final: FinalState = "pre_norm"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def entries(self) -> Iterator[Entry]:
        """See the protocol."""
        for row, path in enumerate(sorted(self._folder.rglob("*.safetensors"))):
            yield Entry(row, path)

    def head(self, entry: Entry, states: int) -> Head:
        """See the protocol."""
        file = connector_states(entry.file)
        ids = checked_ids(file.read("token_ids"))
        width = checked_shape(file.shape("hidden_states"), len(ids), states)
        return Head(ids, np.ones(len(ids), np.uint8), states, width)

    def states(self, entry: Entry) -> NDArray[np.uint16]:
        """See the protocol."""
        return np.ascontiguousarray(connector_states(entry.file).read("hidden_states"))


def open_folder(folder: Path) -> ConnectorFolder:
    """The source on a folder."""
    return ConnectorFolder(folder)
