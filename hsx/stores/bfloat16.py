"""The Zarr data type `bfloat16`: uint16 bits in numpy, the registered extension name in the metadata.

numpy has no bfloat16, so an array of this type reads and writes as uint16 and `.view(torch.bfloat16)` gives its meaning.
Fits zarr 3.1 to 3.4. Registered when this module is imported, which zarr does by itself where hsx is installed: zarr 3.4
through the entry-point group `zarr.data_type`, zarr 3.1, which lists that group but never loads it, through `zarr.buffer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal, Self, SupportsFloat, SupportsIndex, TypeGuard

import numpy as np
import zarr.core.dtype.common as _common
import zarr.errors
from zarr.core.buffer.cpu import Buffer
from zarr.core.dtype import data_type_registry
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.core.dtype.wrapper import ZDType

from hsx.core.layout import NAN_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zarr.core.dtype.common import DTypeJSON

__all__ = ["NAME", "BFloat16", "Buffer", "DataTypeValidationError"]

NAME: Final = "bfloat16"

# zarr moved the class from dtype.common (3.1) to errors (3.4); its registry only treats this very class as "not mine".
DataTypeValidationError: Final[type[ValueError]] = (
    getattr(zarr.errors, "DataTypeValidationError", None) or vars(_common)["DataTypeValidationError"]
)


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[np.dtypes.UInt16DType, np.uint16], HasItemSize, HasEndianness):
    """bfloat16, as uint16 bits, little endian only.

    It inherits `HasEndianness`, or zarr's bytes codec would leave `endian` out of the metadata, and other readers refuse
    the array. It never matches a native dtype: uint16 data is uint16 unless `bfloat16` is asked for by name.
    """

    dtype_cls = np.dtypes.UInt16DType
    _zarr_v3_name: ClassVar[Literal["bfloat16"]] = NAME

    def __post_init__(self) -> None:
        if self.endianness != "little":
            raise ValueError(f"bfloat16 has endianness {self.endianness!r}; expected 'little'")

    @classmethod
    def _check_native_dtype(cls, dtype: object) -> TypeGuard[np.dtypes.UInt16DType]:
        return False

    @classmethod
    def from_native_dtype(cls, dtype: object) -> Self:
        """Always raises DataTypeValidationError: no numpy dtype means bfloat16."""
        raise DataTypeValidationError(f"data type is {dtype}; bfloat16 has no numpy dtype and is asked for by name")

    def to_native_dtype(self) -> np.dtypes.UInt16DType:
        """Little-endian uint16, the bits."""
        return self.dtype_cls()  # native order, and hsx runs on little-endian machines only

    @classmethod
    def _from_json_v2(cls, data: DTypeJSON) -> Self:
        raise DataTypeValidationError(f"data type is {data!r}; bfloat16 is not part of Zarr v2")

    @classmethod
    def _from_json_v3(cls, data: DTypeJSON) -> Self:
        if data == NAME:
            return cls()
        raise DataTypeValidationError(f"data type is {data!r}; expected {NAME!r}")

    def to_json(self, zarr_format: Literal[2, 3]) -> Literal["bfloat16"]:  # type: ignore[override]  # v2 has no form of it
        """The name. Raises ValueError for Zarr v2."""
        if zarr_format != 3:
            raise ValueError(f"zarr_format is {zarr_format}; bfloat16 needs 3")
        return NAME

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, SupportsFloat | SupportsIndex)

    def cast_scalar(self, data: object) -> np.uint16:
        """The bits of a scalar. An integer is taken as the bits themselves, a float is rounded to nearest even.

        Raises TypeError for anything else.
        """
        if isinstance(data, np.integer | int) and not isinstance(data, bool):
            return np.uint16(int(data))
        if isinstance(data, np.floating | float):
            return _bits(float(data))
        raise TypeError(f"scalar is {data!r} of type {type(data).__name__}; expected bits as an integer, or a float")

    def default_scalar(self) -> np.uint16:
        """The bits of zero."""
        return np.uint16(0)

    def from_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> np.uint16:
        """Reads a fill value: a number, "NaN", "Infinity", "-Infinity", or the bits as "0x7fc0". Raises TypeError."""
        if isinstance(data, str):
            if data in _NAMED:
                return np.uint16(_NAMED[data])
            if data.startswith("0x") and len(data) == 6:
                return np.uint16(int(data, 16))
        elif isinstance(data, int | float) and not isinstance(data, bool):
            return _bits(float(data))
        raise TypeError(f"fill value is {data!r}; expected a number, 'NaN', 'Infinity', '-Infinity' or '0x' and 4 hex digits")

    def to_json_scalar(self, data: object, *, zarr_format: Literal[2, 3]) -> float | str:
        """Writes a fill value so that `from_json_scalar` gives the same bits."""
        bits = int(self.cast_scalar(data))
        for name, value in _NAMED.items():
            if bits == value:
                return name
        if bits & 0x7F80 == 0x7F80:
            return f"0x{bits:04x}"
        return float(np.array([bits << 16], np.uint32).view(np.float32)[0])

    @property
    def item_size(self) -> int:
        """Bytes of one value: 2."""
        return 2


_NAMED: Final[Mapping[str, int]] = {"NaN": NAN_BITS, "Infinity": 0x7F80, "-Infinity": 0xFF80}


def _bits(value: float) -> np.uint16:
    if value != value:
        return np.uint16(NAN_BITS)
    with np.errstate(over="ignore"):
        bits = int(np.float32(value).view(np.uint32))
    return np.uint16(min((bits & 0x7FFFFFFF) + 0x7FFF + (bits >> 16 & 1), 0x7F80FFFF) >> 16 | bits >> 16 & 0x8000)


data_type_registry.register(NAME, BFloat16)
