"""The columns of one batch of a table, as numpy arrays and lists that are made once a batch, not as pyarrow's scalars.

A scalar of pyarrow takes a microsecond to make and as much to read, and a row of tokens asks for half a dozen fields. Lists of
numbers are slices of the batch's own buffers, without a Python object a token; so `list`, `large_list` and fixed-size lists of
any integer type cost the same.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hsx.datasets.fields import Bad

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

TAKEN_WHOLE: Final = 4 << 20
"""Bytes of a column that are turned into Python values at once; a larger one (text) is read value by value."""


class BatchColumns:
    """The columns of one batch, each prepared when it is first asked for.

    Args:
        batch: a `pyarrow.RecordBatch`.
    """

    def __init__(self, batch: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        self.batch = batch
        self.index = {name: number for number, name in enumerate(batch.schema.names)}
        self._cells: dict[str, Cells] = {}
        self._numbers: dict[str, Numbers | Bad] = {}

    def valid(self, name: str) -> NDArray[np.bool_]:
        """bool [rows]: whether the column has a value."""
        cells = self.cells(name)
        return np.zeros(self.batch.num_rows, dtype=np.bool_) if cells is None else cells.valid()

    def whole(self, name: str) -> NDArray[Any] | None:
        """[rows] of a column of integers, 0 where it has none; None where the column is of another type."""
        from pyarrow import types

        column = self.batch.column(self.index[name])
        return column.fill_null(0).to_numpy(zero_copy_only=False) if types.is_integer(column.type) else None

    def cells(self, name: str) -> Cells | None:
        """The column as Python values; None where the batch has none of this name."""
        found = self._cells.get(name)
        if found is None and name in self.index:
            found = self._cells[name] = Cells(self.batch.column(self.index[name]))
        return found

    def numbers(self, name: str) -> Numbers:
        """The column as lists of numbers. Raises Bad `bad_type` where it is no list of integers or booleans."""
        found = self._numbers.get(name)
        if found is None:
            try:
                found = Numbers(name, self.batch.column(self.index[name]))
            except Bad as bad:
                found = bad
            self._numbers[name] = found
        if isinstance(found, Bad):
            raise Bad(found.reason, found.message)
        return found


class Cells:
    """A column as Python values, and which of them are not null."""

    def __init__(self, column: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        from pyarrow import types

        kind = column.type
        self._column = column
        # Of these pyarrow does not know the nulls by a bitmap of the column's own.
        self._coded = types.is_dictionary(kind)
        self._indirect = self._coded or types.is_union(kind) or types.is_run_end_encoded(kind)
        self._valid: list[bool] | None = None
        if not self._indirect and column.null_count:
            self._valid = column.is_valid().to_numpy(zero_copy_only=False).tolist()
        plain = types.is_integer(kind) or types.is_string(kind) or types.is_large_string(kind)
        self._plain = plain and column.nbytes <= TAKEN_WHOLE
        self._values: list[Any] | None = None
        self._shaped = None if self._plain else shaper(kind)

    def has(self, row: int) -> bool:
        """Whether the value is not null."""
        if self._indirect:
            scalar = self._column[row]
            return bool(scalar.is_valid and (not self._coded or scalar.value.is_valid))
        return self._valid is None or self._valid[row]

    def valid(self) -> NDArray[np.bool_]:
        """bool [rows]: likewise, of all rows."""
        if self._valid is None and not self._indirect:
            return np.ones(len(self._column), dtype=np.bool_)
        return np.array([self.has(row) for row in range(len(self._column))], dtype=np.bool_)

    def value(self, row: int) -> Any:  # noqa: ANN401 - any of several types
        """The value, without the nulls that a column of objects gives a row for fields of other rows.

        Raises ValueError for text that is not UTF-8, or not JSON where the column's type says so.
        """
        if self._plain and self._values is None:
            try:
                self._values = self._column.to_pylist()
            except UnicodeDecodeError:  # of one row, perhaps: only that one is bad
                self._plain = False
        if self._values is not None:
            return self._values[row]
        value = self._column[row].as_py()
        return value if self._shaped is None else self._shaped(value)


class Numbers:
    """A column of lists of integers or booleans as two arrays of numpy: all values, and where each row begins.

    Args:
        name: the column's.
        column: a `pyarrow.Array`.

    Attributes:
        starts, stops: int64 [rows]: where each row is among the values; what a null's say means nothing.
        flat: [values] of the column's own type; 0 where one is null.
        nulls: bool [values]: which are null; None where none is.
        flags: whether they are booleans.

    Raises Bad `bad_type` where it is no list of integers or booleans.
    """

    def __init__(self, name: str, column: Any) -> None:  # noqa: ANN401 - pyarrow has no types
        from pyarrow import types

        kind = column.type
        listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
        if not listed or not (types.is_integer(kind.value_type) or types.is_boolean(kind.value_type)):
            raise Bad("bad_type", f"field {name!r} is of type {kind}; expected a list of integers")
        self.flags = types.is_boolean(kind.value_type)
        self._name = name
        if types.is_fixed_size_list(kind):
            offsets = (np.arange(len(column) + 1, dtype=np.int64) + column.offset) * kind.list_size
        else:
            offsets = column.offsets.to_numpy().astype(np.int64)
        self.starts: NDArray[np.int64] = offsets[:-1]
        self.stops: NDArray[np.int64] = offsets[1:]
        values = column.values
        self.nulls: NDArray[np.bool_] | None = None
        if values.null_count:
            self.nulls = values.is_null().to_numpy(zero_copy_only=False)
            values = values.fill_null(False if self.flags else 0)
        self.flat: NDArray[Any] = values.to_numpy(zero_copy_only=False)
        self._wide = self.flat.dtype == np.uint64

    def row(self, row: int) -> NDArray[np.int64]:
        """int64 [tokens] of one row. Raises Bad `bad_type` for a null in it, `out_of_vocabulary` from 2^63."""
        start, stop = int(self.starts[row]), int(self.stops[row])
        values = self.flat[start:stop]
        if self.nulls is not None and self.nulls[start:stop].any():
            raise Bad("bad_type", f"field {self._name!r} has a null in it; expected a list of integers")
        if self._wide and len(values) and int(values.max()) >> 63:
            raise Bad("out_of_vocabulary", f"field {self._name!r} has the value {int(values.max())}")
        return values.astype(np.int64)


def shaper(kind: Any) -> Callable[[Any], Any] | None:  # noqa: ANN401 - pyarrow has no types
    """What makes a value of this type what the row's writer meant; None where nothing is to be done.

    A column of objects gives each row the fields of all rows, null where it has none of its own: those are left out. What the
    type `arrow.json` holds (`datasets` writes it for turns of several forms) is decoded; a null in it is the writer's own.
    """
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: None if value is None else json.loads(value)
    if types.is_struct(kind):
        fields = {kind.field(number).name: shaper(kind.field(number).type) for number in range(kind.num_fields)}

        def shape(value: Any) -> Any:  # noqa: ANN401 - any of several types
            if value is None:
                return None
            return {
                name: inner if (within := fields[name]) is None else within(inner)
                for name, inner in value.items()
                if inner is not None
            }

        return shape
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        each = shaper(kind.value_type)
        return None if each is None else lambda value: None if value is None else [each(inner) for inner in value]
    return None
