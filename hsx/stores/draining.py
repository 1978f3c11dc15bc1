"""The mark of a root that is being drained: while it is there, the root takes no new shard.

A small file beside the root's identity, so that a running job sees it, and it outlives `hsx move` however that ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hsx.stores.durable import root_error, sync_folder, write_file

if TYPE_CHECKING:
    from pathlib import Path

DRAINING: Final = "hsx-draining"


def is_draining(folder: Path) -> bool:
    """Whether the root whose shards lie in `folder` is being drained, or was."""
    return (folder / DRAINING).exists()


def begin_draining(folder: Path, root: str) -> None:
    """Marks a root, durably. Idempotent. Raises RunError `root_unusable` or `roots_full`."""
    if is_draining(folder):
        return
    try:
        write_file(folder / DRAINING, b"hsx move empties this root: it takes no new shard. hsx move --cancel ends that.\n")
    except OSError as error:
        raise root_error(error, root, folder / DRAINING) from error


def end_draining(folder: Path, root: str) -> bool:
    """Takes the mark away, durably; False where there was none. Raises RunError `root_unusable`."""
    try:
        (folder / DRAINING).unlink()
        sync_folder(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise root_error(error, root, folder / DRAINING) from error
    return True
