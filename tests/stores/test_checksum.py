"""crc32c is the same however it is computed."""

from __future__ import annotations

import _ctypes
from typing import cast

import google_crc32c
import numpy as np
import pytest

from hsx.stores.checksum import c_function, crc32c


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3 << 20])
@pytest.mark.parametrize("start", [0, 0x89ABCDEF])
def test_the_checksum_is_that_of_google_crc32c(size: int, start: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size + 1, np.uint8)[1:]
    assert crc32c(data, start) == cast("int", google_crc32c.extend(start, data.tobytes()))


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        crc32c(np.zeros(1 << 20, np.uint8)[::2])


def test_extensions_that_do_not_offer_it_are_done_without() -> None:
    assert c_function(None) is None
    assert c_function(_ctypes) is None
