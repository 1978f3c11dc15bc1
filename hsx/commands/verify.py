"""`hsx verify`: re-reads and proves what is stored."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural, table
from hsx.commands.reading_view import ReadingView
from hsx.commands.since import since
from hsx.config_load import load
from hsx.core.amounts import in_words
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import locked
from hsx.progress_view import duration
from hsx.stores.group import open_store, require_run
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.verify import VerifyReport, verify
from hsx.verify.against_hf import TOLERANCE, HfReport, against_hf, require_model
from hsx.verify.state import FILE_NAME as STATE_NAME
from hsx.verify.state import VerifyState, read_past, state_beside

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from hsx.stores.group import StoreInfo


def run(args: argparse.Namespace) -> int:
    """Prints what was found.

    Raises RunError `store_damaged`, exit code 5, where something is damaged, or a sample recomputes otherwise or there is none;
    `interrupted` where Ctrl-C cut the reading short.
    """
    if (args.job is None) == (args.store is None):
        raise RunError("usage", "hsx verify takes either a job file or --store")
    if args.against_hf is not None:
        require_model(args.against_hf)  # before the store is read, which may take hours
    if args.resume and args.fraction < 1:
        raise RunError("usage", "--resume goes on with a verification of all samples; expected no --fraction beside it")
    if args.store is not None and args.since is not None:
        raise RunError("usage", "--since needs the ledger, which says when samples were committed; expected a job file")
    store, report = _of_store(args) if args.store is not None else _of_job(args)
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


def _of_store(args: argparse.Namespace) -> tuple[Path, VerifyReport]:
    info = open_store(Path(args.store))
    return info.path, _verify(args, info, None, state_beside(info.path), dict(args.root))


def _of_job(args: argparse.Namespace) -> tuple[Path, VerifyReport]:
    loaded = load(args.job)
    require_begun(loaded)
    path = loaded.state_dir / FILE_NAME
    if not path.exists():
        raise RunError("ledger_failed", f"{path} does not exist; expected the job's ledger, or use --store to do without")
    with LedgerReader(path) as reader:
        info = open_store(loaded.store)
        require_run(info, reader.run, path)
        return loaded.store, _verify(args, info, reader, loaded.state_dir / STATE_NAME, dict(args.root))


@contextmanager
def _state(args: argparse.Namespace, path: Path, info: StoreInfo) -> Iterator[VerifyState | None]:
    """What this verification remembers: nothing where it reads a share only, or where it may not write, unless it is to go on.

    Raises RunError `job_locked` where another verification of all of this store is under way.
    """
    with ExitStack() as stack:
        state = None
        if args.fraction < 1:
            yield state
            return
        try:
            stack.enter_context(locked(path.with_name(path.name + ".lock"), f"the verification of store {info.path}"))
            state = stack.enter_context(VerifyState(path, info, resume=args.resume))
        except RunError as error:
            if args.resume or error.kind == "job_locked":
                raise
        yield state


def _verify(
    args: argparse.Namespace, info: StoreInfo, reader: LedgerReader | None, path: Path, roots: dict[str, str]
) -> VerifyReport:
    after = None
    if args.since is not None:
        after = since(args.since, time.time(), read_past(path, info.store_id).sound_until)
    with _state(args, path, info) as state:
        try:
            report = verify(
                info.path,
                reader,
                fraction=args.fraction,
                seed=args.seed,
                threads=args.threads,
                since=after,
                cold=args.cold,
                roots=roots,
                state=state,
                watch=ReadingView(sys.stderr),
            )
        except KeyboardInterrupt:
            goes_on = "" if state is None else "; the same command with --resume goes on, what was proved is noted"
            raise RunError("interrupted", f"the verification of store {info.path} was stopped{goes_on}") from None
        if state is not None:
            state.finish(sound=report.ok, since=after)
    return report


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
    took = duration(report.seconds)
    rate = f", {in_words(round(report.nbytes / report.seconds))}/s" if report.seconds > 0 else ""
    lines = [
        f"store      {report.store}" + (", sealed" if report.sealed else ""),
        f"samples    {report.samples}, committed {report.committed}",
        f"read       {report.read} shards, {report.tokens} tokens, {in_words(report.nbytes)} in {took}{rate}",
    ]
    if report.resumed:
        lines.append(f"before     {report.resumed} shards were proved by the verification that this one continues")
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
