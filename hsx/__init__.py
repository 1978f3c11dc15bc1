"""hsx: hidden states of large models, proved to belong to their samples, in Zarr.

`hsx.open(path)` reads a store. Importing this package is cheap and pulls in nothing but the standard library, because the
capture plugin lives in it and is imported by the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from hsx.stores.reader import Store


def open(  # noqa: A001 - hsx.open mirrors zarr.open; the builtin is not used here
    path: str | PathLike[str], *, roots: Mapping[str, str | PathLike[str]] | None = None, check: bool = True
) -> Store:
    """Opens a store for reading; see `hsx.stores.reader.Store`.

    Args:
        path: the store's folder.
        roots: where roots are mounted today, by name, if neither where the store says nor beside it.
        check: prove what is read by its checksums.

    Raises:
        RunError: `store_invalid` where `path` is not an hsx store; `root_unusable` where `roots` names what is no root of it.
    """
    from hsx.stores.reader import Store

    return Store(path, roots=roots, check=check)
