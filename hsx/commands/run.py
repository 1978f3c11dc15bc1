"""`hsx run`: runs a job, or continues it."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

import structlog
import uvloop

from hsx import logs
from hsx.app import Outcome, run_job
from hsx.commands.job import load_fit
from hsx.commands.output import emit, emit_json, plural
from hsx.errors import RunError
from hsx.exit_codes import MEANINGS, ExitCode
from hsx.progress_view import BarView, PlainView, ProgressView, duration

if TYPE_CHECKING:
    import argparse

    from hsx.config import Log


def run(args: argparse.Namespace) -> int:
    """Runs the job to its end; prints a summary to standard output, progress and log to standard error."""
    loaded, warnings = load_fit(args.job)
    view = open_view(sys.stderr, loaded.config.log, args.verbose)
    try:
        log = structlog.get_logger()
        for finding in warnings:
            log.warning("config.doubted", key=finding.key, message=finding.message)
        try:
            outcome = uvloop.run(run_job(loaded, progress=view))
        except asyncio.CancelledError:
            raise RunError("interrupted", "forced to stop by a second signal; the same command continues the job") from None
    finally:
        view.close()
    code = code_of(outcome, loaded.config.pipeline.allow_quarantined)
    if args.json:
        emit_json({"exit_code": int(code), **asdict(outcome)})
    else:
        emit(summary(outcome, code))
    if code is ExitCode.INTERRUPTED:
        raise RunError(
            "interrupted",
            f"stopped by a signal with {plural(outcome.pending, 'sample')} left; the same command continues the job",
        )
    if code is ExitCode.INCOMPLETE:
        raise RunError(
            "incomplete",
            f"{plural(outcome.quarantined, 'sample')} {_are(outcome.quarantined)} quarantined and {outcome.pending} "
            f"{_are(outcome.pending)} pending; expected none beyond what "
            "pipeline.allow_quarantined allows; see `hsx quarantine list`",
        )
    return code


def open_view(stream: TextIO, settings: Log, verbose: int) -> ProgressView:
    """Opens the progress view that suits `stream`, and points the log at it.

    On a terminal the bar comes first: rich then replaces sys.stderr, so that log lines are written above the bar.
    """
    level: logs.Level = "debug" if verbose else settings.level
    if not stream.isatty():
        logs.configure(level, settings.format, stream, samples_per_second=None if verbose else settings.samples_per_second)
        if settings.format == "console":
            lenient = logs.LenientStream(stream)
            return PlainView(lambda line: _write(lenient, line))
        return PlainView(lambda line: structlog.get_logger().info("job.progressed", summary=line))
    view = BarView(stream)
    logs.configure(level, settings.format, sys.stderr, samples_per_second=None if verbose else 0.0)
    return view


def _write(stream: logs.LenientStream, line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def code_of(outcome: Outcome, allowed: float) -> ExitCode:
    """The exit code of a run that ended in good order.

    Args:
        outcome: how it ended.
        allowed: the share of the accepted samples that may be quarantined.
    """
    if outcome.interrupted and outcome.pending:
        return ExitCode.INTERRUPTED
    accepted = outcome.committed + outcome.quarantined + outcome.pending
    if outcome.pending or outcome.quarantined > allowed * accepted:
        return ExitCode.INCOMPLETE
    return ExitCode.DONE


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def summary(outcome: Outcome, code: ExitCode) -> str:
    """The last words of a run, for people."""
    rate = f", {outcome.tokens / outcome.seconds:.0f} tokens/s" if outcome.seconds > 0 else ""
    violations = ", ".join(f"{name} {count}" for name, count in sorted(outcome.violations.items()) if count)
    lines = [
        f"store       {outcome.store}",
        f"committed   {plural(outcome.committed, 'sample')}",
        f"this run    {outcome.tokens} tokens in {duration(outcome.seconds)}{rate}",
        f"violations  {violations or 'none'}",
    ]
    for word, count in (
        ("quarantined", outcome.quarantined),
        ("rejected", outcome.rejected),
        ("pending", outcome.pending),
        ("restarts", outcome.restarts),
        ("revoked", outcome.revoked),
        ("shared", outcome.shared),
    ):
        if count:
            lines.append(f"{word:<12}{count}")
    lines.append(f"exit code   {code.value}: {MEANINGS[code]}")
    return "\n".join(lines)
