"""The dump directory of the current epoch: who waits for which dump, and which dumps are there.

inotify wakes waiters within a fraction of a millisecond, but its queue can overflow and it says nothing of files that were
there before; so the folder is also rescanned each second. The file's existence is the truth, an event only a hint.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING

from asyncinotify import Inotify, Mask, Watch

from hsx.core.dump import ERROR_SUFFIX, PART_SUFFIX, SUFFIX
from hsx.core.epoch import REPORT_NAME, CaptureReport, report_from_json
from hsx.dumps.reader import MappedDump
from hsx.errors import EngineError, RunError, SampleError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.marker import Marker

RESCAN_S = 1.0
_ERROR_TEXT = 2000


class DumpDirectory:
    """Watches `<dump_dir>/<epoch>`, one epoch at a time. Implements `hsx.ports.Dumps`.

    Args:
        dump_dir: the folder that holds one folder per epoch.
    """

    def __init__(self, dump_dir: Path) -> None:
        self._dump_dir = dump_dir
        self._folder: Path | None = None
        self._waiting: dict[str, asyncio.Event] = {}
        self._inotify = Inotify()
        self._watched: Watch | None = None

    @property
    def folder(self) -> Path:
        """The current epoch's folder. Raises RunError `staging_failed` before `enter`."""
        if self._folder is None:
            raise RunError("staging_failed", f"no epoch has been entered in {self._dump_dir}")
        return self._folder

    def enter(self, epoch: str) -> None:
        """Turns to the folder of `epoch`. Raises RunError `staging_failed` where it cannot be watched."""
        folder = self._dump_dir / epoch
        try:
            watched = self._inotify.add_watch(folder, Mask.MOVED_TO | Mask.ONLYDIR)
        except OSError as error:
            raise RunError("staging_failed", f"dump folder {folder} cannot be watched: {error.strerror}") from error
        if self._watched is not None and self._watched.wd != watched.wd and self._watched in self._inotify.watches:
            self._inotify.rm_watch(self._watched)
        self._folder, self._watched = folder, watched

    def close(self) -> None:
        """Stops watching for good. Idempotent."""
        self._inotify.close()

    async def watch(self) -> None:
        """Wakes waiters until cancelled; runs beside the pipeline and survives changes of epoch."""
        loop = asyncio.get_running_loop()
        next_scan = loop.time() + RESCAN_S
        while True:
            try:
                async with asyncio.timeout_at(next_scan):
                    event = await self._inotify.get()
                if event.mask & Mask.MOVED_TO and event.name is not None:
                    self._wake(str(event.name))
                if event.mask & Mask.Q_OVERFLOW:
                    next_scan = loop.time()
            except TimeoutError:
                for name in self._waiting:
                    self._waiting[name].set()
                next_scan = loop.time() + RESCAN_S

    def _wake(self, file_name: str) -> None:
        for suffix in (SUFFIX, ERROR_SUFFIX):
            if file_name.endswith(suffix) and (event := self._waiting.get(file_name.removesuffix(suffix))):
                event.set()

    def report(self) -> CaptureReport | None:
        """The capture plugin's report; None until it is published. Raises EngineError `epoch_unknown` for a broken one."""
        try:
            text = (self.folder / REPORT_NAME).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        return report_from_json(text)

    async def arrival(self, marker: Marker) -> None:
        """Returns once the dump of `marker` is there. Waits for ever: the caller sets the deadline. One waiter per marker.

        Raises, when an error file appears instead:
            EngineError: `staging_full` where the operating system refused the write (no space, I/O error).
            SampleError: `dump_failed` where the capture side gave this dump up.
        """
        name = str(marker)
        event = self._waiting[name] = asyncio.Event()
        try:
            while not self._is_there(marker):
                event.clear()
                await event.wait()
        finally:
            del self._waiting[name]

    def _is_there(self, marker: Marker) -> bool:
        if self._path(marker, SUFFIX).exists():
            return True
        try:
            note = self._path(marker, ERROR_SUFFIX).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return False
        try:
            reason, errno = str(json.loads(note)["reason"]), int(json.loads(note)["errno"])
        except (ValueError, KeyError, TypeError):
            reason, errno = note, 0
        reason = reason.strip()[:_ERROR_TEXT]
        if errno:
            # The operating system refused: that speaks of the dump directory, not of the sample.
            raise EngineError("staging_full", f"{marker}: the dump could not be written to {self.folder}: {reason}")
        raise SampleError("dump_failed", f"{marker}: the capture side gave the dump up: {reason}")

    def open(self, marker: Marker) -> MappedDump:
        """Maps the dump named `marker`. Raises SampleError `dump_invalid`, or FileNotFoundError."""
        return MappedDump(self._path(marker, SUFFIX))

    def remove(self, marker: Marker) -> None:
        """Unlinks the dump and the error file of `marker`; missing ones are fine.

        The partial file is the capture side's own: it may be writing it now.
        """
        for suffix in (SUFFIX, ERROR_SUFFIX):
            self._path(marker, suffix).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """Names, without suffix, of all published dumps and error files in the current epoch's folder; none before `enter`."""
        if self._folder is None:
            return []
        try:
            files = os.listdir(self.folder)  # noqa: PTH208 - names alone are wanted, a thousand times a minute
        except FileNotFoundError:
            return []
        found = set()
        for file in files:
            for suffix in (SUFFIX, ERROR_SUFFIX):
                if file.endswith(suffix) and not file.endswith(PART_SUFFIX):
                    found.add(file.removesuffix(suffix))
        return sorted(found)

    def sweep_other_epochs(self, keep: str, run: str) -> int:
        """Removes dumps, partial and error files of `run` from the folders of epochs other than `keep`.

        Only files that carry this run's marker are touched. Returns how many went.
        """
        swept = 0
        prefix = f"hsx1-{run}-"
        for folder in self._dump_dir.iterdir():
            if folder.name == keep or not (folder / "server.json").exists():
                continue
            for file in folder.iterdir():
                if file.name.startswith(prefix):
                    file.unlink(missing_ok=True)
                    swept += 1
        return swept

    def _path(self, marker: Marker, suffix: str) -> Path:
        return self.folder / f"{marker}{suffix}"
