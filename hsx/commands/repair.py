"""`hsx repair`: has damaged and lost samples extracted again, and builds a lost ledger again."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural, table
from hsx.commands.reading_view import ReadingView
from hsx.config_load import LoadedConfig, load
from hsx.core.amounts import in_words
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import at_rest
from hsx.rebuild import RebuildReport, rebuild
from hsx.repair import RepairReport, repair
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from hsx.verify import Damage


def run(args: argparse.Namespace) -> int:
    """Repairs, or says what would be repaired; or builds the ledger again.

    Raises RunError `usage`, `job_locked` beside any other hsx on the job, `store_damaged`, exit code 5, where damage is left
    that repair cannot mend, and what `repair` and `rebuild` raise.
    """
    loaded = load(args.job)
    if args.rebuild_ledger and (args.dry_run or args.report):
        raise RunError("usage", "hsx repair --rebuild-ledger takes neither --dry-run nor --report")
    require_begun(loaded)
    with at_rest(loaded):
        return _rebuild(loaded, args) if args.rebuild_ledger else _repair(loaded, args)


def _repair(loaded: LoadedConfig, args: argparse.Namespace) -> int:
    if not (loaded.state_dir / FILE_NAME).exists():
        raise RunError(
            "ledger_failed",
            f"{loaded.state_dir / FILE_NAME} does not exist; expected the job's ledger. Put it back, or have it built again: "
            f"hsx repair {loaded.path} --rebuild-ledger",
        )
    listed = None if args.report is None else Path(args.report)
    report = repair(loaded, lost=args.lost, dry_run=args.dry_run, report=listed, watch=ReadingView(sys.stderr))
    if args.json:
        emit_json(report.as_dict())
    else:
        emit(describe(report))
    if report.left:
        raise RunError("store_damaged", f"{plural(report.left, 'damage')} cannot be mended by repair; see the report")
    return ExitCode.DONE


def _rebuild(loaded: LoadedConfig, args: argparse.Namespace) -> int:
    report = rebuild(loaded, lost=args.lost, watch=ReadingView(sys.stderr))
    if args.json:
        emit_json(report.as_dict())
    else:
        emit(describe_rebuilt(report))
    return ExitCode.DONE


def describe(report: RepairReport) -> str:
    """The report as text."""
    would = "would be " if report.dry_run else ""
    lines = [
        f"store      {report.store}",
        f"read       {report.read} shards of {report.committed} committed samples, {plural(report.damaged, 'damage')} found",
    ]
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(report.by_kind.items()))
    lines.append(f"requeued   {plural(report.requeued, 'sample')} {would}pending again{f': {kinds}' if kinds else ''}")
    forgets = "would forget" if report.dry_run else "has forgotten"
    for root, count in report.lost.items():
        lines.append(f"lost       root {root}: {plural(count, 'sample')} {would}pending again; the store {forgets} it")
    if report.tokens:
        lines.append(f"           {report.tokens} tokens, {in_words(report.nbytes)} to extract again")
    lines.append(f"view       {plural(report.relinked, 'link')} {would}put right")
    if not report.dry_run:
        lines.append(f"swept      {plural(report.partials, 'partial file')}, {plural(report.strays, 'stray shard')}")
    lines += [f"not swept  {reason}" for reason in report.untidy.values()]
    lines.append(f"result     {_result(report)}")
    return "\n".join([*lines, *_listed(report.left_over, report.left, "left as it is")])


def _result(report: RepairReport) -> str:
    if report.left:
        return f"{plural(report.left, 'damage')} cannot be mended by repair"
    if report.dry_run:
        return "nothing was changed"
    return (
        "hsx run extracts what is pending"
        if report.requeued or any(report.lost.values())
        else "nothing is to be extracted again"
    )


def describe_rebuilt(report: RebuildReport) -> str:
    """The report as text."""
    at = datetime.fromtimestamp(report.copy_at, tz=UTC).isoformat(timespec="seconds")
    history = f"{report.copy}, taken {at}" if report.copy else "none: no root has a sound copy of the ledger"
    lines = [
        f"store      {report.store}",
        f"ledger     {report.ledger}, run {report.run} (before: {report.previous_run})",
        *([f"kept       {report.kept}: the broken one"] if report.kept else []),
        f"history    {history}",
        *(f"           not taken: {reason}" for reason in report.copies_refused.values()),
        f"read       {report.shards} shards, {in_words(report.nbytes)}; {report.refused} unproved, "
        f"{report.superseded} superseded",
        f"committed  {report.committed} of {report.samples}; {report.pending} pending, {report.quarantined} quarantined",
    ]
    if report.missing:
        lines.append(f"missing    {plural(report.missing, 'sample')} committed by the copy, without a sound shard: pending")
    lines += [f"not swept  {reason}" for reason in report.untidy.values()]
    lines += [f"no copy    {reason}" for reason in report.not_copied.values()]
    lines.append("result     start another server, and hsx run: the one before may not be used again")
    return "\n".join([*lines, *_listed(report.refusals, report.refused, "not taken")])


def _listed(damages: list[Damage], total: int, why: str) -> Iterable[str]:
    if damages:
        rows = [("-" if d.index is None else d.index, d.sample_id, d.kind, d.message) for d in damages]
        yield ""
        yield table(("index", "id", why, "expected and found"), rows)
    if total > len(damages):
        yield f"and {total - len(damages)} more"
