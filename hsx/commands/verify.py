"""`hsx verify`: re-reads and proves what is stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural, table
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.stores.group import open_store, require_run
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.verify import VerifyReport, verify
from hsx.verify_hf import TOLERANCE, HfReport, against_hf, require_model

if TYPE_CHECKING:
    import argparse


def run(args: argparse.Namespace) -> int:
    """Prints what was found.

    Raises RunError `store_damaged`, exit code 5, where something is damaged, or a sample recomputes otherwise or there is none.
    """
    if (args.job is None) == (args.store is None):
        raise RunError("usage", "hsx verify takes either a job file or --store")
    if args.against_hf is not None:
        require_model(args.against_hf)  # before the store is read, which may take hours
    if args.store is not None:
        store = Path(args.store)
        report = verify(store, None, fraction=args.fraction, seed=args.seed, progress=_Progress("shards"))
    else:
        loaded = load(args.job)
        require_begun(loaded)
        store = loaded.store
        report = _with_ledger(args, store, loaded.state_dir / FILE_NAME)
    truth = _recomputed(args, store) if args.against_hf is not None else None
    if args.json:
        emit_json({**report.as_dict(), **({"against_hf": truth.as_dict()} if truth else {})})
    else:
        emit("\n\n".join([describe(report), *([describe_truth(truth)] if truth else [])]))
    if not report.ok:
        raise RunError("store_damaged", f"store {store} has {plural(report.damaged, 'damage')}; expected none, see the report")
    if truth is not None and not truth.ok:
        raise RunError("store_damaged", f"store {store} differs from what {truth.model} computes; see the report")
    return ExitCode.DONE


def _with_ledger(args: argparse.Namespace, store: Path, ledger: Path) -> VerifyReport:
    if not ledger.exists():
        raise RunError("ledger_failed", f"{ledger} does not exist; expected the job's ledger, or use --store to do without")
    with LedgerReader(ledger) as reader:
        require_run(open_store(store), reader.run, ledger)
        return verify(store, reader.committed(), fraction=args.fraction, seed=args.seed, progress=_Progress("shards"))


def _recomputed(args: argparse.Namespace, store: Path) -> HfReport:
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    progress = _Progress("samples recomputed")
    return against_hf(store, args.against_hf, samples=args.hf_samples, seed=args.seed, tolerance=tolerance, progress=progress)


class _Progress:
    """A line on a terminal that counts what is done; silent elsewhere."""

    def __init__(self, words: str) -> None:
        self._words = words
        self._shown = sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        if self._shown and (done % 16 == 0 or done == total):
            sys.stderr.write(f"\r{done} of at most {total} {self._words}" + ("\n" if done == total else ""))


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
    lines.append(f"result     {plural(report.damaged, 'damage')}")
    rows = [("-" if d.index is None else d.index, d.sample_id, d.kind, d.message) for d in report.damage]
    more = report.damaged - len(report.damage)
    lines += ["", table(("index", "id", "damage", "expected and found"), rows)]
    return "\n".join([*lines, f"and {more} more"] if more else lines)


def describe_truth(report: HfReport) -> str:
    """What recomputing found, as text: one line a state, with its worst token and the nearest wrong layer."""
    rows = [
        (
            sample.index,
            sample.tokens,
            state.name,
            f"{state.worst:.1e}",
            f"{state.median:.1e}",
            f"{state.neighbour} {state.neighbour_median:.1e}",
            "right" if state.ok else "WRONG",
        )
        for sample in report.samples
        for state in sample.states
    ]
    head = f"recomputed with {report.model}: relative error per token, at most {report.tolerance:.1e} allowed"
    result = "all states are right" if report.ok else "states differ" if report.samples else "no committed sample to recompute"
    columns = ("index", "tokens", "state", "worst", "median", "nearest other state", "result")
    return "\n".join([head, *([table(columns, rows)] if rows else []), f"result     {result}"])
