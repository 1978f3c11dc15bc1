"""Roots: the disks that take shards. `hsx.stores.attach` makes folders on them roots of a store."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.layout import shard_key
from hsx.errors import RunError
from hsx.stores.durable import FULL, root_error, sync_file_system, sync_folder
from hsx.stores.reduced import decode
from hsx.stores.shard import PARTIAL, ShardWriter
from hsx.stores.shard_reader import ShardFile
from hsx.stores.view import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from hsx.records import Payload, Receipt
    from hsx.stores.group import StoreInfo

_NO_LINK: Final = frozenset({errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, *FULL})
"""What a disk answers that works, and takes no further hard link to a file."""
MOVING: Final = f".moving{PARTIAL}"
"""How the name of a copy ends that `hsx move` is making: `<shard key>.<marker>.moving.partial`."""


class ShardRoot:
    """One root of one store; implements the port `Root`. Made by `hsx.stores.attach.attach_roots`.

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
