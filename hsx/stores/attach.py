"""Makes folders on disks the roots of a store, and tells a root from the mount point of one that is gone.

`<root path>/<store_id>/` is an ordinary Zarr array holding the shards that lie on this root, with `hsx-root.json`, which says
whose it is. That file is what tells the right disk from the empty mount point of one that is not mounted.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Final

from hsx.errors import RunError
from hsx.stores import metadata
from hsx.stores.draining import end_draining
from hsx.stores.durable import make_folder, root_error, write_json
from hsx.stores.group import StoreInfo, array_attributes, forget_roots, record_roots
from hsx.stores.root import ShardRoot

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

IDENTITY: Final = "hsx-root.json"
"""A root's file that says whose it is."""


def attach_roots(
    info: StoreInfo, roots: Mapping[str, Path], *, direct: bool = True, durable: bool = True, writer: str = "hsx"
) -> tuple[StoreInfo, list[ShardRoot]]:
    """Makes roots ready to take shards of a store, and records them in it.

    A root that the store knows must show the store's identity, wherever it is mounted now; a new one gets it. `roots` maps
    names to existing folders; for the rest see `ShardRoot`, and `storage.writer` of the job file.

    Returns:
        The store's info with these roots, and the roots in the order given.

    Raises:
        RunError: `root_unusable` where a root is missing, cannot be written, or is not the root it was; `store_unwritable`.
    """
    for name, path in roots.items():
        _attach(info, name, path.absolute())
    changed = record_roots(info, {name: path.absolute() for name, path in roots.items()})
    kind = ShardRoot
    if writer == "zarr":
        from hsx.stores.zarr_root import ZarrRoot  # zarr takes a while to import, and no other run needs it

        kind = ZarrRoot
    return changed, [kind(name, changed.folder(name), changed, direct=direct, durable=durable) for name in roots]


def flush_roots(info: StoreInfo) -> None:
    """Makes durable what a killed run with relaxed durability may have left in the kernel's memory, on each root that is there.

    For commands that read shards and then rely on them for good. Raises RunError `root_unusable`.
    """
    for name in info.roots:
        folder = info.folder(name)
        if folder.is_dir():
            ShardRoot(name, folder, info).flush()


def usable_roots(info: StoreInfo, roots: Mapping[str, Path]) -> tuple[dict[str, Path], dict[str, RunError]]:
    """For jobs that go on without a root (`storage.on_missing_root`): those that can be attached, and why the others cannot.

    Raises RunError `root_unusable` where none can.
    """
    usable: dict[str, Path] = {}
    missing: dict[str, RunError] = {}
    for name, path in roots.items():
        try:
            _attach(info, name, path.absolute())
            folder = path.absolute() / info.store_id
            if not os.access(folder, os.W_OK | os.X_OK):
                missing[name] = RunError("root_unusable", f"root {name}: {folder} cannot be written")
                continue
        except RunError as error:
            missing[name] = error
        else:
            usable[name] = path
    if not usable:
        raise RunError("root_unusable", "no root can be used:\n  " + "\n  ".join(error.message for error in missing.values()))
    return usable, missing


def _attach(info: StoreInfo, name: str, path: Path) -> None:
    folder = path / info.store_id
    try:
        if name not in info.roots:
            _lay_out(info, name, path)
        identify(info, name, folder)
    except OSError as error:
        raise root_error(error, name, folder) from error


def drop_empty_roots(info: StoreInfo, named: Collection[str], homes: Callable[[], Mapping[str, int]]) -> StoreInfo:
    """Lets a store forget roots that the job file does not name any more, once nothing lies there: `hsx move` has drained them.

    Args:
        info: the store.
        named: the roots of the job file.
        homes: counts the committed samples by root; called only where a root is to be forgotten.

    Returns:
        The store's info without these roots.

    Raises:
        RunError: `config_conflict` where committed samples lie on such a root; `store_unwritable`.
    """
    gone = [name for name in info.roots if name not in named]
    if not gone:
        return info
    samples_on = homes()
    held = {name: samples_on[name] for name in gone if samples_on.get(name)}
    if held:
        name, samples = next(iter(held.items()))
        raise RunError(
            "config_conflict",
            f"the job file does not name root {name}, and {samples} committed samples lie there "
            f"({info.roots[name]}); put it back, or move them first with hsx move JOB {name}",
        )
    return forget_roots(info, gone)


def _lay_out(info: StoreInfo, name: str, path: Path) -> None:
    """Lays out a new root.

    One that was laid out and not recorded, for a crash in between, is taken as it is; one that was drained and comes back takes
    shards again.
    """
    if not path.is_dir():
        raise RunError("root_unusable", f"root {name}: {path} is not a folder; mount its disk, or make the folder on that disk")
    folder = path / info.store_id
    if (folder / IDENTITY).exists():
        identify(info, name, folder)  # before anything is changed: it may be another root's, by a slip in the job file
        end_draining(folder, name)
        return
    make_folder(folder)
    write_json(folder / metadata.METADATA, metadata.hidden_states(info.layout, array_attributes(info)))
    write_json(folder / IDENTITY, {"format": 1, "store_id": info.store_id, "name": name})


def identify(info: StoreInfo, name: str, folder: Path) -> None:
    """Checks that a folder is that of a store on one of its roots: this tells a disk from the mount point of one that is gone.

    Args:
        info: the store.
        name: the root.
        folder: `<root path>/<store_id>`.

    Raises:
        RunError: `root_unusable` where it is not, or says nothing sound.
        OSError: the disk does not let it be looked at.
    """
    try:
        found = json.loads((folder / IDENTITY).read_bytes())
        identity = (found["store_id"], found["name"])
    except FileNotFoundError:
        raise RunError(
            "root_unusable",
            f"root {name}: {folder.parent} is not the root it was: no {IDENTITY} of store {info.store_id} in it",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise RunError("root_unusable", f"root {name}: {folder / IDENTITY} cannot be read: {error}") from error
    if identity != (info.store_id, name):
        raise RunError(
            "root_unusable",
            f"root {name}: {folder.parent} is not the root it was: it is root {identity[1]!r} of store {identity[0]}; "
            f"expected root {name!r} of store {info.store_id}",
        )
