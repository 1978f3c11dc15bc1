"""The dump directory of the current epoch: who waits for which dump, and which dumps are there.

inotify wakes waiters within a fraction of a millisecond, but its queue can overflow and it says nothing of files that were
there before; so the folder is also rescanned each second. The file's existence is the truth, an event only a hint. So it
is with the folder itself: a server goes on writing by name, so one that was deleted or replaced is no longer the epoch's.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from asyncinotify import Inotify, Mask, Watch

from hsx.core.dump import ERROR_SUFFIX, PART_SUFFIX, SUFFIX
from hsx.core.epoch import (
    LOCK_NAME,
    NORM_NAME,
    RECORD_NAME,
    REFUSAL_NAME,
    REPORT_NAME,
    STATE_NAME,
    CaptureReport,
    CaptureState,
    record_from_json,
    report_from_json,
    report_name,
    state_from_json,
    state_name,
)
from hsx.core.marker import ANY_PREFIX, prefix
from hsx.dumps.reader import MappedDump, read_header
from hsx.errors import EngineError, RunError, SampleError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hsx.core.dump import DumpHeader
    from hsx.core.epoch import EpochRecord
    from hsx.core.marker import Marker

RESCAN_S = 1.0
_ERROR_TEXT = 2000
_PUBLISHED = {RECORD_NAME, REPORT_NAME, REFUSAL_NAME, NORM_NAME, STATE_NAME}
_RECORDS = {LOCK_NAME, *_PUBLISHED, *(name + PART_SUFFIX for name in _PUBLISHED)}
"""What a server leaves beside dumps; it may have been killed between a record's write and its rename."""
_OF_RANK = re.compile(r"\.[1-9][0-9]*(?=\.(json|f32|lock|error)(\.part)?$)")
"""What a DP rank's records have in their names besides."""
_STATE = re.compile(re.escape(STATE_NAME).replace(r"\.json", r"(?:\.([1-9][0-9]*))?\.json"))


class DumpDirectory:
    """Watches `<dump_dir>/<epoch>`, one epoch at a time. Implements `hsx.ports.Dumps`.

    Args:
        dump_dir: the folder that holds one folder per epoch.
        is_alive: whether the server of a record still runs.

    Raises:
        RunError: `staging_failed` where nothing can be watched.
    """

    def __init__(self, dump_dir: Path, is_alive: Callable[[EpochRecord], bool]) -> None:
        self._dump_dir = dump_dir
        self._is_alive = is_alive
        self._folder: Path | None = None
        self._identity = -1
        """Descriptor of the folder that was entered: while it is open, no other folder can be taken for it."""
        self._waiting: dict[str, asyncio.Event] = {}
        try:
            self._inotify = Inotify()
        except OSError as error:
            message = f"{dump_dir} cannot be watched: {error.strerror} (see fs.inotify.max_user_instances)"
            raise RunError("staging_failed", message) from error
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
        identity = -1
        try:
            identity = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            watched = self._inotify.add_watch(folder, Mask.MOVED_TO | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.ONLYDIR)
        except OSError as error:
            _close(identity)
            raise RunError("staging_failed", f"dump folder {folder} cannot be watched: {error.strerror}") from error
        if self._watched is not None and self._watched.wd != watched.wd and self._watched in self._inotify.watches:
            # The watch of a deleted folder is gone already, also where its last event has not been read yet.
            with suppress(OSError):
                self._inotify.rm_watch(self._watched)
        _close(self._identity)
        self._folder, self._watched, self._identity = folder, watched, identity

    def intact(self) -> bool:
        """Whether the folder that `enter` found still stands under its name, the same one, with its epoch record."""
        try:
            mine = os.fstat(self._identity)
            return os.path.samestat(mine, self.folder.stat()) and (self.folder / RECORD_NAME).is_file()
        except OSError:
            return False

    def close(self) -> None:
        """Stops watching for good. Idempotent."""
        self._inotify.close()
        _close(self._identity)
        self._identity = -1

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
                if event.mask & (Mask.Q_OVERFLOW | Mask.DELETE_SELF | Mask.MOVE_SELF | Mask.IGNORED):
                    next_scan = loop.time()
            except TimeoutError:
                for name in self._waiting:
                    self._waiting[name].set()
                next_scan = loop.time() + RESCAN_S

    def _wake(self, file_name: str) -> None:
        for suffix in (SUFFIX, ERROR_SUFFIX):
            if file_name.endswith(suffix) and (event := self._waiting.get(file_name.removesuffix(suffix))):
                event.set()

    def report(self, rank: int = 0) -> CaptureReport | None:
        """The capture plugin's report in a DP rank; None until it is published.

        Raises EngineError `capture_off` with the plugin's own reason where it cannot capture (or may not any more: a refusal
        counts even beside a report), `epoch_unknown` for a broken file.
        """
        reason = self.refusal()
        if reason is not None:
            raise EngineError("capture_off", f"the capture plugin cannot capture: {reason}")
        text = self._record(report_name(rank))
        return None if text is None else report_from_json(text)

    def refusal(self) -> str | None:
        """The capture side's reason why there is no capture in this epoch, or may not be any more; None where it runs."""
        text = self._record(REFUSAL_NAME)
        return None if text is None else text.strip()[:_ERROR_TEXT]

    def states(self) -> dict[int, CaptureState]:
        """What the capture side counted so far, by DP rank; without those that have not begun to count.

        The files lag behind the dumps by a forward, and are never ahead of them.

        Raises EngineError `epoch_unknown` for a broken file, or one of another epoch or rank.
        """
        found: dict[int, CaptureState] = {}
        try:
            names = os.listdir(self.folder)  # noqa: PTH208 - as in `names`
        except (FileNotFoundError, NotADirectoryError):
            return found
        for rank in sorted(int(match[1] or 0) for name in names if (match := _STATE.fullmatch(name))):
            text = self._record(state_name(rank))
            if text is None:
                continue
            state = state_from_json(text)
            if (state.epoch, state.rank) != (self.folder.name, rank):
                evidence = f"is of epoch {state.epoch}, rank {state.rank}; expected {self.folder.name}, rank {rank}"
                raise EngineError("epoch_unknown", f"{state_name(rank)} {evidence}")
            found[rank] = state
        return found

    def _record(self, name: str) -> str | None:
        """The text of a record in the epoch's folder; None where there is none."""
        try:
            return (self.folder / name).read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise EngineError("epoch_unknown", f"{self.folder / name} cannot be read: {error.strerror}") from error

    async def arrival(self, marker: Marker) -> None:
        """Returns once the dump of `marker` is there. Waits for ever: the caller sets the deadline. One waiter per marker.

        Raises, when an error file appears instead, or the folder is not the one entered any more:
            EngineError: `staging_full` where the operating system refused the write (no space, I/O error); `staging_gone`.
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
        self._check_intact()
        if self._path(marker, SUFFIX).exists():
            return True
        try:
            note = self._path(marker, ERROR_SUFFIX).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return False
        if not note:
            raise EngineError("staging_full", f"{marker}: the dump could not be written to {self.folder}, nor could the reason")
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
        """Maps the dump named `marker`.

        Raises:
            SampleError: `dump_invalid`, also where the file is not there (any more).
            EngineError: `staging_gone` where the whole folder is not.
            RunError: `staging_failed` where this user may not read it.
        """
        path = self._path(marker, SUFFIX)
        try:
            return MappedDump(path)
        except PermissionError as error:
            message = f"dump {path} may not be read: {error.strerror}; run hsx and the server as one user"
            raise RunError("staging_failed", message) from error
        except OSError as error:
            self._check_intact()
            raise SampleError("dump_invalid", f"{marker}: dump cannot be read: {error.strerror}") from error

    def peek(self, marker: Marker) -> DumpHeader | None:
        """The header of the dump named `marker`, read without mapping it; None where there is none or it cannot be read."""
        try:
            return read_header(self._path(marker, SUFFIX))
        except (OSError, SampleError):
            return None

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

    def free(self) -> int:
        """Free bytes of the dump directory's file system. Blocks briefly. Raises RunError `staging_failed`."""
        try:
            stat = os.statvfs(self._dump_dir)
        except OSError as error:
            raise RunError("staging_failed", f"{self._dump_dir} cannot be looked at: {error.strerror}") from error
        return stat.f_bavail * stat.f_frsize

    def sizes(self) -> dict[str, int]:
        """Bytes that each dump takes on the file system, partial ones included, by name without suffix; none before `enter`."""
        if self._folder is None:
            return {}
        found: dict[str, int] = {}
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for entry in entries:
                name = entry.name.removesuffix(SUFFIX).removesuffix(PART_SUFFIX)
                if name != entry.name:
                    with suppress(FileNotFoundError):
                        found[name] = found.get(name, 0) + entry.stat().st_blocks * 512
        return found

    def sweep_other_epochs(self, keep: str, run: str) -> int:
        """Frees the space that other epochs take on the tmpfs: returns how many files went. Blocks.

        Only folders with an epoch record are looked at. If its server is dead, everything a capture side wrote there is void
        for everybody, and goes, the folder with it if nothing else is in it. If it lives, only this run's dumps go. The
        dump directory's lock makes sure that no other hsx is reading them.
        """
        swept = 0
        for folder in self._dump_dir.iterdir():
            record_file = folder / RECORD_NAME
            if folder.name == keep or not record_file.is_file():
                continue
            try:
                alive = self._is_alive(record_from_json(record_file.read_text(encoding="utf-8", errors="replace")))
                ours = prefix(run) if alive else ANY_PREFIX
                for file in folder.iterdir():
                    if file.name.startswith(ours):
                        file.unlink(missing_ok=True)
                        swept += 1
                if not alive and {_OF_RANK.sub("", file.name) for file in folder.iterdir()} <= _RECORDS:
                    shutil.rmtree(folder)
            except (OSError, EngineError):
                continue  # a folder that cannot be read is not ours to clear
        return swept

    def _check_intact(self) -> None:
        if not self.intact():
            message = f"dump folder {self.folder} was deleted or replaced; expected the one that this epoch began with"
            raise EngineError("staging_gone", message)

    def _path(self, marker: Marker, suffix: str) -> Path:
        return self.folder / f"{marker}{suffix}"


def _close(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)
