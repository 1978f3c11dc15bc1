"""hsx: hidden states of large models, proved to belong to their samples, in Zarr.

`hsx.open(path)` reads a store. Importing this package is cheap and pulls in nothing but the standard library, because the
capture plugin lives in it and is imported by the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from os import PathLike

    from hsx.stores.reader import Store


def open(path: str | PathLike[str]) -> Store:  # noqa: A001 - hsx.open mirrors zarr.open; the builtin is not used here
    """Opens a store for reading; see `hsx.stores.reader.Store`.

    Raises:
        RunError: kind `store_invalid` where `path` is not an hsx store.
    """
    from hsx.stores.reader import Store

    return Store(path)
