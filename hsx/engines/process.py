"""Which process is which: pids are reused, so a process is named by boot id, pid and start time. Standard library only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from hsx.core.epoch import RECORD_NAME, RECORD_VARIABLE, record_from_json
from hsx.errors import EngineError

if TYPE_CHECKING:
    from hsx.core.epoch import EpochRecord

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# Positions in a stat line once pid and name are cut off.
_STATE: Final = 0
_PARENT: Final = 1
_START: Final = 19
_SHOWN: Final = 100


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


def pids() -> list[int]:
    """All processes, zombies included."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, zombies included. One pass over /proc: what forks meanwhile may be missed."""
    parents = {}
    for number in pids():
        fields = _stat(number)
        if fields is not None:
            parents[number] = int(fields[_PARENT])
    found: list[int] = []
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh}
        found += fresh
    return found


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with; empty where it is gone, unreadable, or was overwritten by a title."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_of(pid: int) -> str:
    """The command line of a process, or its name, in 100 characters; for messages."""
    try:
        line = " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split())
        return (line or Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())[:_SHOWN]
    except OSError:
        return "a process that may not be looked at"


def carrying(variable: str) -> dict[int, str]:
    """Pid to value of the processes that were started with `variable`, as far as this user may see; no zombies."""
    found = {}
    for pid in pids():
        value = environment(pid).get(variable)
        if value is not None:
            found[pid] = value
    return found


def process_alive(record: EpochRecord) -> bool:
    """Whether the very process of the record runs: same boot, same pid, same start."""
    return record.boot_id == boot_id() and start_ticks(record.pid) == record.start_ticks


def mismatch(record: EpochRecord) -> str:
    """Why the process under the record's pid is not the record's server, with what was expected and found; "" where it is.

    Boot id, pid and start time name one process on one host. The variables it was started with are compared as well, where
    they can be read: they tell a process of another pid namespace that happens to agree in the three. Command line and
    executable are not: servers rename themselves, and a file may be replaced under a running program.
    """
    pid, host = record.pid, boot_id()
    if record.boot_id != host:
        return f"the host was started anew: expected boot id {record.boot_id}, found {host}"
    ticks = start_ticks(pid)
    if ticks is None:
        return f"expected process {pid}, found none"
    if ticks != record.start_ticks:
        return (
            f"pid {pid} went to another process: expected one started at tick {record.start_ticks},"
            f" found {command_of(pid)!r} started at tick {ticks}"
        )
    started_with = environment(pid)
    invocation = started_with.get("INVOCATION_ID", record.invocation_id)
    if record.invocation_id and invocation != record.invocation_id:
        return f"process {pid} is of another unit: expected invocation id {record.invocation_id}, found {invocation}"
    epoch = Path(started_with.get(RECORD_VARIABLE, f"{record.epoch}/{RECORD_NAME}")).parent.name
    if epoch != record.epoch:
        return f"process {pid} serves another epoch: expected {record.epoch}, found {epoch}"
    return ""


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
