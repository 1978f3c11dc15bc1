"""`hsx import`: hidden states that others have extracted, as a store."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.output import Ticker, emit, emit_json, plural
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.importing import import_folder
from hsx.ingest.request import ImportReport, ImportRequest

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Imports. Raises RunError `import_incomplete` where samples were rejected: the others are in the store."""
    roots = {name: Path(path) for name, path in args.root} or {"imported": Path(f"{args.store}.root")}
    request = ImportRequest(
        kind=args.kind,
        folder=Path(args.folder),
        store=Path(args.store),
        roots=roots,
        layers=args.layers,
        final=args.final,
        threads=args.threads,
    )
    ticker = Ticker()
    report = import_folder(request, lambda now: ticker.say(lambda: _progress(now)))
    if args.json:
        emit_json({**asdict(report), "roots": roots})
    else:
        emit(describe(report))
    if report.rejected:
        rejected = sum(report.rejected.values())
        raise RunError(
            "import_incomplete",
            f"{plural(rejected, 'sample')} of {report.found} cannot be taken; expected none, see {report.listing}",
        )
    return ExitCode.DONE


def describe(report: ImportReport) -> str:
    """What came of it, for people."""
    lines = [
        f"{plural(report.committed, 'sample')} of {report.found} are in {report.store}, {report.tokens} tokens",
        f"  states: {', '.join(report.states)}",
        "  proved: one row for each token, finite, no row all zero, no state that repeats another; not whose states they are",
    ]
    if report.kept:
        lines.append(f"  {plural(report.kept, 'sample')} of them an earlier call had brought")
    lines += [f"  rejected: {plural(count, 'sample')} ({reason})" for reason, count in report.rejected.items()]
    return "\n".join(lines)


def _progress(report: ImportReport) -> str:
    rejected = sum(report.rejected.values())
    return f"samples {report.committed}/{report.found}, {rejected} rejected, {report.tokens} tokens"
