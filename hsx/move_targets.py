"""The roots that a move fills: how much room they have, and which of them have failed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hsx.core.amounts import in_words
from hsx.core.placement import RootSpace, Shares
from hsx.errors import RunError
from hsx.stores.durable import root_error, sync_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Targets:
    """Deals shards out to the targets of a move. For one thread.

    Args:
        source: the root that is drained, for messages.
        folders: by name, the store's folder on each target.
        reserves: bytes that stay free, by name; 0 for those not named.
    """

    def __init__(self, source: str, folders: Mapping[str, Path], reserves: Mapping[str, int]) -> None:
        self._source = source
        self._folders = dict(folders)
        self._reserves = reserves
        self._shares = Shares()
        self._free: dict[str, int] = {}
        self._booked: dict[str, int] = {}
        self._lost: dict[str, RunError] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, those that failed included."""
        return tuple(self._folders)

    @property
    def lost(self) -> int:
        """How many have failed."""
        return len(self._lost)

    def failed(self, name: str, error: RunError) -> None:
        """A target answered with an error: it takes no more in this move."""
        self._lost.setdefault(name, error)

    def look(self) -> None:
        """Looks at the disks anew, before a batch: what was placed until now is on them, or was given up."""
        self._free = {name: self._look(name) for name in self._folders if name not in self._lost}
        self._booked = dict.fromkeys(self._free, 0)

    def place(self, nbytes: int) -> str | None:
        """The target that takes the next shard; None where none has room for it."""
        chosen = self._shares.choose(self._spaces(), nbytes)
        if chosen is not None:
            self._booked[chosen] += nbytes
        return chosen

    def book(self, name: str, nbytes: int) -> bool:
        """Whether a certain target takes another shard; False where it has no room for it, or has failed."""
        fits = any(space.name == name and space.usable and space.room >= nbytes for space in self._spaces())
        if fits:
            self._booked[name] += nbytes
        return fits

    def no_room(self, nbytes: int) -> RunError:
        """Why no target takes a shard: `roots_full` where one would with more room, else `root_unusable`."""
        rooms = "; ".join(f"{space.name}: {in_words(max(space.room, 0))} of room" for space in self._spaces() if space.usable)
        reasons = "".join(f"\n  {name}: {error.message}" for name, error in self._lost.items())
        full = rooms or any(error.kind == "roots_full" for error in self._lost.values())
        return RunError(
            "roots_full" if full else "root_unusable",
            f"no root can take a shard of {in_words(nbytes)} from root {self._source} ({rooms or 'none is left'}){reasons}",
        )

    def sync(self, name: str) -> None:
        """Makes the names on a target durable. Raises RunError `root_unusable`."""
        try:
            sync_folder(self._folders[name])
        except OSError as error:
            raise RunError("root_unusable", root_error(error, name, self._folders[name]).message) from error

    def _look(self, name: str) -> int:
        try:
            stat = os.statvfs(self._folders[name])
        except OSError as error:
            self._lost[name] = root_error(error, name, self._folders[name])
            return 0
        return stat.f_bavail * stat.f_frsize

    def _spaces(self) -> list[RootSpace]:
        return [
            RootSpace(name, free, self._reserves.get(name, 0), self._booked[name], usable=name not in self._lost)
            for name, free in self._free.items()
        ]
