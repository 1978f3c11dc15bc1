"""Which process is which: pids are reused, so a process is named by boot id, pid and start time. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import record_from_json
from hsx.errors import EngineError

if TYPE_CHECKING:
    from hsx.core.epoch import EpochRecord

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# Positions in a stat line once pid and name are cut off.
_STATE: Final = 0
_PARENT: Final = 1
_START: Final = 19


def boot_id() -> str:
    """The host's boot id, without the newline."""
    return _BOOT_ID.read_text().strip()


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` from the third (state) on; the second, the name, may hold anything and is skipped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text[text.rindex(")") + 2 :].split()


def start_ticks(pid: int) -> int | None:
    """Clock ticks from boot to the start of `pid` (field 22 of its stat); None where it is gone, or only a zombie is left."""
    fields = _stat(pid)
    if fields is None or fields[_STATE] in "ZX":
        return None
    return int(fields[_START])


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, zombies included. One pass over /proc: what forks meanwhile may be missed."""
    parents = {}
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdecimal() else None
        if fields is not None:
            parents[int(entry.name)] = int(fields[_PARENT])
    found: list[int] = []
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found += fresh
    return found


def carrying(variable: str) -> list[int]:
    """Processes whose environment at their start had `variable` ("NAME=value"), as far as this user may see; no zombies."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                environ = (entry / "environ").read_bytes()
            except OSError:
                continue
            if variable.encode() in environ.split(b"\0"):
                found.append(int(entry.name))
    return found


def process_alive(record: EpochRecord) -> bool:
    """Whether the very process of the record runs: same boot, same pid, same start."""
    return record.boot_id == boot_id() and start_ticks(record.pid) == record.start_ticks


def read_record(path: Path) -> EpochRecord | None:
    """The epoch record in a file; None where there is no such file.

    Raises EngineError `epoch_unknown`, naming the file, where it cannot be read, is not UTF-8 text or is no record.
    """
    try:
        return record_from_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise EngineError("epoch_unknown", f"{path}: {error}") from error
    except EngineError as error:
        raise EngineError("epoch_unknown", f"{path}: {error.message}") from error
