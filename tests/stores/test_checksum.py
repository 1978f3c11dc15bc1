"""crc32c is the same whoever computes it, and in however many pieces."""

from __future__ import annotations

import sys
import threading
from typing import cast

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.stores.checksum import combine, crc32c, crc32c_bytes


def of_zarr(data: bytes, start: int = 0) -> int:
    """The checksum as zarr-python takes it."""
    return cast("int", google_crc32c.extend(start, data))


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 3 << 20])
@pytest.mark.parametrize("start", [0, 0x89ABCDEF])
def test_the_checksum_is_that_of_google_crc32c(size: int, start: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, size + 1, np.uint8)[1:]
    assert crc32c(data, start) == of_zarr(data.tobytes(), start)


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined_checksums_are_that_of_the_whole(a: bytes, b: bytes) -> None:
    assert combine(of_zarr(a), crc32c_bytes(b), len(b)) == of_zarr(a + b)


@pytest.mark.parametrize("nbytes", [1, 3_670_016, 470_000_000, 2**33 + 7])
def test_what_is_behind_may_be_as_long_as_a_shard(nbytes: int) -> None:
    """Two steps give what one gives: nothing so long is made for it."""
    first, second = 0x12345678, 0x9ABCDEF0
    assert combine(combine(first, 0, nbytes), second, 5) == combine(first, combine(0, second, 5), nbytes + 5)


def test_what_does_not_lie_in_one_piece_is_refused() -> None:
    with pytest.raises((BufferError, ValueError)):
        crc32c(np.zeros(1 << 20, np.uint8)[::2])


def test_other_threads_run_meanwhile() -> None:
    """The interpreter lock is let go: a thread that waits for nothing else gets it, though nobody is made to hand it over."""
    data, ran, gate = np.zeros(64 << 20, np.uint8), list[bool](), threading.Lock()

    def waits() -> None:
        with gate:
            ran.append(True)

    usual = sys.getswitchinterval()
    # Before the thread is there: one that waits for the lock already would have it handed over after the usual time.
    sys.setswitchinterval(1000)
    try:
        for _ in range(1000):  # on a busy machine the thread may not come to it in the first ones
            ran.clear()  # the thread of the turn before has run by now, whoever held the lock
            gate.acquire()
            thread = threading.Thread(target=waits)
            thread.start()
            gate.release()
            crc32c(data)
            seen = bool(ran)
            thread.join()
            if seen:
                break
    finally:
        sys.setswitchinterval(usual)
    assert seen
