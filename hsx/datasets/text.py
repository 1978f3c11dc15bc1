"""Rows of text that was formatted beforehand: `{"id": ..., "text": "..."}`, with all the special tokens that it needs in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsx.core.json_words import kind_of
from hsx.datasets.agreement import require_agreement
from hsx.datasets.fields import Bad
from hsx.datasets.rows import Limits, Naming, Records, checked_ids, fitted, rows_of
from hsx.datasets.spans import span_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.datasets.fields import Fields
    from hsx.datasets.tokenizer import RawTokenizer
    from hsx.records import BadRow, Row


class TextRows:
    """A `ports.Dataset` of formatted text. No special token is added: the text has them.

    Args:
        source: the files.
        limits: what a usable row keeps to.
        tokenizer: the model's.
        markers: the texts before and after what counts for the loss, such as `<|im_start|>assistant\\n` and `<|im_end|>`; the
            second counts itself. None: every token counts.
        naming: the names of the fields.
        alike: whether a tokenizer that transformers loads otherwise is refused, before the first row is read.
    """

    def __init__(
        self,
        source: Records,
        limits: Limits,
        tokenizer: RawTokenizer,
        markers: tuple[str, str] | None = None,
        naming: Naming | None = None,
        *,
        alike: bool = True,
    ) -> None:
        self._source = source
        self._limits = limits
        self._tokenizer = tokenizer
        self._markers = markers
        self._naming = naming or Naming()
        self._alike = alike

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see `ports.Dataset`. Raises RunError `chat_unavailable` too, see `agreement`."""
        if self._alike:
            require_agreement(self._tokenizer)
        return rows_of(self._source, self._row, self._naming)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the files and of the tokenizer, and what decides how rows are read."""
        return {
            "dataset.sha256": self._source.sha256(),
            "dataset.format": "text",
            "dataset.tokenizer": self._tokenizer.sha256,
            **({"dataset.text_markers": repr(self._markers)} if self._markers else {}),
            **self._limits.fingerprint(),
            **self._naming.fingerprint(),
        }

    def _row(self, sample_id: str, fields: Fields, line: int) -> Row:
        name = self._naming.columns.text
        text = fields.value(name)
        if not isinstance(text, str):
            raise Bad("bad_type", f"field {name!r} is {kind_of(text)}; expected text")
        if self._limits.too_long == "reject":
            self._tokenizer.require_room(text, self._limits.max_tokens)
        tokens, offsets = self._tokenizer.encode(text)
        self._tokenizer.require_single_start(tokens)
        ids = checked_ids(tokens, self._limits)
        mask = np.ones(len(ids), dtype=np.uint8)
        if self._markers is not None:
            mask = span_mask(text, offsets, marked(text, *self._markers))
        return fitted(sample_id, ids, mask, self._limits, line)


def marked(text: str, begin: str, end: str) -> list[tuple[int, int]]:
    """[start, end) in characters of what stands after each `begin`, up to and with the next `end`, or to the text's end.

    Raises Bad `bad_mask` where another `begin` comes before the `end`: what stands between them is someone else's.
    """
    spans, at = [], 0
    while (found := text.find(begin, at)) >= 0:
        start = found + len(begin)
        close = text.find(end, start)
        at = len(text) if close < 0 else close + len(end)
        again = text.find(begin, start, at)
        if again >= 0:
            raise Bad("bad_mask", f"{begin!r} at character {found} is followed by another at {again}; expected {end!r} between")
        spans.append((start, at))
    return spans
