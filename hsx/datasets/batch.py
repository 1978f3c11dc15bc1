"""Rows of one batch of a table: each by itself, or taken as it is where a look at the whole batch finds no fault in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hsx.datasets.clean import CleanRows
from hsx.datasets.columns import BatchColumns, Cells
from hsx.datasets.fields import Bad

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hsx.datasets.fields import Columns as Names
    from hsx.datasets.rows import Limits


class Batch(BatchColumns):
    """The columns of one batch, and which of its rows can be taken as they are."""

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        super().__init__(batch)
        self._clean: tuple[Names, Limits, CleanRows | None] | None = None

    def clean(self, names: Names, limits: Limits) -> CleanRows | None:
        """The rows that can be taken as they are; None where a column's type leaves none."""
        if self._clean is None or self._clean[0] is not names or self._clean[1] is not limits:
            try:
                found = CleanRows(self, names, limits) if names.input_ids in self.index else None
            except Bad:
                found = None
            self._clean = names, limits, found
        return self._clean[2]


class TableFields:
    """One row of a batch; see `fields.Fields`."""

    __slots__ = ("_columns", "_row")

    def __init__(self, columns: Batch, row: int) -> None:
        self._columns = columns
        self._row = row

    def types(self) -> dict[str, str]:
        """See `Fields`."""
        return {field.name: str(field.type) for field in self._columns.batch.schema}

    def has(self, name: str) -> bool:
        """See `Fields`."""
        cells = self._columns.cells(name)
        return cells is not None and cells.has(self._row)

    def value(self, name: str) -> Any:  # noqa: ANN401 - any of several types
        """See `Fields`."""
        try:
            return self._cells(name).value(self._row)
        except UnicodeDecodeError as error:
            raise Bad("bad_type", f"field {name!r} is not UTF-8 text: {error}") from error
        except ValueError as error:
            raise Bad("not_json", f"field {name!r} is declared to be JSON, and is not: {error}") from error

    def integers(self, name: str, *, flags: bool = False) -> NDArray[np.int64]:
        """See `Fields`."""
        self._cells(name)
        numbers = self._columns.numbers(name)
        if numbers.flags and not flags:
            raise Bad("bad_type", f"field {name!r} is a list of booleans; expected a list of integers")
        return numbers.row(self._row)

    def clean(self, names: Names, limits: Limits) -> tuple[NDArray[np.int32], NDArray[np.uint8]] | None:
        """Token ids and loss mask of a row in which nothing is wrong, see `CleanRows`; None: it has to be looked at."""
        rows = self._columns.clean(names, limits)
        return None if rows is None else rows.row(self._row)

    def _cells(self, name: str) -> Cells:
        """The column, which has a value here. Raises Bad `missing_field` where it has none."""
        cells = self._columns.cells(name)
        if cells is None or not cells.has(self._row):
            raise Bad("missing_field", f"field {name!r} is {'missing' if cells is None else 'null'}")
        return cells
