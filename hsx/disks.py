"""What lies under a path: device, file system, room. Paths need not exist yet; then their nearest existing folder counts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MEMORY_KINDS: Final = frozenset({"tmpfs", "ramfs"})
NETWORK_KINDS: Final = frozenset(
    {"9p", "afs", "beegfs", "ceph", "cifs", "fuse.sshfs", "fuse.glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3", "smbfs"}
)
_ESCAPE: Final = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted file system.

    Attributes:
        point: where it is mounted.
        kind: its type, such as `ext4`.
        read_only: it, or this mount of it, takes no writes.
    """

    point: Path
    kind: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class Place:
    """What lies under one path.

    Attributes:
        existing: the path itself, or its nearest ancestor that exists.
        device: st_dev of `existing`.
        kind: file system type, "" where unknown.
        total: size of the file system in bytes.
        free: bytes free for an unprivileged user.
        obstacle: why a folder cannot be made or written there; "" when it can.
    """

    existing: Path
    device: int
    kind: str
    total: int
    free: int
    obstacle: str


def parse_mounts(text: str) -> list[Mount]:
    """The mounts that `/proc/self/mountinfo` lists, in its order; lines of an unknown form are skipped."""
    mounts = []
    for line in text.splitlines():
        left, separator, right = line.partition(" - ")
        head, tail = left.split(" "), right.split(" ")
        if separator and len(head) >= 6 and len(tail) >= 3:
            point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), head[4])
            options = {*head[5].split(","), *tail[2].split(",")}
            mounts.append(Mount(Path(point), tail[0], "ro" in options))
    return mounts


class Disks:
    """The mounted file systems.

    Args:
        mountinfo: text in the form of `/proc/self/mountinfo`; default: that file, as it is now.
    """

    def __init__(self, mountinfo: str | None = None) -> None:
        if mountinfo is None:
            try:
                mountinfo = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
            except OSError:
                mountinfo = ""
        self._mounts = parse_mounts(mountinfo)

    def mount_of(self, path: Path) -> Mount | None:
        """The mount that `path` (free of links) lies on; the last one wins where several are stacked on one point."""
        found = None
        for mount in self._mounts:
            if path.is_relative_to(mount.point) and (found is None or len(mount.point.parts) >= len(found.point.parts)):
                found = mount
        return found

    def place(self, path: Path) -> Place:
        """What lies under `path`. Raises OSError where even its ancestors cannot be looked at."""
        existing = path
        # lexists would take a dangling link for a place that can be written.
        while not existing.exists():
            existing = existing.parent
        space = os.statvfs(existing)
        mount = self.mount_of(existing.resolve())
        return Place(
            existing=existing,
            device=existing.stat().st_dev,
            kind=mount.kind if mount else "",
            total=space.f_blocks * space.f_frsize,
            free=space.f_bavail * space.f_frsize,
            obstacle=_obstacle(existing, mount),
        )


def _obstacle(existing: Path, mount: Mount | None) -> str:
    if not existing.is_dir():
        return f"{existing} is not a folder"
    if mount is not None and mount.read_only:
        return f"{existing} is on a read-only file system"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} cannot be written by this user"
    return ""
