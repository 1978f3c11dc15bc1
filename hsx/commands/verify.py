"""`hsx verify`: re-reads and proves what is stored."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hsx.commands.output import emit, emit_json, table
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.verify import VerifyReport, verify

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def run(args: argparse.Namespace) -> int:
    """Prints the report; damage is exit code 5."""
    if (args.job is None) == (args.store is None):
        raise RunError("usage", "hsx verify takes either a job file or --store")
    if args.store is not None:
        report = verify(args.store, None, fraction=args.fraction, seed=args.seed, progress=_Progress())
    else:
        loaded = load(args.job)
        report = _with_ledger(args, loaded.store, loaded.state_dir / FILE_NAME)
    if args.json:
        emit_json(report.as_dict())
    else:
        emit(describe(report))
    return ExitCode.DONE if report.ok else ExitCode.DAMAGED


def _with_ledger(args: argparse.Namespace, store: Path, ledger: Path) -> VerifyReport:
    if not ledger.exists():
        raise RunError("ledger_failed", f"{ledger} does not exist; expected the job's ledger, or use --store to do without")
    with LedgerReader(ledger) as reader:
        return verify(store, reader.committed(), fraction=args.fraction, seed=args.seed, progress=_Progress())


class _Progress:
    """A line on a terminal that counts the shards; silent elsewhere."""

    def __init__(self) -> None:
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown and (done % 16 == 0 or done == total):
            sys.stderr.write(f"\r{done} of at most {total} shards" + ("\n" if done == total else ""))


def describe(report: VerifyReport) -> str:
    """The report as text."""
    lines = [
        f"store      {report.store}",
        f"samples    {report.samples}, committed {report.committed}",
        f"read       {report.read} shards, {report.tokens} tokens, {report.nbytes} bytes",
    ]
    if report.uncommitted:
        lines.append(f"left over  {report.uncommitted} shards of attempts that were not committed (no damage)")
    if report.ok:
        return "\n".join([*lines, "result     whole: everything that was read is proved"])
    lines.append(f"result     {report.damaged} damages")
    rows = [("-" if d.index is None else d.index, d.sample_id, d.kind, d.message) for d in report.damage]
    more = report.damaged - len(report.damage)
    lines += ["", table(("index", "id", "damage", "expected and found"), rows)]
    return "\n".join([*lines, f"and {more} more"] if more else lines)
