"""Hidden states that others have extracted, for `hsx import`: one module a kind of folder, behind `hsx.ingest.protocol.Source`.

Importing this module costs nothing; a kind brings its packages with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.ingest.protocol import Source

SOURCES: Final[dict[str, str]] = {
    "specforge": "SpecForge, EAGLE-3 offline: data_<i>.ckpt, also .gz",
    "speculators": "speculators: an Arrow dataset with hidden_states/hs_<row>.safetensors",
    "vllm": "files of vLLM's hidden states connector: token_ids and hidden_states, without loss masks",
}
"""Names for `hsx import --from`, and what each is."""


def open_source(name: str, folder: Path) -> Source:
    """The source of that name, out of `SOURCES`, on a folder. Raises RunError `import_refused`, `dependency_missing`."""
    return cast("Source", importlib.import_module(f"hsx.ingest.{name}").open_folder(folder))
