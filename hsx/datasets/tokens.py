"""Tokenised rows: `{"id": ..., "input_ids": [...], "loss_mask": [...]}`, the mask optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from hsx.datasets.rows import Bad, Limits, checked_ids, rows_of
from hsx.ports import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from hsx.datasets.jsonl import JsonlFile

_INTEGERS: Final = msgspec.json.Decoder(list[int])
_MASK: Final = msgspec.json.Decoder(list[int | bool])


class TokenRows:
    """A `ports.Dataset` of tokenised rows.

    Without a `loss_mask` every token counts (all ones). Fields other than the three are ignored.
    """

    def __init__(self, file: JsonlFile, limits: Limits) -> None:
        self._file = file
        self._limits = limits

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see `ports.Dataset`."""
        return rows_of(self._file, self._row)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the file, its format, and the limits that decide which rows are used."""
        return {
            "dataset.sha256": self._file.sha256(),
            "dataset.format": "tokens",
            "dataset.max_tokens": str(self._limits.max_tokens),
            "dataset.vocab_size": str(self._limits.vocab_size),
        }

    def _row(self, sample_id: str, fields: dict[str, msgspec.Raw], line: int) -> Row:
        ids = checked_ids(_integers(fields), self._limits)
        return Row(sample_id, ids, _mask(fields, len(ids)), line)


def _integers(fields: dict[str, msgspec.Raw]) -> list[int]:
    raw = fields.get("input_ids")
    if raw is None or bytes(raw) == b"null":
        raise Bad("missing_field", f"field 'input_ids' is {'missing' if raw is None else 'null'}")
    try:
        return _INTEGERS.decode(raw)
    except msgspec.ValidationError as error:
        if "out of range" in str(error):  # thousands of digits: an integer, but no id
            raise Bad("out_of_vocabulary", f"field 'input_ids': {error}") from error
        raise Bad("bad_type", f"field 'input_ids' is not a list of integers: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Bad("not_json", f"field 'input_ids': {error}") from error


def _mask(fields: dict[str, msgspec.Raw], tokens: int) -> NDArray[np.uint8]:
    raw = fields.get("loss_mask")
    if raw is None or bytes(raw) == b"null":
        return np.ones(tokens, dtype=np.uint8)
    try:
        values = _MASK.decode(raw)
    except msgspec.ValidationError as error:
        raise Bad("bad_mask", f"field 'loss_mask' is not a list of 0 and 1: {error}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise Bad("not_json", f"field 'loss_mask': {error}") from error
    if len(values) != tokens:
        raise Bad("mask_length", f"loss_mask has {len(values)} values; expected {tokens}, one for each of input_ids")
    at = next((i for i, value in enumerate(values) if value not in (0, 1)), None)
    if at is not None:
        raise Bad("bad_mask", f"loss_mask[{at}] is {values[at]}; expected 0 or 1")
    return np.array(values, dtype=np.uint8)
