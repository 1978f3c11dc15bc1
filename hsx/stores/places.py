"""Where the shards of a store lie today: its roots may be mounted elsewhere than when it was written.

The union view's links hold absolute paths. While every root is where the store has it, the links are followed as they are. A
root that is not there is looked for: where the reader says, else beside the store, at the place that it would have if the
whole tree had been moved. What a folder is, is told by `hsx-root.json` in it, never by its name, so a guess cannot give
another store's shards.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores.attach import IDENTITY
from hsx.stores.metadata import HIDDEN_STATES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from hsx.stores.group import StoreInfo


class Places:
    """Finds shards by their sample's index. Safe to use from several threads.

    Args:
        info: the store.
        given: paths of roots that are mounted elsewhere than the store says, by name. Either the root's path, as it would be in
            the job file, or the store's folder in it.

    Raises:
        RunError: `root_unusable` where `given` names a root that the store does not have, or a folder that is not this root.
    """

    def __init__(self, info: StoreInfo, given: Mapping[str, str | PathLike[str]] | None = None) -> None:
        self._info = info
        self._view = info.path / HIDDEN_STATES
        self._names = {os.fspath(info.folder(name)): name for name in info.roots}
        self._folders: dict[str, Path] = {}
        for name, path in (given or {}).items():
            self._folders[name] = _given(info, name, Path(path).absolute())
        for name in info.roots.keys() - self._folders.keys():
            found = next((folder for folder in _candidates(info, name) if _is_root(folder, info.store_id, name)), None)
            if found is not None:
                self._folders[name] = found
        self._moved = any(folder != info.folder(name) for name, folder in self._folders.items())

    @property
    def folders(self) -> dict[str, Path]:
        """Where the shards of each root lie, `<root path>/<store_id>`; roots that were not found are left out."""
        return dict(self._folders)

    def link(self, index: int) -> Path:
        """The name of sample `index` in the union view; the sample is committed if it exists, even as a broken link."""
        return self._view / shard_key(index)

    def shard(self, index: int) -> Path:
        """Where the shard of a committed sample should be: through the union view, unless its root has moved."""
        link = self.link(index)
        if not self._moved:
            return link
        try:
            target = link.readlink()
        except OSError:  # not committed, or a copy of the store in which links have become files
            return link
        folder = self._folders.get(self._names.get(os.fspath(target.parent), ""))
        return link if folder is None else folder / target.name

    def search(self, index: int, root: str | None = None) -> Path | None:
        """Looks everywhere for a shard that `shard` did not lead to; None where its root is there and has no such file.

        Links are stale for a moment while a sample is moved from root to root, and after a kill until the next run.

        Args:
            index: a committed sample.
            root: the root that has it, where that is known otherwise than by the link.

        Raises:
            RunError: `root_unusable` where it may lie on a root that was not found; `store_invalid` where two roots have one.
        """
        again = self.shard(index)
        if again.exists():
            return again
        folders = self._folders if root is None else {name: path for name, path in self._folders.items() if name == root}
        found = {name: path for name, folder in folders.items() if (path := folder / shard_key(index)).exists()}
        if len(found) > 1:
            raise RunError(
                "store_invalid",
                f"sample {index} of store {self._info.path}: the union view's link is broken, and roots "
                f"{' and '.join(sorted(found))} both have a shard of it; the next `hsx run` of the job removes the wrong one",
            )
        if found:
            return next(iter(found.values()))
        self._require_root(index, root or self._linked_root(index))
        return None

    def _linked_root(self, index: int) -> str | None:
        try:
            target = self.link(index).readlink()
        except OSError:
            return None
        return self._names.get(os.fspath(target.parent))

    def _require_root(self, index: int, name: str | None) -> None:
        """Raises RunError `root_unusable` where root `name`, or if that is not known any root, is not there."""
        if name in self._folders:
            return
        lost = [name] if name else sorted(set(self._info.roots) - set(self._folders))
        if lost:
            places = " or ".join(str(self._info.folder(root)) if root in self._info.roots else root for root in lost)
            raise RunError(
                "root_unusable",
                f"sample {index} of store {self._info.path} lies on root {' or '.join(map(repr, lost))}, which is not at "
                f"{places}; mount it there, or say where it is: hsx.open(..., roots={{{lost[0]!r}: PATH}})",
            )


def _given(info: StoreInfo, name: str, path: Path) -> Path:
    if name not in info.roots:
        known = ", ".join(info.roots) or "none"
        raise RunError("root_unusable", f"root {name!r} is given as {path}; store {info.path} has {known}")
    for folder in (path / info.store_id, path):
        if _is_root(folder, info.store_id, name):
            return folder
    raise RunError(
        "root_unusable",
        f"root {name!r} is given as {path}; expected a folder {info.store_id} in it, with {IDENTITY} of that root",
    )


def _candidates(info: StoreInfo, name: str) -> Iterator[Path]:
    """The recorded folder of a root, then the places that it has if it was moved together with the store: nearest first."""
    folder = info.folder(name)
    yield folder
    parts = folder.parts[1:]
    for parent in info.path.parents:
        for start in range(1, len(parts)):
            yield parent.joinpath(*parts[start:])
    for parent in info.path.parents:
        yield parent.joinpath(*parts)


def _is_root(folder: Path, store_id: str, name: str) -> bool:
    try:
        identity = json.loads((folder / IDENTITY).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(identity, dict) and (identity.get("store_id"), identity.get("name")) == (store_id, name)
