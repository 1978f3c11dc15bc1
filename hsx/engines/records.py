"""The epoch records of a dump directory: which servers it knows, which of them live, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx.core.epoch import RECORD_NAME
from hsx.engines.process import command_of, mismatch, read_record
from hsx.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from hsx.core.epoch import EpochRecord


@dataclass(frozen=True, slots=True)
class Records:
    """What one look into a dump directory found.

    Attributes:
        living: records whose very process runs.
        lost: record and sentence for each of the others; the sentence tells what was expected and found.
        unreadable: one sentence for each record or folder that cannot be read.
    """

    living: tuple[EpochRecord, ...]
    lost: tuple[tuple[EpochRecord, str], ...]
    unreadable: tuple[str, ...]


def look_up(dump_dir: Path) -> Records:
    """All records below `dump_dir`; none where there is no such folder. Blocks briefly."""
    living: list[EpochRecord] = []
    lost: list[tuple[EpochRecord, str]] = []
    unreadable: list[str] = []
    for folder in _folders(dump_dir, unreadable):
        try:
            record = read_record(folder / RECORD_NAME)
        except EngineError as error:
            unreadable.append(error.message)
            continue
        if record is not None:
            why = mismatch(record)
            if why:
                lost.append((record, why))
            else:
                living.append(record)
    return Records(tuple(living), tuple(lost), tuple(unreadable))


def bystander(record: EpochRecord, dump_dir: Path) -> str:
    """The sentence about a living server that is not the one in use."""
    return (
        f"another server still lives in {dump_dir}: epoch {record.epoch}, pid {record.pid}, port {record.port}"
        f" ({command_of(record.pid)}); it goes on taking memory: end it if nobody needs it"
    )


def _folders(dump_dir: Path, unreadable: list[str]) -> list[Path]:
    try:
        return sorted(dump_dir.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        unreadable.append(str(error))
        return []
