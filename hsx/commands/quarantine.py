"""`hsx quarantine`: lists quarantined samples, or gives them another chance."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural, table
from hsx.config_load import load
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, locked
from hsx.stores.group import open_store, require_unsealed
from hsx.stores.ledger import SqliteLedger
from hsx.stores.ledger_backup import refuse_copy
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    import argparse
    from pathlib import Path


def run(args: argparse.Namespace) -> int:
    """Lists or requeues."""
    loaded = load(args.job)
    require_begun(loaded)
    path = loaded.state_dir / FILE_NAME
    if not path.exists():
        raise RunError("ledger_failed", f"{path} does not exist; expected the ledger of a job that has been run")
    if args.action == "list":
        return _list(path, args.json, rejected=args.rejected)
    if bool(args.indices) == args.all:
        raise RunError("usage", "hsx quarantine requeue takes either indices of samples or --all")
    # A running job holds its samples by state in memory: it must not be changed under it.
    with locked(loaded.state_dir / JOB_LOCK, f"job {loaded.config.job.name}"):
        require_unsealed(open_store(loaded.store))
        refuse_copy(path)
        return _requeue(path, None if args.all else args.indices, args.json)


def _list(path: Path, as_json: bool, *, rejected: bool) -> int:
    with LedgerReader(path) as ledger:
        lost, count = list(ledger.quarantined()), ledger.counts().rejected
        bad = list(ledger.rejected()) if rejected else []
    if as_json:
        rows = {"rejected_rows": [asdict(row) for row in bad]} if rejected else {}
        emit_json({"quarantined": [asdict(row) for row in lost], "rejected": count, **rows})
        return ExitCode.DONE
    cells = [(row.index, row.tokens, row.attempts, row.reason, row.marker, row.evidence) for row in lost]
    emit(table(("index", "tokens", "attempts", "reason", "marker", "evidence"), cells) if cells else "no sample is quarantined")
    if bad:
        lines = [(row.line, row.sample_id, row.reason, row.message) for row in bad]
        emit("\n" + table(("line or row", "id", "reason", "expected and found"), lines))
    if count:
        hint = "" if rejected else "; --rejected lists them"
        were = "was rejected and is no sample" if count == 1 else "were rejected and are no samples"
        emit(f"\n{plural(count, 'row')} of the dataset {were}{hint}")
    elif rejected:
        emit("no row of the dataset was rejected")
    return ExitCode.DONE


def _requeue(path: Path, indices: list[int] | None, as_json: bool) -> int:
    with LedgerReader(path) as ledger:
        known = {row.index for row in ledger.quarantined()}
    unknown = sorted(set(indices or ()) - known)
    if unknown:
        named = ", ".join(map(str, unknown))
        words = f"sample {named} is" if len(unknown) == 1 else f"samples {named} are"
        raise RunError("sample_unknown", f"{words} not quarantined; see `hsx quarantine list`")
    freed = asyncio.run(_free(path, indices))
    if as_json:
        emit_json({"requeued": freed})
    else:
        are, them = ("is", "it") if freed == 1 else ("are", "them")
        emit(f"{plural(freed, 'sample')} {are} free again; the next `hsx run` tries {them}")
    return ExitCode.DONE


async def _free(path: Path, indices: list[int] | None) -> int:
    ledger = SqliteLedger(path)
    try:
        return await ledger.requeue(indices)
    finally:
        await ledger.close()
