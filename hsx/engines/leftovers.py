"""What a killed server leaves in /dev/shm: kept in mind while it lives, removed once it is provably nobody's.

Semaphores and shared memory have names, and who is killed unlinks none. So whoever watches the server (its reaper, or hsx where
the server has a unit of its own) keeps in `<dump_dir>/<epoch>/shm.json` which files of /dev/shm its processes hold. A file goes
only if all of this is true:

- the host was not started anew, and the server of the epoch record is dead;
- its name is of a kind that servers make, so that no file that people put there is ever looked at;
- it belongs to this user, is a plain file, and device, inode and ctime are those that were seen in the server's hands;
- it was made or changed after the server's record was written: what the server merely found there is not its own;
- no living process has it mapped or open, as far as this user may see.

Standard library only: the reaper uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import RECORD_NAME, SHM_NAME
from hsx.engines.process import boot_id, pids, process_alive, read_record
from hsx.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SHARED: Final = Path("/dev/shm")  # noqa: S108 - it is where the C library puts shared memory
KINDS: Final = ("sem.mp-", "psm_", "torch_", "nccl-", "cuda.shm.", "sgl_shm_", "sglang_", "multi_tokenizer_args_")
"""How the names begin: Python's semaphores and shared memory, torch, NCCL, CUDA, SGLang."""
_PART: Final = ".part"


@dataclass(frozen=True, slots=True, order=True)
class SharedFile:
    """One file in /dev/shm, as it was seen.

    Attributes:
        name: its name there.
        device: st_dev.
        inode: st_ino.
        ctime_ns: st_ctime_ns; mapped memory may be written without changing it.
    """

    name: str
    device: int
    inode: int
    ctime_ns: int


def remember(folder: Path, processes: Iterable[int]) -> None:
    """Adds what `processes` hold in /dev/shm to `shm.json` in an epoch's folder, and takes out what is not there any more.

    Never raises: where the folder is gone or full, the next look may succeed.
    """
    try:
        since = (folder / RECORD_NAME).stat().st_mtime_ns
        known = _read(folder)
        seen = {file.name: file for file in known if file == _look(file.name)}
        held = _held(processes)
        for path in SHARED.iterdir():
            file = _look(path.name)
            if file is not None and (file.device, file.inode) in held and file.ctime_ns >= since:
                seen[file.name] = file
        if set(seen.values()) != known:
            part = folder / f"{SHM_NAME}.{os.getpid()}{_PART}"
            part.write_text(json.dumps({"files": [asdict(file) for file in sorted(seen.values())]}), encoding="utf-8")
            part.rename(folder / SHM_NAME)
    except OSError:
        return


def sweep_epoch(folder: Path) -> int:
    """Removes what the dead server of one epoch left in /dev/shm; returns how many files went. Never raises.

    `shm.json` goes with the last of them, and stays while a living process holds one.
    """
    try:
        record = read_record(folder / RECORD_NAME)
        if record is None or process_alive(record):
            return 0
        for part in folder.glob(f"{SHM_NAME}.*{_PART}"):
            part.unlink(missing_ok=True)
        # After a start of the host every name there is somebody else's, whatever its inode.
        left = [file for file in _read(folder) if file == _look(file.name)] if record.boot_id == boot_id() else []
        held = _held(pids()) if left else set()
        swept = 0
        for file in left:
            if (file.device, file.inode) not in held:
                (SHARED / file.name).unlink(missing_ok=True)
                swept += 1
        if swept == len(left):
            (folder / SHM_NAME).unlink(missing_ok=True)
    except (OSError, EngineError):
        return 0
    return swept


def sweep_shared_memory(dump_dir: Path) -> int:
    """Removes what dead servers of a dump directory left in /dev/shm; returns how many files went. Blocks; never raises.

    The owners do it at each start. A folder whose list has to stay is kept by `Dumps.sweep_other_epochs`, as any that holds
    more than records.
    """
    try:
        return sum(sweep_epoch(folder) for folder in sorted({path.parent for path in dump_dir.glob(f"*/{SHM_NAME}*")}))
    except OSError:
        return 0


def _read(folder: Path) -> set[SharedFile]:
    try:
        document = json.loads((folder / SHM_NAME).read_text(encoding="utf-8"))
        return {SharedFile(**file) for file in document["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def _look(name: str) -> SharedFile | None:
    """The file under a name as it is now; None where it is not there, not plain, not of this user or not of a server's kind."""
    if not str(name).startswith(KINDS) or "/" in name:
        return None
    try:
        found = (SHARED / name).lstat()
    except OSError:
        return None
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return None
    return SharedFile(name, found.st_dev, found.st_ino, found.st_ctime_ns)


def _held(processes: Iterable[int]) -> set[tuple[int, int]]:
    """Device and inode of what the processes have mapped or open. Processes that this user may not look into are passed over.

    They belong to somebody else, or have shut themselves off, which no server does. Names would not do: the C library maps a
    semaphore before it gives it its name, so that its maker's mapping shows another one.
    """
    found = set[tuple[int, int]]()
    for pid in processes:
        found.update(_mapped(pid))
        found.update(_open(pid))
    return found


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError), Path(f"/proc/{pid}/maps").open(encoding="utf-8", errors="replace") as maps:
        for line in maps:
            # address, permissions, offset, device, inode, path
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[4] != "0":
                major, minor = fields[3].split(":")
                yield os.makedev(int(major, 16), int(minor, 16)), int(fields[4])


def _open(pid: int) -> Iterator[tuple[int, int]]:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                # By name first, whatever folder it shows in another mount namespace: to stat all would wait for dead disks.
                if entry.readlink().name.startswith(KINDS):
                    found = entry.stat()
                    yield found.st_dev, found.st_ino
