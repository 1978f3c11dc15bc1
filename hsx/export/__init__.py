"""Files as trainers read them, out of a store: one module a format, all behind `hsx.export.protocol.Format`.

The formats know nothing of stores: `hsx.exporting` chooses, `hsx.export_run` reads and writes, they say how one sample looks.
Importing this module costs nothing; a format brings torch with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from hsx.export.protocol import Format

FORMATS: Final[dict[str, str]] = {
    "specforge": "SpecForge, EAGLE-3 offline",
    "specforge-dflash": "SpecForge, DFlash, Domino and DSpark offline",
    "speculators": "speculators: an Arrow dataset with hs_<row>.safetensors",
    "modelopt": "NVIDIA ModelOpt, offline EAGLE and DFlash",
    "angelslim": "AngelSlim, EAGLE-3 offline",
    "eagle": "EAGLE-1 and EAGLE-2",
    "safetensors": "one plain safetensors file a sample, states as stored",
}
"""Names for `hsx export --to`, and what each is for."""

_MODULES: Final = {
    "specforge": "specforge",
    "specforge-dflash": "dflash",
    "speculators": "speculators",
    "modelopt": "modelopt",
    "angelslim": "angelslim",
    "eagle": "eagle",
    "safetensors": "plain",
}


def load_format(name: str) -> Format:
    """The format of that name, out of `FORMATS`. Raises KeyError for another."""
    return cast("Format", importlib.import_module(f"hsx.export.{_MODULES[name]}").FORMAT)
