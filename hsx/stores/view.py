"""The union view: the group's `hidden_states`, in which each committed sample's shard is a symlink to its root.

It shows any Zarr reader one ordinary array, whatever the number of disks. It follows the ledger: links are made after the
commit, need not be durable, and are made again at the next start.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.layout import index_of_key, shard_key
from hsx.errors import RunError
from hsx.stores.durable import store_error
from hsx.stores.metadata import HIDDEN_STATES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.stores.group import StoreInfo


class UnionView:
    """Makes samples visible in the group; implements the port `View`.

    Args:
        info: the store, with all its roots.
    """

    def __init__(self, info: StoreInfo) -> None:
        self._info = info
        self._folder = info.path / HIDDEN_STATES

    def link(self, index: int, root: str) -> None:
        """Makes sample `index` on `root` visible. Idempotent; a link to another place is replaced at once.

        Raises RunError `store_unwritable`, or `store_invalid` for an unknown root.
        """
        path = self.path(index)
        target = str(self._info.folder(root) / path.name)
        try:
            try:
                path.symlink_to(target)
            except FileExistsError:
                if not path.is_symlink() or str(path.readlink()) != target:
                    self._replace(path, target)
        except OSError as error:
            raise store_error(error, path) from error

    def unlink(self, index: int) -> None:
        """Hides sample `index` again; what is no link is left alone. Idempotent. Raises RunError `store_unwritable`."""
        if self.target(index) is not None:
            self._unlink(index)

    def repair(self, committed: Iterable[tuple[int, str]]) -> int:
        """Makes the view show the committed (index, root) pairs and nothing else; returns how many links that took.

        Links of samples that are not among them go; what is no link is left to `hsx verify`. One `readlink` and one byte a
        sample. Raises RunError `store_unwritable`, `store_invalid`.
        """
        made = 0
        known = np.zeros(self._info.layout.samples, np.bool_)
        for index, root in committed:
            known[index] = True
            if self.target(index) != self._info.folder(root) / shard_key(index):
                self.link(index, root)
                made += 1
        shown = self.indices()
        beyond = shown >= known.size  # a link may bear any name
        for index in shown[beyond | ~known[np.minimum(shown, known.size - 1)]].tolist():
            if self.target(index) is not None:
                self._unlink(index)
                made += 1
        return made

    def path(self, index: int) -> Path:
        """Where the link of sample `index` is, or would be."""
        return self._folder / shard_key(index)

    def target(self, index: int) -> Path | None:
        """Where the link of sample `index` points; None where there is none."""
        with suppress(OSError):
            return self.path(index).readlink()
        return None

    def indices(self) -> NDArray[np.int64]:
        """The samples that are visible, sorted. Raises RunError `store_invalid` where the folder cannot be read."""
        return visible(self._folder)

    def _unlink(self, index: int) -> None:
        try:
            self.path(index).unlink()
        except OSError as error:
            raise store_error(error, self.path(index)) from error

    def _replace(self, path: Path, target: str) -> None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(target)
        temporary.rename(path)


def visible(folder: Path) -> NDArray[np.int64]:
    """Sample indices of the shards, or links to shards, in a folder: sorted, int64."""
    try:
        with os.scandir(folder) as entries:
            found = (index for entry in entries if (index := index_of_key(entry.name)) is not None)
            return np.sort(np.fromiter(found, np.int64))
    except OSError as error:
        raise RunError("store_invalid", f"{folder} cannot be read: {error.strerror}") from error
