"""The loss mask of a tokenised row: given as such, as labels, or as the length of the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.json_words import kind_of
from hsx.datasets.fields import Bad, Columns, Fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

IGNORED: Final = -100
"""What labels have where a token does not count."""
MASKS: Final = ("loss_mask", "labels", "prompt_length")
"""The forms of a mask, and how their fields are called unless `dataset.columns` says otherwise."""
PADDING: Final = "attention_mask"


def mask_of(fields: Fields, columns: Columns, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    """uint8 [tokens] of 0 and 1: what the row says, in any of its forms; all ones where it has none of them.

    Raises Bad: `bad_mask` where a value is none that can be, or two forms contradict each other; `mask_length`; `bad_type`,
    `not_json`; `missing_field` where the job file names a field for it and the row has none.
    """
    forms: list[tuple[str, Callable[[Fields, str, NDArray[np.int32]], NDArray[np.uint8]]]] = [
        (columns.loss_mask, _from_mask),
        (columns.labels, _from_labels),
        (columns.prompt_length, _from_prompt),
    ]
    found = [(name, read(fields, name, ids)) for name, read in forms if fields.has(name)]
    if not found:
        named = [name for name, _ in forms if name not in MASKS]
        if named:
            raise Bad("missing_field", f"field {named[0]!r}, which dataset.columns names, is missing or null; expected a mask")
        return np.ones(len(ids), dtype=np.uint8)
    first, mask = found[0]
    for name, other in found[1:]:
        differing = np.flatnonzero(mask != other)
        if len(differing):
            at = int(differing[0])
            raise Bad("bad_mask", f"{first} says {mask[at]} of token {at}, and {name} says {other[at]}; expected them to agree")
    return mask


def require_whole(fields: Fields) -> None:
    """Raises Bad `bad_mask` where the row is padded: its `attention_mask` has a 0. One of another form says nothing."""
    if not fields.has(PADDING):
        return
    try:
        values = np.asarray(fields.integers(PADDING, flags=True), dtype=np.int64)
    except (Bad, OverflowError):
        return
    padded = np.flatnonzero(values == 0)
    if len(padded):
        raise Bad(
            "bad_mask", f"{PADDING}[{padded[0]}] is 0, and {len(padded)} of {len(values)} are; expected rows without padding"
        )


def _integers(fields: Fields, name: str, tokens: int, wanted: str, *, flags: bool = False) -> NDArray[np.int64]:
    try:
        values = np.asarray(fields.integers(name, flags=flags), dtype=np.int64)
    except OverflowError as error:
        raise Bad("bad_mask", f"{name} has a value of more than 64 bits; expected {wanted}") from error
    except Bad as bad:
        if bad.reason in ("bad_type", "out_of_vocabulary"):
            raise Bad("bad_mask", f"field {name!r} is not a list of {wanted}: {bad.message}") from bad
        raise
    if len(values) != tokens:
        raise Bad("mask_length", f"{name} has {len(values)} values; expected {tokens}, one for each of input_ids")
    return values


def _from_mask(fields: Fields, name: str, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    values = _integers(fields, name, len(ids), "0 and 1", flags=True)
    if len(values) and int(values.view(np.uint64).max()) > 1:  # as unsigned numbers negative ones are huge
        wrong = np.flatnonzero((values != 0) & (values != 1))
        raise Bad("bad_mask", f"{name}[{wrong[0]}] is {values[wrong[0]]}; expected 0 or 1")
    return values.astype(np.uint8)


def _from_labels(fields: Fields, name: str, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    values = _integers(fields, name, len(ids), f"token ids and {IGNORED}")
    counts = values != IGNORED
    wrong = np.flatnonzero(counts & (values != ids))
    if len(wrong):
        at = int(wrong[0])
        shifted = counts[:-1] & (values[:-1] == ids[1:])
        hint = (
            "; they look shifted by one, expected labels at the place of their token" if shifted.sum() == counts.sum() else ""
        )
        raise Bad(
            "bad_mask", f"{name}[{at}] is {values[at]}; expected {IGNORED} or {ids[at]}, the token that stands there{hint}"
        )
    return np.asarray(counts, dtype=np.uint8)


def _from_prompt(fields: Fields, name: str, ids: NDArray[np.int32]) -> NDArray[np.uint8]:
    length = fields.value(name)
    if isinstance(length, bool) or not isinstance(length, int):
        raise Bad("bad_type", f"field {name!r} is {kind_of(length)}; expected a number of tokens")
    if not 0 <= length <= len(ids):
        raise Bad("bad_mask", f"{name} is {length}; expected 0 to {len(ids)}, the tokens of the row")
    mask = np.ones(len(ids), dtype=np.uint8)
    mask[:length] = 0
    return mask
