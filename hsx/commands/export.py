"""`hsx export`: a store's samples as the files that a trainer reads."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hsx.commands.output import Ticker, emit, emit_json, plural
from hsx.core.amounts import in_words
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.export import load_format
from hsx.export.manifest import MANIFEST
from hsx.export_run import Progress, export
from hsx.exporting import ExportPlan, Request, plan
from hsx.stores.reader import Store

if TYPE_CHECKING:
    import argparse

    from hsx.export.vocabulary import Coverage


IDS_SHOWN: Final = 5
"""Samples that are left out and named, for each reason."""


def run(args: argparse.Namespace) -> int:
    """Says what goes where, and writes it."""
    part, parts = args.shard
    request = Request(
        layers=args.layers,
        final=args.final,
        ids=None if args.ids is None else _ids(args.ids),
        max_tokens=args.max_tokens,
        part=part,
        parts=parts,
        draft_vocab=args.draft_vocab,
        vocab_size=args.vocab_size,
        link=args.link,
        index_only=args.index_only,
        threads=args.threads,
    )
    store = Path(args.store)
    if not store.is_dir():
        what = "is a file" if store.exists() else "does not exist"
        raise RunError("usage", f"{store} {what}; expected the folder of a store, as job.store of a job file names it")
    planned = plan(Store(store, roots=dict(args.root)), load_format(args.to), Path(args.folder), request)
    covered = planned.coverage()
    if not args.json:
        emit(describe(planned, covered))
    if args.dry_run:
        if args.json:
            emit_json(_document(planned, covered))
        return ExitCode.DONE
    ticker = Ticker()
    done = export(planned, lambda now: ticker.say(lambda: f"files {now.done}/{now.rows}, {in_words(now.nbytes)} written"))
    if args.json:
        emit_json({**_document(planned, covered), "folder": planned.folder, "part": asdict(done)})
    else:
        emit(summary(planned, done))
    return ExitCode.DONE


def _document(planned: ExportPlan, covered: Coverage | None) -> dict[str, Any]:
    known = {} if covered is None else {"draft_coverage": {**asdict(covered), "share": covered.share}}
    return {**planned.document(), "left_out_samples": list(planned.left_out()), **known}


def describe(planned: ExportPlan, covered: Coverage | None = None) -> str:
    """What will be written, from which states: for people."""
    store, selection = planned.store, planned.selection
    rows = plural(len(selection.indices), "sample")
    lines = [
        f"{store.path} to {planned.form.name} in {planned.folder}: {rows}, {selection.tokens} tokens, H = {store.hidden_size}"
    ]
    lines += [f"  {line}" for line in planned.mapping.lines()]
    lines += _left_out(planned)
    if covered is not None:
        percent = covered.covered * 10000 // max(covered.counted, 1) / 100  # rounded down: 100 % is all of them
        lines.append(
            f"  draft vocabulary: {planned.vocabulary.draft} of {planned.vocabulary.target} tokens have {percent:.2f} % of the "
            f"{covered.counted} that count for the loss; {covered.distinct} different ones occur"
        )
    if planned.form.layer_shift and planned.mapping.trainer_layers:
        lines.append(
            f"  layer ids for the trainer's configuration: {planned.mapping.trainer_layers} (h_k is the output of layer k - 1)"
        )
    elif planned.mapping.trainer_layers:
        lines.append(f"  layer ids for the trainer's configuration: {planned.mapping.trainer_layers}")
    if planned.form.trainer_folder:
        lines.append(f"  the trainer is given {planned.folder / planned.form.trainer_folder}")
    if planned.request.parts > 1:
        lines.append(f"  part {planned.request.part} of {planned.request.parts}: {plural(len(planned.rows), 'file')}")
    return "\n".join(lines)


def _left_out(planned: ExportPlan) -> list[str]:
    """A line for each reason for which samples are no rows, with the first ids."""
    lines = []
    for reason, indices in planned.selection.without.items():
        names = ", ".join(repr(planned.store.sample_id(index)) for index in indices[:IDS_SHOWN].tolist())
        more = f" and {len(indices) - IDS_SHOWN} more, see --json" if len(indices) > IDS_SHOWN else ""
        lines.append(f"  left out: {plural(len(indices), 'sample')} ({reason}): {names}{more}")
    return lines


def summary(planned: ExportPlan, done: Progress) -> str:
    """What was written."""
    rate = round(done.nbytes / max(done.seconds, 1e-9))
    parts = [
        f"{plural(done.done, 'file')} of {done.rows} in {planned.folder}",
        f"{in_words(done.nbytes)} written, {in_words(rate)}/s",
    ]
    if done.kept:
        parts.append(f"{done.kept} were there already")
    if done.linked:
        parts.append(f"{done.linked} are links")
    return ", ".join(parts) + f"; {MANIFEST} says what is what"


def _ids(path: str) -> list[str]:
    """Ids, one a line, which ends with LF or CRLF; an empty line is none, and a byte order mark belongs to no id."""
    try:
        if path == "-" and sys.stdin is None:
            raise RunError("usage", "--ids - reads standard input, which is closed; expected ids, one a line")
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError("usage", f"--ids {path} cannot be read: {error}") from error
    return [line for line in (line.removesuffix("\r") for line in text.split("\n")) if line]
