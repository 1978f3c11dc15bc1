"""`hsx preview`: some samples, with what counts for the loss in colour, and numbers over many. Reads only; needs no GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from hsx.commands.output import emit_json, plural, write
from hsx.config_load import load
from hsx.datasets import open_dataset
from hsx.datasets.agreement import compare
from hsx.datasets.sniff import Sniffed, sniff
from hsx.datasets.tokenizer import RawTokenizer
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.index import NOTHING_COUNTS
from hsx.model_config import read_model_shape
from hsx.preview import BAD_LISTED, BAD_SHOWN, Preview, pieces, take, whole_note
from hsx.printable import printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

    from hsx.records import Row

ROWS: Final = 1000
SAMPLES: Final = 3
MISSING_SHOWN: Final = 8
GREEN: Final = "\x1b[30;42m"
PLAIN: Final = "\x1b[0m"
REFUSED: Final = "plan and run refuse a dataset with bad rows; dataset.on_bad_row = 'skip' leaves them out"
LONGEST_SHOWN: Final = 4000
"""Characters of a piece that are shown."""


def run(args: argparse.Namespace) -> int:
    """Prints the preview.

    Refused: `mask_empty`, `dataset_empty` where nothing of what was read could be used; `sample_unknown` where no row has an id
    that was asked for. Rows that were asked for by id are shown without the first two: they are not what the dataset is.
    """
    loaded = load(args.job)
    shape = read_model_shape(loaded.model)
    seen = sniff(loaded.config)
    every = args.bad or args.id
    found = take(
        open_dataset(loaded.config, shape),
        args.rows if args.rows is not None or every else ROWS,
        args.samples if args.samples is not None else 0 if args.bad else SAMPLES,
        ids=args.id,
        bad=BAD_LISTED if args.bad else 0 if args.id else BAD_SHOWN,
    )
    tokenizer = _tokenizer(loaded.model)
    decode = None if tokenizer is None else tokenizer.decode
    compared = str(compare(tokenizer)) if tokenizer is not None and seen.format != "tokens" else None
    if args.json:
        emit_json(_document(seen, found, decode) | {"tokenizer": compared})
    else:
        colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ)
        # As it is: all of it was made safe to show, and colours are no text of others.
        refused = loaded.config.dataset.on_bad_row == "refuse" and found.reasons
        notes = [REFUSED] if refused else []
        notes += ["no row is bad"] if args.bad and not found.reasons else []
        write(_text(seen, found, decode, compared, notes, colour=colour) + "\n")
    if found.missing:
        some = ", ".join(map(repr, found.missing[:MISSING_SHOWN])) + (" ..." if len(found.missing) > MISSING_SHOWN else "")
        raise RunError("sample_unknown", f"{loaded.dataset}: none of {plural(found.rows, 'row')} has the id {some}")
    if args.id:
        return ExitCode.DONE
    if not found.accepted:
        raise RunError("dataset_empty", f"{loaded.dataset}: none of {plural(found.rows, 'row')} is usable")
    if not found.counted and loaded.config.dataset.zero_masks == "refuse":
        raise RunError("mask_empty", NOTHING_COUNTS.format(samples=found.accepted))
    return ExitCode.DONE


def _tokenizer(model: Path) -> RawTokenizer | None:
    """The tokenizer, where the model's folder has one: a tokenised dataset needs none."""
    try:
        return RawTokenizer(model)
    except RunError:
        return None


def _document(seen: Sniffed, found: Preview, decode: Callable[[list[int]], str] | None) -> dict[str, Any]:
    return {
        "dataset": asdict(seen),
        "rows": found.rows,
        "complete": found.complete,
        "accepted": found.accepted,
        "rejected": dict(sorted(found.reasons.items())),
        "tokens": found.tokens,
        "counted": found.counted,
        "unmasked": found.unmasked,
        "whole": found.whole,
        "cut": found.cut,
        "lengths": found.quantiles(),
        "bad": [asdict(row) for row in found.bad],
        "missing": found.missing,
        "samples": [
            {
                "id": row.sample_id,
                "line": row.line,
                "tokens": len(row.input_ids),
                "pieces": [{"text": text, "counts": counts} for text, counts in pieces(row, decode)],
            }
            for row in found.samples
        ],
    }


def _text(
    seen: Sniffed,
    found: Preview,
    decode: Callable[[list[int]], str] | None,
    compared: str | None,
    notes: list[str],
    *,
    colour: bool,
) -> str:
    rejected = "".join(f" + {count} {reason}" for reason, count in sorted(found.reasons.items()))
    more = "" if found.complete else "; there are more rows, see --rows"
    share = 100 * found.counted / found.tokens if found.tokens else 0.0
    lengths = ", ".join(f"{name} {tokens}" for name, tokens in found.quantiles().items())
    lines = [
        *seen.lines(),
        *([f"tokenizer  {compared}"] if compared else []),
        f"rows       {found.rows} = {found.accepted} accepted{rejected}{more}",
        f"tokens     {found.tokens}, of which {found.counted} count for the loss ({share:.1f} %)"
        + (f"; {lengths}" if lengths else ""),
    ]
    if found.unmasked:
        lines.append(f"note       {plural(found.unmasked, 'usable row')} without any token that counts")
    lines += whole_note(found.whole, found.accepted, seen)
    if found.cut:
        lines.append(f"note       {plural(found.cut, 'row')} cut, being too long")
    lines += [f"bad row    {row.named}: {row.reason}: {row.message}" for row in found.bad]
    further = found.rows - found.accepted - len(found.bad)
    if further:
        hint = "" if len(found.bad) >= BAD_LISTED else ", see --bad"
        lines.append(f"bad row    {'and ' if found.bad else ''}{further} more{hint}")
    lines += [f"note       {note}" for note in notes]
    lines = [printable(line, keep="") for line in lines]  # what follows has colours, and its text is cleaned piece by piece
    unit = "line" if seen.kind == "jsonl" else "row"
    for row in found.samples:
        lines += ["", printable(_head(row, unit)), _shown(row, decode, colour=colour)]
    if found.samples:
        lines += ["", "what counts for the loss is " + ("green" if colour else "between [[ and ]]")]
    return "\n".join(lines)


def _head(row: Row, unit: str) -> str:
    counted = int(row.loss_mask.sum())
    cut = f", {row.cut} more were cut off" if row.cut else ""
    return f"--- {row.sample_id!r}, {unit} {row.line}: {plural(len(row.input_ids), 'token')}, {counted} count{cut}"


def _shown(row: Row, decode: Callable[[list[int]], str] | None, *, colour: bool) -> str:
    begin, end = (GREEN, PLAIN) if colour else ("[[", "]]")
    parts = []
    for text, counts in pieces(row, decode):
        shown = (
            text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text) - LONGEST_SHOWN} characters more)"
        )
        # A dataset's text must not steer the terminal.
        clean = printable(shown)
        parts.append(f"{begin}{clean}{end}" if counts else clean)
    return "".join(parts)
