"""`hsx plan`: how large a job is, whether it fits, and how long it takes. Reads only."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hsx.commands import codecs
from hsx.commands.job import load_fit
from hsx.commands.output import emit, emit_json, plural, table
from hsx.core.amounts import in_words
from hsx.core.placement import RootSpace
from hsx.datasets import open_dataset
from hsx.datasets.sniff import sniff
from hsx.disks import Disks
from hsx.errors import RunError
from hsx.exit_codes import ExitCode
from hsx.index import ADD_IDS, NOTHING_COUNTS, lacks_id
from hsx.model_config import read_model_shape
from hsx.plan import Plan, plan
from hsx.prepare import changed_settings, job_changed
from hsx.preview import whole_note
from hsx.printable import printable
from hsx.progress_view import duration
from hsx.records import BadRow
from hsx.stores.group import open_store
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.stores.selection import as_stored, kept_positions, stored_counts
from hsx.stores.tokens import TokenTable
from hsx.twins import followers, key

if TYPE_CHECKING:
    import argparse

    from numpy.typing import NDArray

    from hsx.config_load import LoadedConfig
    from hsx.core.spec import ModelShape
    from hsx.records import Counts
    from hsx.stores.codec_sample import CodecTrial

BAD_ROWS_SHOWN = 20
NOTABLE = 0.05
"""From what share of the shards' bytes on smaller inner chunks are spoken of."""
WORTH = 0.75
"""They are halved as long as less than this of what could be saved is."""


def run(args: argparse.Namespace) -> int:
    """Prints the plan of what is left to do; refused where it does not fit."""
    loaded, _ = load_fit(args.job)
    shape = read_model_shape(loaded.model)
    counts, measured, seen, reasons, whole = None, None, None, dict[str, int](), 0
    if (loaded.state_dir / FILE_NAME).exists():
        if changed := changed_settings(loaded, shape):
            raise job_changed(loaded, changed)
        left, counts, measured = _left(loaded)
    else:
        seen = sniff(loaded.config)
        left = survey(loaded, shape)
        reasons, whole = left.reasons, left.whole
    if not len(left.lengths):
        return _nothing_left(args.json, counts)
    disks = Disks()
    spaces = [RootSpace(root.name, disks.place(root.path).free, root.reserve, 0) for root in loaded.roots]
    trials = None if args.sample is None else _tried(args.sample, loaded, shape)
    result = plan(
        left.lengths,
        loaded.spec,
        shape.hidden_size,
        spaces,
        loaded.staging_bytes,
        rejected=left.rejected,
        tokens_per_s=args.rate or measured,
        rate_source="given" if args.rate else "measured",
        codec=loaded.config.storage.codec,
        dtype=loaded.config.storage.dtype,
        chunk_tokens=loaded.config.storage.chunk_tokens,
        rows=left.rows,
        shared=left.shared,
        shared_rows=left.shared_rows,
    )
    if args.json:
        tried = {} if trials is None else {"codecs": codecs.as_json(trials, result.payload_bytes)}
        known = {"dataset": asdict(seen), "reasons": reasons, "whole": whole} if seen else {}
        emit_json({**result.as_json(), "committed": counts.committed if counts else 0, **known, **tried})
    else:
        if seen:
            facts = (printable(line, keep="") for line in seen.lines())
            emit("\n".join([*facts, *_accepted(result, reasons), *whole_note(whole, result.samples + result.shared, seen), ""]))
        emit(describe(result, counts))
        if trials is not None:
            emit("\n" + codecs.describe(trials, result.payload_bytes, loaded.config.storage.codec))
    return ExitCode.DONE if result.fits else ExitCode.REFUSED


@dataclass(frozen=True, slots=True)
class Survey:
    """The samples that are left, int64 each.

    Attributes:
        lengths: tokens of those to be prefilled.
        rows: those of them that are stored.
        shared: tokens of the samples that are committed with another one.
        shared_rows: those of them that are stored.
        rejected: bad rows.
        reasons: those, by reason; empty where the dataset was not read.
        whole: usable rows of which every token counts for the loss: their mask is all ones, or they have none.
    """

    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    shared: NDArray[np.int64]
    shared_rows: NDArray[np.int64]
    rejected: int
    reasons: dict[str, int] = field(default_factory=dict)
    whole: int = 0


def _tried(sample: str, loaded: LoadedConfig, shape: ModelShape) -> list[CodecTrial]:
    """What the codecs make of states; of bf16 ones alone. Raises RunError `usage` for a job that stores others."""
    if loaded.config.storage.dtype != "bf16":
        raise RunError("usage", f"--sample tries codecs on bf16 states; storage.dtype is {loaded.config.storage.dtype!r}")
    return codecs.try_on(sample or str(loaded.store), shape.hidden_size, loaded.config.storage.chunk_tokens)


def _left(loaded: LoadedConfig) -> tuple[Survey, Counts, float | None]:
    """What is neither committed nor quarantined; then totals, and the rate so far."""
    table = TokenTable(loaded.store)
    lengths, rows = table.lengths, stored_counts(table, open_store(loaded.store).layout)
    pending = np.ones(len(lengths), np.bool_)
    with LedgerReader(loaded.state_dir / FILE_NAME) as ledger:
        for row in ledger.committed():
            pending[row.index] = False
        for lost in ledger.quarantined():
            pending[lost.index] = False
        shared = np.zeros(len(lengths), np.bool_)
        for index, _ in ledger.followers():
            shared[index] = pending[index]
        counts, measured = ledger.counts(), ledger.tokens_per_second()
    alone = pending & ~shared
    return Survey(lengths[alone], rows[alone], lengths[shared], rows[shared], counts.rejected), counts, measured


def survey(loaded: LoadedConfig, shape: ModelShape) -> Survey:
    """Reads the dataset once: each usable row to be prefilled, and those with the prompt of an earlier one, in 24 bytes a row.

    Raises RunError `dataset_rejected` for bad rows under on_bad_row 'refuse', `dataset_empty`, `mask_empty`,
    `dataset_unreadable`.
    """
    lengths, keys, bad, rejected, unnamed = array("q"), array("q"), list[BadRow](), 0, 0
    stored, storage = array("q"), loaded.config.storage
    reasons, counted, whole = Counter[str](), False, 0
    share = loaded.config.dataset.identical == "share"
    for row in open_dataset(loaded.config, shape):
        if not isinstance(row, BadRow):
            lengths.append(len(row.input_ids))
            counted = counted or bool(row.loss_mask.any())
            whole += bool(row.loss_mask.all())
            loss = storage.tokens == "loss"
            stored.append(len(kept_positions(row.loss_mask, storage.context)) if loss else len(row.input_ids))
            same = as_stored(row.input_ids, row.loss_mask, storage.tokens, storage.context).astype(np.int32, copy=False)
            keys.append(key(same) if share else len(keys))
            continue
        rejected += 1
        reasons[row.reason] += 1
        unnamed += lacks_id(row)
        if len(bad) < BAD_ROWS_SHOWN:
            bad.append(row)
    if rejected and loaded.config.dataset.on_bad_row == "refuse":
        lines = [f"{row.named}: {row.reason}: {row.message}" for row in bad]
        more = [f"... and {rejected - len(bad)} more"] if rejected > len(bad) else []
        leave = f"on_bad_row = 'skip' leaves {'it' if rejected == 1 else 'them'} out"
        head = f"{loaded.dataset} has {plural(rejected, 'bad row')}; {leave if lengths or unnamed < rejected else ADD_IDS}"
        raise RunError("dataset_rejected", "\n".join([head, *lines, *more]))
    if not lengths:
        hint = f"; {ADD_IDS}" if rejected and unnamed == rejected else ""
        raise RunError("dataset_empty", f"{loaded.dataset} has no usable row; expected at least one{hint}")
    if not counted and loaded.config.dataset.zero_masks == "refuse":
        raise RunError("mask_empty", NOTHING_COUNTS.format(samples=len(lengths)))
    tokens, shared = np.frombuffer(lengths, np.int64), followers(np.frombuffer(keys, np.int64))
    rows = np.frombuffer(stored, np.int64)
    return Survey(tokens[~shared], rows[~shared], tokens[shared], rows[shared], rejected, dict(sorted(reasons.items())), whole)


def _accepted(result: Plan, reasons: dict[str, int]) -> list[str]:
    """Rows in, and what became of them: the sum of both is all of them."""
    accepted = result.samples + result.shared
    rejected = "".join(f" + {count} {reason}" for reason, count in reasons.items())
    return [f"rows       {accepted + sum(reasons.values())} = {accepted} accepted{rejected}"]


def _nothing_left(as_json: bool, counts: Counts | None) -> int:
    committed = counts.committed if counts else 0
    if as_json:
        emit_json({"samples": 0, "tokens": 0, "fits": True, "committed": committed})
    else:
        emit(f"nothing is left to do: {plural(committed, 'sample')} {'is' if committed == 1 else 'are'} committed")
    return ExitCode.DONE


def describe(result: Plan, counts: Counts | None) -> str:
    """The plan as text."""
    lines = [f"committed  {plural(counts.committed, 'sample')}; what follows is what is left"] if counts else []
    lines += [
        f"samples    {result.samples}, the longest {result.longest} tokens" + _rejected(result.rejected),
        f"tokens     {result.tokens}" + _stored(result),
        f"payload    {in_words(result.payload_bytes)}",
        f"on disk    {in_words(result.file_bytes)}, with checksums and padding" + _before(result.codec),
        *([] if counts else _smaller_chunks(result)),  # they are fixed from the first run on
        *_shared(result),
        f"staging    {in_words(result.dump_bytes)} for the largest dump, of {in_words(result.staging_bytes)}",
    ]
    if result.hours is not None and result.tokens_per_s:
        took = duration(result.hours * 3600)
        lines.append(f"time       {took} at {result.tokens_per_s:.0f} tokens/s ({result.rate_source})")
    else:
        lines.append("time       unknown: give --rate TOKENS_PER_S")
    buckets = [(f"{b.lower}-{b.upper}", b.samples, b.tokens) for b in result.buckets]
    roots = [(r.name, r.samples, *map(in_words, (r.nbytes, r.free, r.reserve, r.left))) for r in result.roots]
    lines += ["", table(("tokens", "samples", "sum of tokens"), buckets)]
    lines += ["", table(("root", "shards", "takes", "free now", "reserve", "left"), roots), ""]
    lines += ["it fits"] if result.fits else [f"it does not fit: {problem}" for problem in result.problems()]
    return "\n".join(lines)


def _smaller_chunks(result: Plan) -> list[str]:
    """With how many tokens to an inner chunk shards would be smaller, where that is worth a word."""
    if not result.smaller_chunks:
        return []
    most = result.file_bytes - min(result.smaller_chunks.values())
    # Each halving costs processor time: the first that has most of what there is to be had.
    fewer, nbytes = next(item for item in result.smaller_chunks.items() if result.file_bytes - item[1] >= WORTH * most)
    saved = 1 - nbytes / result.file_bytes
    if saved < NOTABLE:
        return []
    return [
        f"chunks     of {result.chunk_tokens} tokens, to which each shard is filled up: with storage.chunk_tokens = {fewer} "
        f"they would take {in_words(nbytes)}, {saved:.0%} less; it is fixed at the first run"
    ]


def _shared(result: Plan) -> list[str]:
    if not result.shared:
        return []
    more = f"{plural(result.shared, 'more sample')} with the same prompt as another one"
    return [f"identical  {more}: {result.shared_tokens} tokens and {in_words(result.shared_bytes)} are saved"]


def _stored(result: Plan) -> str:
    each = f", {result.bytes_per_token} bytes each" + ("" if result.dtype == "bf16" else f" as {result.dtype}")
    if result.stored_tokens == result.tokens:
        return each
    return f", of which {result.stored_tokens} are stored ({result.stored_tokens / result.tokens:.1%}){each}"


def _before(codec: str) -> str:
    return "" if codec == "none" else f", before {codec} (see --sample)"


def _rejected(count: int) -> str:
    return f"; {plural(count, 'bad row')} {'is' if count == 1 else 'are'} left out" if count else ""
