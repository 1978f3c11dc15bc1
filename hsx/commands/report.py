"""`hsx report`: one page on what was stored, to look at before training."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Writes the page, at once under its name.

    Raises RunError: `dependency_missing` without matplotlib, `not_run_yet`, `report_unwritable`; as `gather` does.
    """
    if find_spec("matplotlib") is None:
        raise RunError(
            "dependency_missing",
            "hsx report draws with matplotlib, which is not installed; expected hsx with its extra `report`: "
            "pip install 'hsx[report]'",
        )
    loaded = load(args.job)
    require_begun(loaded)
    output = Path(args.output or f"{loaded.config.job.name}.report.html").absolute()
    _require_folder(output)  # before the store is read, which may take a minute

    from hsx.report.gather import gather
    from hsx.report.page import page
    from hsx.stores.durable import write_file

    written = page(gather(loaded, args.samples, args.seed)).encode()
    try:
        write_file(output, written)
    except OSError as error:
        raise RunError("report_unwritable", f"report {output} cannot be written: {error.strerror}") from error
    emit(f"report     {output}")
    return ExitCode.DONE


def _require_folder(output: Path) -> None:
    try:
        problem = _problem(output)
    except OSError as error:
        raise RunError("report_unwritable", f"report {output} cannot be written: {error.strerror}") from error
    if problem:
        raise RunError("report_unwritable", f"report {output} cannot be written: {problem}")


def _problem(output: Path) -> str:
    if not output.parent.is_dir():
        return f"expected {output.parent} to be a folder"
    if output.is_dir():
        return "it is a folder; expected a file or nothing there"
    # The page takes the place of what has its name, and must not take that of a device.
    if output.exists() and not output.is_file():
        return "it is a device or a pipe; expected a file or nothing there"
    return ""
