"""Reading the dataset once, into the store's token index."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Self

import numpy as np

from hsx.errors import RunError
from hsx.records import BadRow
from hsx.stores.token_writer import TokenTableWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TextIO

    from hsx.ports import Dataset

SHOWN: Final = 50
BAD_ROWS_FILE: Final = "bad-rows.jsonl"
PROGRESS_ROWS: Final = 1000
NOTHING_COUNTS: Final = (
    "no token of {samples} usable rows counts for the loss; expected some: look at hsx preview "
    "(dataset.zero_masks = 'allow' takes such a dataset)"
)
ADD_IDS: Final = (
    "no row has an 'id': name the field that has it in dataset.columns, or set dataset.ids = 'number', or add a field 'id' to "
    "every row, a string or an integer that no other row has"
)


@dataclass(frozen=True, slots=True)
class IndexSummary:
    """What the index holds.

    Attributes:
        samples: usable rows.
        tokens: tokens of all samples.
        longest: tokens of the longest one.
        rejected: bad rows that were skipped.
        reasons: how many of them for each reason; `samples` and these are all rows of the dataset.
        counted: tokens that count for the loss.
        unmasked: samples of which no token counts.
        cut: samples that were cut, because they were too long.
        histogram: samples by length bucket: the key is the bucket's upper bound in tokens, a power of two.
    """

    samples: int
    tokens: int
    longest: int
    rejected: int
    histogram: dict[int, int]
    reasons: dict[str, int] = field(default_factory=dict)
    counted: int = 0
    unmasked: int = 0
    cut: int = 0


def lacks_id(row: BadRow) -> bool:
    """Whether the row is bad because its field 'id' is missing, null or empty."""
    return row.reason == "missing_field" and row.message.startswith("field ") and not row.sample_id


def bucket_of(tokens: int) -> int:
    """Upper bound of the length bucket of a sample: the smallest power of two that is at least `tokens`."""
    return 1 << max(0, tokens - 1).bit_length()


def build_index(
    dataset: Dataset,
    group: Path,
    on_bad_row: Literal["refuse", "skip"],
    progress: Callable[[int, int], None],
    state_dir: Path,
    *,
    zero_masks: Literal["refuse", "allow"] = "allow",
) -> IndexSummary:
    """Reads the dataset front to back and writes the token index of the group. Blocks; memory does not grow with the rows.

    Args:
        dataset: where rows come from.
        group: folder of the store's Zarr group; made when it is missing.
        on_bad_row: `refuse` reads on to the end to find all bad rows, and then writes nothing.
        progress: called now and then with (rows read, tokens so far).
        state_dir: the complete list of bad rows is written here, to `bad-rows.jsonl`; removed when there is none.
        zero_masks: whether a dataset of which no token counts for the loss is refused.

    Raises:
        RunError: `dataset_rejected` (its message lists the first 50 bad rows and names the file with all of them),
            `dataset_empty`, `mask_empty`, `dataset_unreadable`, `store_unwritable`.
    """
    histogram: dict[int, int] = {}
    rows = tokens = longest = samples = counted = unmasked = cut = 0
    with _BadRows(state_dir / BAD_ROWS_FILE) as bad, TokenTableWriter(group) as writer:
        for rows, row in enumerate(dataset, 1):
            if isinstance(row, BadRow):
                bad.add(row)
            elif on_bad_row == "skip" or not bad.count:  # after a refusal only bad rows are looked for
                writer.add(row)
                length = len(row.input_ids)
                samples, tokens, longest = samples + 1, tokens + length, max(longest, length)
                bucket = bucket_of(length)
                histogram[bucket] = histogram.get(bucket, 0) + 1
                kept = int(np.count_nonzero(row.loss_mask))
                counted, unmasked, cut = counted + kept, unmasked + (not kept), cut + (row.cut > 0)
            if rows % PROGRESS_ROWS == 0:
                progress(rows, tokens)
        progress(rows, tokens)
        bad.close()
        if bad.count and on_bad_row == "refuse":
            raise RunError("dataset_rejected", bad.message(rows))
        if not samples:
            all_bad = "the only row is bad" if rows == 1 else f"all {rows} rows are bad"
            reason = f"; {all_bad}, see {bad.path}" if bad.count else ""
            reason += f"; {ADD_IDS}" if bad.count and bad.unnamed == rows else ""
            raise RunError("dataset_empty", f"the dataset has no usable row; expected at least one{reason}")
        if not counted and zero_masks == "refuse":
            raise RunError("mask_empty", NOTHING_COUNTS.format(samples=samples))
        reasons = dict(sorted(bad.reasons.items()))
        summary = IndexSummary(
            samples, tokens, longest, bad.count, dict(sorted(histogram.items())), reasons, counted, unmasked, cut
        )
        if rows != samples + sum(reasons.values()):
            raise RuntimeError(f"{rows} rows were read, {samples} accepted and {sum(reasons.values())} rejected")
        writer.finish(
            dataset.fingerprint(),
            {
                "rejected": bad.count,
                "histogram": {str(k): n for k, n in summary.histogram.items()},
                "rows": rows,
                "reasons": reasons,
                "counted": counted,
                "unmasked": unmasked,
                "cut": cut,
            },
        )
    return summary


def recorded_bad_rows(state_dir: Path) -> Iterator[BadRow]:
    """The bad rows that the last `build_index` met, in file order; none where it met none."""
    path = state_dir / BAD_ROWS_FILE
    if path.exists():
        with path.open(encoding="utf-8") as file:
            for line in file:
                yield BadRow(**json.loads(line))


class _BadRows:
    """All bad rows, on disk; the first ones also in memory, for the message."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.unnamed = 0
        self.reasons: Counter[str] = Counter()
        self._first: list[BadRow] = []
        self._file: TextIO | None = None

    def __enter__(self) -> Self:
        with self._translated():
            self.path.unlink(missing_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, row: BadRow) -> None:
        if self._file is None:
            with self._translated():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("w", encoding="utf-8")
        with self._translated():
            self._file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
        self.count += 1
        self.unnamed += lacks_id(row)
        self.reasons[row.reason] += 1
        if len(self._first) < SHOWN:
            self._first.append(row)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with self._translated(), file:
                file.flush()
                os.fsync(file.fileno())

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError("ledger_failed", f"{self.path} cannot be written: {error.strerror or error}") from error

    def message(self, rows: int) -> str:
        one = self.count == 1
        advice = ADD_IDS if self.unnamed == rows else f"on_bad_row = 'skip' leaves {'it' if one else 'them'} out"
        bad = f"{self.count} of {rows} row{'' if rows == 1 else 's'} {'is' if one else 'are'} bad"
        lines = [f"{bad} (all listed in {self.path}; {advice}):"]
        lines += [f"  {row.named}: {row.reason}: {row.message}" for row in self._first]
        if self.count > len(self._first):
            lines.append(f"  ... and {self.count - len(self._first)} more")
        return "\n".join(lines)
