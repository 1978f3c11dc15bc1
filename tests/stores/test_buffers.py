"""Memory is used again when, and only when, nobody has it any more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from hsx.core.layout import PAGE
from hsx.stores.buffers import KEPT_BUFFERS, SMALL, BufferPool

ROWS = SMALL  # of one uint16: twice what is small


def address(array: np.typing.NDArray[np.uint16]) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_comes_back() -> None:
    pool = BufferPool()
    first = pool.empty((ROWS, 1))
    where = address(first)
    second = pool.empty((ROWS, 1))
    assert address(second) != where
    del first
    assert address(pool.empty((ROWS - 5, 1))) == where


def test_views_and_tensors_hold_their_memory() -> None:
    pool = BufferPool()
    for hold in (lambda a: a[ROWS // 2 :], lambda a: torch.from_numpy(a).view(torch.bfloat16)[3:7], lambda a: memoryview(a)):
        made = pool.empty((ROWS, 1))
        where = address(made)
        made[:] = 7
        held = hold(made)
        del made
        other = pool.empty((ROWS, 1))
        assert address(other) != where
        other[:] = 9
        del held, other
    assert len(pool._buffers) == 2


def test_what_is_kept_is_bounded() -> None:
    pool = BufferPool(kept_bytes=6 * SMALL)
    held = [pool.empty((ROWS, 1)) for _ in range(4)]  # the third and fourth are the caller's alone
    assert 4 * SMALL < pool._kept() <= 6 * SMALL
    assert len(pool._buffers) == 2
    del held
    large = pool.empty((2 * ROWS, 1))  # takes the room of those that are free and too small
    assert 4 * SMALL < pool._kept() <= 6 * SMALL
    assert len(pool._buffers) == 1
    assert large.size == 2 * ROWS


def test_the_number_of_pieces_is_bounded() -> None:
    pool = BufferPool()
    held = [pool.empty((ROWS, 1)) for _ in range(KEPT_BUFFERS + 9)]
    assert len(pool._buffers) == KEPT_BUFFERS
    del held
    assert pool.empty((9 * ROWS, 1)).size == 9 * ROWS  # takes the place of one that is free
    assert len(pool._buffers) == KEPT_BUFFERS


def test_small_arrays_do_not_take_large_memory() -> None:
    pool = BufferPool()
    large = pool.empty((8 * ROWS, 1))
    where = address(large)
    del large
    assert address(pool.empty((ROWS, 1))) != where
    assert address(pool.empty((8 * ROWS, 1))) == where


def test_shapes_are_as_asked() -> None:
    pool = BufferPool()
    for shape in ((0, 3, 8), (1, 3, 8), (1000, 3, 333), (999, 3, 333)):
        made = pool.empty(shape)
        assert (made.shape, made.dtype) == (shape, np.dtype(np.uint16))
        assert made.flags.c_contiguous
        assert made.flags.writeable


def test_threads_never_share_memory() -> None:
    pool = BufferPool()

    def work(value: int) -> bool:
        for _ in range(20):
            made = pool.empty((ROWS, 1))
            made[:] = value
            if not bool((made == value).all()):
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_large_memory_begins_on_a_page() -> None:
    """The kernel copies to pages in a third of the time; also where the memory is used again."""
    pool = BufferPool()
    for tokens in (1000, 1100, 900):
        made = pool.empty((tokens, 4, 512))
        assert made.ctypes.data % PAGE == 0
        assert made.shape == (tokens, 4, 512)
        del made
