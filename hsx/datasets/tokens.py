"""Tokenised rows: `{"id": ..., "input_ids": [...]}`, with a loss mask in any of its forms or without one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.datasets.batch import TableFields
from hsx.datasets.masks import mask_of, require_whole
from hsx.datasets.rows import Limits, Naming, Records, checked_ids, fitted, rows_of
from hsx.records import Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.datasets.fields import Fields
    from hsx.records import BadRow


class TokenRows:
    """A `ports.Dataset` of tokenised rows.

    Without `loss_mask`, `labels` and `prompt_length` every token counts (all ones). Other fields are ignored.
    """

    def __init__(self, source: Records, limits: Limits, naming: Naming | None = None) -> None:
        self._source = source
        self._limits = limits
        self._naming = naming or Naming()

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see `ports.Dataset`."""
        return rows_of(self._source, self._row, self._naming)

    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the files, the format, and the limits and names that decide which rows are used."""
        return {
            "dataset.sha256": self._source.sha256(),
            "dataset.format": "tokens",
            **self._limits.fingerprint(),
            **self._naming.fingerprint(),
        }

    def _row(self, sample_id: str, fields: Fields, line: int) -> Row:
        columns = self._naming.columns
        if isinstance(fields, TableFields) and (clean := fields.clean(columns, self._limits)) is not None:
            return Row(sample_id, *clean, line)
        ids = checked_ids(fields.integers(columns.input_ids), self._limits)
        require_whole(fields)
        return fitted(sample_id, ids, mask_of(fields, columns, ids), self._limits, line)
