"""`hsx show`: one sample, for a person who wants to see what was stored."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural, table
from hsx.config_load import load
from hsx.exit_codes import ExitCode
from hsx.records import CommittedRow
from hsx.show import SampleView, find, index_passed_over, show
from hsx.stores.ledger_reader import LedgerReader, RevocationRow, SampleRow
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.reader import Store

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


TWINS_SHOWN = 8


def run(args: argparse.Namespace) -> int:
    """Prints the sample."""
    loaded = load(args.job)
    require_begun(loaded)
    store = Store(loaded.store)
    index = find(store, args.sample, args.by)
    other = index_passed_over(store, args.sample, index) if args.by == "either" else None
    row, revocations, twins = _history(loaded.state_dir / FILE_NAME, index)
    view = show(loaded.store, index, None if row is None else _committed(row), twins)
    if args.json:
        known = {} if row is None else {"state": row.state, "attempts": row.attempts, "failures": row.failures}
        why = {} if row is None else {"reason": row.reason, "evidence": row.evidence}
        told = {"index_passed_over": other, "revocations": [asdict(entry) for entry in revocations]}
        emit_json({**view.as_dict(), **known, **why, **told})
    else:
        emit("\n".join([*_doubt(other), describe(view), *_told(row, revocations)]))
    return ExitCode.DONE


def _doubt(other: int | None) -> list[str]:
    """A line where what was given is an id, and another sample's index, too."""
    return [] if other is None else [f"note      {other} is taken as an id, and is an index, too: --index shows that sample"]


def _history(ledger: Path, index: int) -> tuple[SampleRow | None, list[RevocationRow], list[int]]:
    """The ledger's entry of the sample, None without a ledger; each time that it was committed and taken back; its twins."""
    if not ledger.exists():
        return None, [], []
    with LedgerReader(ledger) as reader:
        taken_back = [entry for entry in reader.revocations() if index in entry.samples]
        return reader.sample(index), taken_back, reader.twins(index)


def _told(row: SampleRow | None, revocations: list[RevocationRow]) -> list[str]:
    """Why the sample is not committed, and what became of it before."""
    lines = [f"revoked   {entry.invariant}: {entry.evidence} (epoch {entry.epoch})" for entry in revocations]
    if row is not None and row.state != "committed":
        reason = f"; the last failure: {row.reason}: {row.evidence}" if row.reason else ""
        lines.append(f"ledger    {row.state} after {plural(row.attempts, 'attempt')}{reason}")
    return lines


def _committed(row: SampleRow) -> CommittedRow | None:
    """The entry of the commit; None where the sample is not committed."""
    if row.root is None or row.crc32c is None or row.nbytes is None or row.sequence is None or row.state != "committed":
        return None
    return CommittedRow(
        row.index, row.root, row.crc32c, row.nbytes, row.tokens, row.marker or "", row.epoch or "", row.sequence
    )


def describe(view: SampleView) -> str:
    """The view as text."""
    ids = ", ".join(map(str, view.first_ids)) + (f" ... {', '.join(map(str, view.last_ids))}" if view.last_ids else "")
    lines = [
        f"sample    {view.index} ({view.sample_id})",
        f"tokens    {view.tokens}, of which the loss mask keeps {view.loss_tokens}",
        f"ids       {ids}",
    ]
    if view.stored_tokens not in (None, view.tokens) or view.dtype != "bf16":
        lines.append(f"stored    {view.stored_tokens} of {view.tokens} tokens, as {view.dtype}")
    if view.twins:
        shown = ", ".join(map(str, view.twins[:TWINS_SHOWN])) + (", ..." if len(view.twins) > TWINS_SHOWN else "")
        lines.append(f"same as   {plural(len(view.twins), 'other sample')} with this prompt: {shown}")
    if not view.committed:
        return "\n".join([*lines, "state     not committed"])
    lines.append(f"shard     {view.shard} ({view.nbytes} bytes)")
    if view.root is not None and view.crc32c is not None:
        lines += [
            f"root      {view.root}, crc32c {view.crc32c:08x}",
            f"marker    {view.marker}",
            f"epoch     {view.epoch}, sequence {view.sequence}",
        ]
    if view.captured_as not in (None, view.index):
        lines.append(f"shared    its shard is a link to that of sample {view.captured_as}")
    rows = [(s.name, f"{s.mean:.4g}", f"{s.smallest:.4g}", f"{s.largest:.4g}") for s in view.states]
    return "\n".join([*lines, "", table(("state", "mean norm", "smallest", "largest"), rows)])
