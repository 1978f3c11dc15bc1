"""The mark of a root that is being drained: while it is there, the root takes no new shard.

An empty file beside the root's identity, so that a running job sees it, and it outlives `hsx move` however that ends.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from hsx.stores.durable import root_error, sync_folder

if TYPE_CHECKING:
    from pathlib import Path

DRAINING: Final = "hsx-draining"


def is_draining(folder: Path) -> bool:
    """Whether the root whose shards lie in `folder` is being drained, or was. Raises OSError where its disk does not say."""
    return (folder / DRAINING).exists()


def begin_draining(folder: Path, root: str) -> None:
    """Marks a root, durably. Idempotent. Raises RunError `root_unusable` or `roots_full`."""
    try:
        if is_draining(folder):
            return
        # Empty: a full disk has no block left for what it might say.
        os.close(os.open(folder / DRAINING, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644))
        sync_folder(folder)
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
