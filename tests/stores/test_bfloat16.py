"""The Zarr data type bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.core.dtype import get_data_type_from_json

from hsx.stores.bfloat16 import BFloat16, DataTypeValidationError

if TYPE_CHECKING:
    from pathlib import Path


@given(st.floats(width=32, allow_nan=False))
def test_scalars_round_like_torch(value: float) -> None:
    expected = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16).view(torch.uint16).item()
    assert int(BFloat16().cast_scalar(value)) == expected


@given(st.integers(0, 0xFFFF))
def test_fill_values_survive_json(bits: int) -> None:
    dtype = BFloat16()
    document = dtype.to_json_scalar(np.uint16(bits), zarr_format=3)
    assert int(dtype.from_json_scalar(document, zarr_format=3)) == bits


def test_nan_is_spelled_nan() -> None:
    dtype = BFloat16()
    assert int(dtype.cast_scalar(float("nan"))) == 0x7FC0
    assert dtype.to_json_scalar(float("nan"), zarr_format=3) == "NaN"
    assert int(dtype.from_json_scalar("NaN", zarr_format=3)) == 0x7FC0


def test_name_gives_the_type_and_uint16_stays_uint16() -> None:
    assert get_data_type_from_json("bfloat16", zarr_format=3) == BFloat16()
    assert BFloat16().to_json(zarr_format=3) == "bfloat16"
    with pytest.raises(DataTypeValidationError, match="bfloat16 has no numpy dtype"):
        BFloat16.from_native_dtype(np.dtype(np.uint16))


def test_zarr_keeps_endian_in_the_codec(tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=(4,), dtype=BFloat16(), chunks=(4,), compressors=None, fill_value=float("nan")
    )
    array[:2] = np.array([1, 2], np.uint16)
    assert np.array_equal(np.asarray(array[:]), np.array([1, 2, 0x7FC0, 0x7FC0], np.uint16))
    assert '"endian": "little"' in (tmp_path / "a" / "zarr.json").read_text()


def test_big_endian_is_refused() -> None:
    with pytest.raises(ValueError, match="endianness 'big'; expected 'little'"):
        BFloat16(endianness="big")


def test_zarr_v2_is_refused() -> None:
    with pytest.raises(ValueError, match="zarr_format is 2; bfloat16 needs 3"):
        BFloat16().to_json(zarr_format=2)
    with pytest.raises(DataTypeValidationError, match="not part of Zarr v2"):
        BFloat16.from_json({"name": "<u2", "object_codec_id": None}, zarr_format=2)


@pytest.mark.parametrize("value", ["nan", None, [1], True])
def test_other_fill_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected a number"):
        BFloat16().from_json_scalar(value, zarr_format=3)
    with pytest.raises(TypeError, match="expected bits"):
        BFloat16().cast_scalar(value)
