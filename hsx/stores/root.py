"""Roots: the disks that take shards.

`<root path>/<store_id>/` is an ordinary Zarr array holding the shards that lie on this root, with `hsx-root.json`, which says
whose it is. That file is what tells the right disk from the empty mount point of one that is not mounted.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores import metadata
from hsx.stores.draining import end_draining
from hsx.stores.durable import FULL, make_folder, root_error, sync_file_system, sync_folder, write_json
from hsx.stores.group import StoreInfo, array_attributes, forget_roots, record_roots
from hsx.stores.reduced import decode
from hsx.stores.shard import PARTIAL, ShardWriter
from hsx.stores.shard_reader import ShardFile
from hsx.stores.view import visible

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from hsx.records import Payload, Receipt

IDENTITY: Final = "hsx-root.json"
_NO_LINK: Final = frozenset({errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, *FULL})
"""What a disk answers that works, and takes no further hard link to a file."""
MOVING: Final = f".moving{PARTIAL}"
"""How the name of a copy ends that `hsx move` is making: `<shard key>.<marker>.moving.partial`."""


class ShardRoot:
    """One root of one store; implements the port `Root`. Made by `attach_roots`.

    Args:
        name: its name in config and ledger.
        folder: `<root path>/<store_id>`.
        info: the store.
        direct: use O_DIRECT where the file system has it.
        durable: sync each shard, and the folder when asked; without it `sync` does nothing.
    """

    def __init__(self, name: str, folder: Path, info: StoreInfo, *, direct: bool = True, durable: bool = True) -> None:
        self._name = name
        self._folder = folder
        self._info = info
        self._durable = durable
        # Open for the whole run: only so does a sync hear of every write in the background that has failed.
        self._flushed = -1 if durable else os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._writer = self._make_writer(direct=direct)

    def _make_writer(self, *, direct: bool) -> ShardWriter:
        info = self._info
        return ShardWriter(
            self._folder,
            self._name,
            info.layout,
            store=info.store_id,
            spec=info.spec,
            direct=direct,
            durable=self._durable,
        )

    @property
    def name(self) -> str:
        """Its name in config and ledger."""
        return self._name

    @property
    def folder(self) -> Path:
        """Where its shards lie."""
        return self._folder

    @property
    def direct(self) -> bool:
        """Whether its file system has taken O_DIRECT so far."""
        return self._writer.direct

    def free(self) -> int:
        """Free bytes for an unprivileged user on its file system. Raises RunError `root_unusable`."""
        try:
            stat = os.statvfs(self._folder)
        except OSError as error:
            raise root_error(error, self._name, self._folder) from error
        return stat.f_bavail * stat.f_frsize

    def write(self, payload: Payload) -> Receipt:
        """Writes the shard of a sample; see `hsx.stores.shard.ShardWriter.write`."""
        return self._writer.write(payload)

    def read(self, index: int, tokens: int, captured_as: int | None = None) -> NDArray[np.uint16]:
        """bf16 bits [rows, L, H] of sample `index`, checked, the shard's own record included; see the port.

        Raises RunError `store_invalid`.
        """
        with self._shard(index, tokens, captured_as) as shard:
            return decode(shard.read(), self._info.layout)

    def checksum(self, index: int, tokens: int, captured_as: int | None = None) -> int:
        """The crc32c of a shard's payload, read whole; see the port. Raises RunError `store_invalid`."""
        with self._shard(index, tokens, captured_as) as shard:
            return shard.read_all()[1]

    def _shard(self, index: int, tokens: int, captured_as: int | None) -> ShardFile:
        layout = self._info.layout
        owner = (self._info.store_id, index if captured_as is None else captured_as)
        return ShardFile(self._folder / shard_key(index), layout, None if layout.selects else tokens, owner=owner)

    def link(self, index: int, others: Sequence[int]) -> list[int]:
        """Gives the shard of sample `index` the names of other samples, too, as hard links; see the port.

        A name that cannot be linked, for want of links or of room, is left out, and is free then.
        """
        shard = self._folder / shard_key(index)
        linked = []
        for other in others:
            path = self._folder / shard_key(other)
            try:
                path.unlink(missing_ok=True)  # of an attempt that no ledger knows
                os.link(shard, path)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise RunError("root_unusable", root_error(error, self._name, path).message) from error
                continue
            linked.append(other)
        return linked

    def sync(self) -> None:
        """Makes the names written so far durable. Raises RunError `root_unusable`; not to be tried again."""
        if not self._durable:
            return
        try:
            sync_folder(self._folder)
        except OSError as error:
            raise RunError("root_unusable", root_error(error, self._name, self._folder).message) from error

    def flush(self) -> None:
        """Makes everything on its file system durable. Raises RunError `root_unusable`; not to be tried again."""
        fd = self._flushed
        try:
            if fd < 0:
                fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sync_file_system(fd)
            finally:
                if fd != self._flushed:
                    os.close(fd)
        except OSError as error:
            raise RunError("root_unusable", root_error(error, self._name, self._folder).message) from error

    def discard(self, index: int) -> None:
        """Removes the shard of sample `index`, if there is one here. Raises RunError `root_unusable`."""
        try:
            (self._folder / shard_key(index)).unlink(missing_ok=True)
        except OSError as error:
            raise root_error(error, self._name, self._folder) from error

    def sweep(self, *, moving: bool = True) -> int:
        """Removes the `.partial` files that a killed writer left; returns how many. Raises RunError `root_unusable`.

        Only for the start: it takes those of a running writer too. With `moving` also those of `hsx move`.
        """
        removed = 0
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(PARTIAL) and (moving or not entry.name.endswith(MOVING)):
                        Path(entry.path).unlink()
                        removed += 1
        except OSError as error:
            raise root_error(error, self._name, self._folder) from error
        return removed


def discard_strays(
    roots: Sequence[ShardRoot], committed: Iterable[tuple[int, str]], samples: int, revoked: Iterable[int] = ()
) -> int:
    """Removes shards whose sample is committed on another of these roots, or was revoked; returns how many.

    A writer killed between rename and commit leaves a shard that no ledger knows; when the sample is extracted again it may go
    to another root. Shards of other samples that are not committed are left: they are replaced, or discarded, once they are.
    A revoked one is known to be in doubt, and goes even if its sample never comes back. One whose sample is missing on the root
    where it is committed stays: it may be the only one there is, where a ledger of before a move was put back.

    Args:
        roots: the attached roots.
        committed: (index, root) of every committed sample.
        samples: how many samples the store has.
        revoked: samples that were revoked and are not committed again.

    Raises:
        RunError: `root_unusable`, `store_invalid`.
    """
    numbers = {root.name: number for number, root in enumerate(roots)}
    home = np.full(samples, -1, np.int16)
    for index, name in committed:
        home[index] = numbers.get(name, -1)
    doubtful = np.zeros(samples, np.bool_)
    doubtful[np.fromiter(revoked, np.int64)] = True
    removed = 0
    for number, root in enumerate(roots):
        here = visible(root.folder)
        here = here[here < samples]  # a file may bear any name
        for index in here[((home[here] >= 0) & (home[here] != number)) | doubtful[here]].tolist():
            if home[index] >= 0 and not (roots[home[index]].folder / shard_key(index)).exists():
                continue
            root.discard(index)
            removed += 1
    return removed


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
