"""Finds the files of a folder, a name at a time, however many there are."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterator


def files_below(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    """Files anywhere below a folder whose names end so, in no particular order; nothing is held but the names of folders.

    Links are followed, also to folders, but a folder that is reached by several ways is looked into once: by its own way if it
    has one below `folder`, otherwise by the link whose path comes first. A link that leads nowhere is a file that cannot be
    read.

    Raises RunError `import_refused` where a folder cannot be looked into: its samples would be missing without a word.
    """
    seen: set[tuple[int, int]] = set()
    real, linked = deque([folder]), deque[Path]()
    while real or linked:
        if not real:
            linked = deque(sorted(linked))
            real.append(linked.popleft())
        here = real.popleft()
        try:
            about = here.stat()
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(here) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        real.append(Path(entry.path))
                    elif entry.is_symlink() and entry.is_dir():
                        linked.append(Path(entry.path))
                    elif entry.name.endswith(endings):
                        yield Path(entry.path)
        except OSError as error:
            raise RunError("import_refused", f"{here} cannot be looked into: {error.strerror}") from error
