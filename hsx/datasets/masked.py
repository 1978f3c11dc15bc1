"""Rows of a job that stores the tokens of the loss mask alone: one whose mask is zero everywhere is a bad row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hsx.records import BadRow, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hsx.ports import Dataset

REASON: Final = "no_loss"
MESSAGE: Final = (
    "loss_mask is zero everywhere, and storage.tokens = 'loss' would store nothing of the row; expected a token to train on"
)


class MaskedRows:
    """The rows of a dataset, of which those without a token to train on are bad; implements `ports.Dataset`.

    Args:
        dataset: where the rows come from.
        unit: what their numbers count, see `BadRow`.
    """

    def __init__(self, dataset: Dataset, unit: str = "line") -> None:
        self._dataset = dataset
        self._unit = unit

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order; see the port."""
        for row in self._dataset:
            if isinstance(row, Row) and not row.loss_mask.any():
                yield BadRow(row.line, row.sample_id, REASON, MESSAGE, self._unit)
            else:
                yield row

    def fingerprint(self) -> dict[str, str]:
        """That of the dataset: that its rows are judged by their masks follows from `storage.tokens`, which is the job's."""
        return self._dataset.fingerprint()
