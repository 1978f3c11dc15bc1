"""`hsx seal`: proves a finished store, lists its checksums, and makes it one that does not change."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural
from hsx.commands.reading_view import ReadingView
from hsx.commands.verify import describe
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.seal import SealReport, seal, unseal

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Seals, or takes the seal away. Raises RunError `store_damaged`, exit code 5, where something is damaged."""
    loaded = load(args.job)
    require_begun(loaded)
    if args.undo:
        report = unseal(loaded)
    else:
        report = seal(loaded, partial=args.partial, read=not args.no_verify, watch=ReadingView(sys.stderr))
    if args.json:
        damage = {} if report.damage is None else {"damage": report.damage.as_dict()}
        emit_json({**asdict(report), **damage})
    else:
        emit(_words(report))
    if report.damage is not None:
        raise RunError(
            "store_damaged",
            f"store {report.store} has {plural(report.damage.damaged, 'damage')} and is not sealed; expected none, "
            "see the report (hsx repair mends it)",
        )
    return ExitCode.DONE


def _words(report: SealReport) -> str:
    if report.damage is not None:
        return describe(report.damage)
    if not report.sealed:
        return f"store {report.store} is not sealed; hsx run, repair and move may change it"
    without = f", without {plural(report.left_out, 'sample')}" if report.left_out else ""
    how = "every shard was read and proved" if report.verified else "shards were looked for, not read"
    return f"store {report.store} is sealed since {report.at}: {plural(report.committed, 'sample')}{without}; {how}"
