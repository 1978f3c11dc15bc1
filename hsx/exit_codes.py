"""The exit codes of every command: one table, which scripts and units may rely on. Also in docs/exit-codes.md."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hsx.errors import HsxError


class ExitCode(IntEnum):
    """What the process ends with."""

    DONE = 0
    INTERNAL = 1
    REFUSED = 2
    INCOMPLETE = 3
    RUN_ERROR = 4
    DAMAGED = 5
    LOCKED = 6
    INTERRUPTED = 75


MEANINGS: Final[dict[ExitCode, str]] = {
    ExitCode.DONE: "done: every accepted sample is committed, or quarantined within what `pipeline.allow_quarantined` allows",
    ExitCode.INTERNAL: "a fault of hsx itself; the traceback is printed",
    ExitCode.REFUSED: "refused before anything was done: wrong usage, job file, dataset, model or changed job",
    ExitCode.INCOMPLETE: "the job ended with more samples quarantined than allowed, or with samples left over",
    ExitCode.RUN_ERROR: "the job could not go on: restart budget spent, server, roots, staging or ledger failed",
    ExitCode.DAMAGED: "verification found shards that are missing, torn or wrong",
    ExitCode.LOCKED: "another hsx holds the job",
    ExitCode.INTERRUPTED: "stopped by a signal before the job was complete; the same command continues it",
}

_BY_KIND: Final[dict[str, ExitCode]] = {
    "config_unreadable": ExitCode.REFUSED,
    "config_invalid": ExitCode.REFUSED,
    "config_conflict": ExitCode.REFUSED,
    "usage": ExitCode.REFUSED,
    "job_changed": ExitCode.REFUSED,
    "not_run_yet": ExitCode.REFUSED,
    "dataset_unreadable": ExitCode.REFUSED,
    "dataset_rejected": ExitCode.REFUSED,
    "dataset_empty": ExitCode.REFUSED,
    "dataset_ambiguous": ExitCode.REFUSED,
    "mask_empty": ExitCode.REFUSED,
    "chat_unavailable": ExitCode.REFUSED,
    "model_unreadable": ExitCode.REFUSED,
    "dependency_missing": ExitCode.REFUSED,
    "serve_refused": ExitCode.REFUSED,
    "sample_unknown": ExitCode.REFUSED,
    "store_sealed": ExitCode.REFUSED,
    "export_refused": ExitCode.REFUSED,
    "import_refused": ExitCode.REFUSED,
    "import_incomplete": ExitCode.INCOMPLETE,
    "incomplete": ExitCode.INCOMPLETE,
    "store_damaged": ExitCode.DAMAGED,
    "job_locked": ExitCode.LOCKED,
    "interrupted": ExitCode.INTERRUPTED,
}


def of_error(error: HsxError) -> ExitCode:
    """The exit code of a command that ended with `error`; kinds not refused up front are run errors."""
    return _BY_KIND.get(error.kind, ExitCode.RUN_ERROR)
