"""`hsx move`: drains one root of a job that runs or rests."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hsx.commands.job import require_begun
from hsx.commands.output import emit, emit_json, plural
from hsx.config_load import LoadedConfig, load
from hsx.core.amounts import in_words
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.locks import JOB_LOCK, MOVE_LOCK, Homes, locked
from hsx.move import Mover, MoveSettings, sweep_copies
from hsx.progress_view import duration
from hsx.stores.attach import attach_roots
from hsx.stores.draining import begin_draining, end_draining, is_draining
from hsx.stores.durable import root_error
from hsx.stores.group import StoreInfo, forget_roots, open_store, require_run, require_unsealed
from hsx.stores.ledger_backup import refuse_copy
from hsx.stores.ledger_move import MoveLedger
from hsx.stores.ledger_schema import FILE_NAME

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from pathlib import Path

    from hsx.move_report import MoveReport


@dataclass(frozen=True, slots=True)
class _Plan:
    """One call, checked: the roots with their paths, and the room that must stay."""

    loaded: LoadedConfig
    source: str
    targets: tuple[str, ...]
    paths: dict[str, Path]
    reserves: dict[str, int]


def run(args: argparse.Namespace) -> int:
    """Moves, or says what it would move, or ends a move.

    Raises RunError: `usage`, `job_locked` where another move is under way, `interrupted`, `store_damaged` where some of the
    samples are damaged and stay, and what `Mover.run` raises.
    """
    loaded = load(args.job)
    require_begun(loaded)
    ledger = loaded.state_dir / FILE_NAME
    if not ledger.exists():
        raise RunError("ledger_failed", f"{ledger} does not exist; expected the ledger of a job that has been run")
    store = open_store(loaded.store)
    with MoveLedger(ledger) as moving:
        require_run(store, moving.run, ledger)
        refuse_copy(ledger)
        plan = _plan(loaded, store, args)
        if args.cancel:
            return _cancel(plan, store, as_json=args.json)
        require_unsealed(store)
        if args.dry_run:
            return _forecast(plan, store, moving.tally(), as_json=args.json)
        report = _drain(plan, moving)
    if args.json:
        emit_json(report.as_dict())
    else:
        emit(describe(report))
    if report.stopped and not report.drained:
        raise RunError(
            "interrupted", f"stopped with {plural(report.left, 'sample')} left on root {plan.source}; the same command goes on"
        )
    if report.damaged:
        raise RunError(
            "store_damaged",
            f"{plural(report.damaged, 'sample')} on root {plan.source} cannot be moved: missing or damaged; "
            f"hsx repair {loaded.path} has them extracted again",
        )
    return ExitCode.DONE


def _plan(loaded: LoadedConfig, store: StoreInfo, args: argparse.Namespace) -> _Plan:
    """Checks the roots that the call names. Raises RunError `usage`."""
    named = {root.name: root for root in loaded.roots}
    if args.root not in store.roots:
        known = ", ".join(store.roots) or "none"
        raise RunError("usage", f"store {loaded.store} has no root {args.root!r}; it has {known}")
    if args.cancel and (args.to or args.dry_run):
        raise RunError("usage", "hsx move --cancel takes neither --to nor --dry-run")
    if args.to is None:
        targets = [name for name in named if name != args.root and not _drained(store, name)]
    else:
        targets = list(dict.fromkeys(args.to.split(",")))
        for name in targets:
            if name not in named or name == args.root:
                others = ", ".join(other for other in named if other != args.root) or "none"
                raise RunError("usage", f"--to names root {name!r}; expected other roots of the job file: {others}")
            if _drained(store, name):
                raise RunError("usage", f"--to names root {name!r}, which is being drained itself")
    if not targets and not args.cancel:
        raise RunError("usage", f"there is no root to move to; expected another one than {args.root!r} in {loaded.path}")
    source = named[args.root].path if args.root in named else store.roots[args.root]
    for name in () if args.cancel else targets:
        place, whole = named[name].path.resolve(), source.resolve()
        if place.is_relative_to(whole) or whole.is_relative_to(place):
            raise RunError(
                "usage", f"root {name!r} at {place} is not beside root {args.root!r} at {whole}; expected another disk"
            )
    return _Plan(
        loaded,
        args.root,
        tuple(targets),
        {args.root: source, **{name: named[name].path for name in targets}},
        {name: named[name].reserve for name in targets},
    )


def _drained(store: StoreInfo, name: str) -> bool:
    """Whether a root is marked; one whose disk does not tell is met, and named, when it is to be used."""
    with suppress(OSError):
        return name in store.roots and is_draining(store.folder(name))
    return False


def _cancel(plan: _Plan, store: StoreInfo, *, as_json: bool) -> int:
    """Gives the root back to the job. A move that is under way ends by itself."""
    was = end_draining(plan.paths[plan.source] / store.store_id, plan.source)
    homes = Homes(plan.loaded.state_dir)
    try:
        with homes.held(), locked(plan.loaded.state_dir / MOVE_LOCK, f"hsx move of job {plan.loaded.config.job.name}"):
            for name in store.roots:
                sweep_copies(store.folder(name))
    except RunError as error:
        if error.kind != "job_locked":
            raise
    if as_json:
        emit_json({"root": plan.source, "cancelled": was})
    elif was:
        emit(f"root {plan.source} takes shards again; what was moved stays where it is")
    else:
        emit(f"root {plan.source} is not being drained")
    return ExitCode.DONE


def _forecast(plan: _Plan, store: StoreInfo, tally: dict[str, tuple[int, int]], *, as_json: bool) -> int:
    samples, nbytes = tally.get(plan.source, (0, 0))
    room = {name: max(_free(plan.paths[name], name) - plan.reserves[name], 0) for name in plan.targets}
    fits = sum(room.values()) >= nbytes
    if as_json:
        emit_json({"root": plan.source, "samples": samples, "nbytes": nbytes, "room": room, "fits": fits})
        return ExitCode.DONE
    lines = [f"root {plan.source} holds {plural(samples, 'committed sample')}, {in_words(nbytes)}"]
    lines += [f"root {name} has room for {in_words(free)} beyond its reserve" for name, free in room.items()]
    lines.append("they fit" if fits else f"they do not fit: {in_words(nbytes - sum(room.values()))} of room are missing")
    if samples and _drained(store, plan.source):
        lines.append("a move of this root was begun")
    emit("\n".join(lines))
    return ExitCode.DONE


def _free(path: Path, name: str) -> int:
    try:
        stat = os.statvfs(path)
    except OSError as error:
        raise root_error(error, name, path) from error
    return stat.f_bavail * stat.f_frsize


def _drain(plan: _Plan, ledger: MoveLedger) -> MoveReport:
    loaded = plan.loaded
    homes = Homes(loaded.state_dir)
    with ExitStack() as held:
        stop = held.enter_context(_asked_to_stop())
        with homes.held():  # a run that starts or commits now is waited for: it looks at roots and partial copies, too
            held.enter_context(locked(loaded.state_dir / MOVE_LOCK, f"moving shards of job {loaded.config.job.name}"))
            store = open_store(loaded.store)
            require_unsealed(store)  # asked again: nobody can seal it from here on
            info, _ = attach_roots(store, plan.paths)
            try:
                begin_draining(info.folder(plan.source), plan.source)
            except RunError as error:
                # A failing disk is often read-only by now; then the job cannot write there either.
                sys.stderr.write(f"hsx: {error.message}; its samples are moved all the same, and their originals stay\n")
        mover = Mover(
            info,
            plan.source,
            plan.targets,
            ledger,
            homes,
            MoveSettings(threads=loaded.config.pipeline.writer_threads, reserves=plan.reserves),
            stopped=stop.is_set,
            moved=_Progress(*ledger.tally().get(plan.source, (0, 0))),
        )
        report = mover.run()
        if plan.source not in {root.name for root in loaded.roots}:
            _forget(plan, ledger, homes)
    return report


def _forget(plan: _Plan, ledger: MoveLedger, homes: Homes) -> None:
    """Lets the store forget the root, if it is empty and no run has it still.

    One that began before the job file was changed may yet commit what it is writing there; the next run does it then.
    """
    loaded = plan.loaded
    with suppress(RunError), locked(loaded.state_dir / JOB_LOCK, f"job {loaded.config.job.name}"), homes.held():
        if plan.source not in ledger.tally():
            forget_roots(open_store(loaded.store), [plan.source])


def describe(report: MoveReport) -> str:
    """The report as text."""
    lines = [
        f"root   {report.root}",
        f"moved  {plural(report.moved, 'sample')}, {in_words(report.nbytes)}",
        f"left   {plural(report.left, 'committed sample')}",
    ]
    lines += [f"damaged: sample {index}: {message}" for index, message in report.damage]
    if report.damaged > len(report.damage):
        lines.append(f"and {report.damaged - len(report.damage)} more damaged samples")
    if report.kept:
        lines.append(f"kept   {plural(report.kept, 'original')} that could not be removed; they do no harm")
    if report.under_way:
        lines.append(
            f"the job is still writing {plural(report.under_way, 'shard')} there: call this again once they are committed"
        )
    elif report.drained:
        lines.append("it is empty: take it out of the job file before the next hsx run; until then it takes no new shards")
    return "\n".join(lines)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second one ends the process, which does no harm either."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(_number: int, _frame: object) -> None:
        stop.set()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)

    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Progress:
    """A line on a terminal that says how far the move is; silent elsewhere."""

    def __init__(self, samples: int, nbytes: int) -> None:
        self._samples = samples
        self._nbytes = nbytes
        self._done = [0, 0]
        self._began = time.monotonic()
        self._shown = sys.stderr.isatty()

    def __call__(self, samples: int, nbytes: int) -> None:
        self._done = [self._done[0] + samples, self._done[1] + nbytes]
        if not self._shown or not self._done[1]:
            return
        rate = self._done[1] / max(time.monotonic() - self._began, 1e-6)
        left = duration(max(self._nbytes - self._done[1], 0) / rate)
        sys.stderr.write(f"\r{self._done[0]} of {self._samples} samples, {in_words(round(rate))}/s, {left} left \x1b[K")
        if self._done[0] >= self._samples:
            sys.stderr.write("\n")
