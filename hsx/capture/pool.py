"""A bounded pool of host buffers, in which states wait for the writer thread. Torch only; knows no files and no markers.

The pool is cut into slabs of one size, a power of two: nothing fragments, a slab that comes free serves whoever is next, and
pinned memory, which PyTorch rounds up to a power of two (`CachingHostAllocator`), takes no more than was promised. A slab holds
rows of states and, behind them, the ids of their tokens.

All slabs lie in memory that another process can map (`memory`), which writes them to files. On a CPU its pages are taken when
they are first needed. With CUDA all of it is pinned at once, at install: pinning waits for the device.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from hsx.capture.memory import SharedMemory, address
from hsx.capture.model import CaptureRefusedError
from hsx.core.dump import ID_BYTES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

SLAB_BYTES: Final = 8 << 20
"""Size of a slab, unless the whole pool is small: large enough that a copy or a write costs more than its call."""
_SHARE: Final = 4
"""A small pool is cut into so many slabs at least, so that one can be written while the next is filled."""
_IDS_ALIGNMENT: Final = 64


@dataclass(slots=True, eq=False)
class Slab:
    """One buffer of the pool.

    Attributes:
        states: [rows, L, H] in the pool's dtype.
        ids: int32 [rows].
        bits: the same memory as `states`, as uint16 [rows, L, n]: what is written of a bfloat16 pool, where n is H.
        ids_array: the same memory as `ids`.
        event: recorded behind the copies into this slab; None where copies are done when they return.
        users: how many still need what is in it. Kept by `Staging`, under its lock.
    """

    states: torch.Tensor
    ids: torch.Tensor
    bits: NDArray[np.uint16]
    ids_array: NDArray[np.int32]
    event: torch.cuda.Event | None
    users: int = 0


class Pool:
    """Hands out slabs, and waits for one where all are taken. Thread-safe.

    Args:
        nbytes: bytes of all slabs together, at most.
        states: L.
        hidden_size: H.
        dtype: bfloat16, or float32 for the test aid.
        pinned: whether the memory is pinned, for asynchronous copies from a CUDA device.

    Raises:
        CaptureRefusedError: not even one token has room.
    """

    def __init__(self, nbytes: int, states: int, hidden_size: int, dtype: torch.dtype, *, pinned: bool = False) -> None:
        self._shape, self._dtype, self._pinned = (states, hidden_size), dtype, pinned
        row = states * hidden_size * dtype.itemsize
        least = row + ID_BYTES + _IDS_ALIGNMENT
        self.slab_bytes = min(SLAB_BYTES, _power_of_two_within(nbytes // _SHARE))
        """Bytes of one slab."""
        if self.slab_bytes < least:
            self.slab_bytes = 1 << (least - 1).bit_length()
        self.rows = (self.slab_bytes - _IDS_ALIGNMENT) // (row + ID_BYTES)
        """Tokens that one slab holds."""
        self._limit = nbytes // self.slab_bytes
        if not self._limit:
            raise CaptureRefusedError(
                f"capture.staging_bytes is {nbytes}; expected at least {self.slab_bytes}, in which one token's states have room"
            )
        self.memory = _shared_memory(self.limit_bytes, pinned=pinned)
        """Where all slabs lie; None where such memory cannot be had, or not pinned: each slab has memory of its own then."""
        self._changed = threading.Condition()
        self._made = self._used = self._peak = self._returned = 0
        self._stuck = -1
        self._blocked_ns = 0
        self._free: list[Slab] = [self._make() for _ in range(self._limit)] if pinned else []

    @property
    def capacity(self) -> int:
        """Tokens that the whole pool holds."""
        return self._limit * self.rows

    @property
    def limit_bytes(self) -> int:
        """Bytes of all slabs together."""
        return self._limit * self.slab_bytes

    @property
    def staged_bytes(self) -> int:
        """Bytes of the slabs in use."""
        return self._used * self.slab_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that `staged_bytes` has been."""
        return self._peak * self.slab_bytes

    @property
    def blocked_ns(self) -> int:
        """Nanoseconds that `take` has waited so far."""
        return self._blocked_ns

    def take(self, until: float) -> Slab | None:
        """A slab; None where none came free by then.

        Whoever has waited in vain is the last one who waits: until a slab comes back, everybody else is refused at once. Else a
        disk that hangs would hold up each forward for as long.

        Args:
            until: on the monotonic clock, seconds; in the past: without waiting.
        """
        with self._changed:
            if not self._free and self._made < self._limit:
                self._free.append(self._make())
            if not self._free and self._stuck != self._returned:
                self._wait(until)
            if not self._free:
                return None
            self._used += 1
            self._peak = max(self._peak, self._used)
            return self._free.pop()

    def give_back(self, slab: Slab) -> None:
        """Nobody needs the slab any more."""
        with self._changed:
            self._used -= 1
            self._returned += 1
            self._free.append(slab)  # the last one first: its memory is still in the caches
            self._changed.notify()

    def _wait(self, until: float) -> None:
        began = time.perf_counter_ns()
        while not self._free and (left := until - time.monotonic()) > 0:
            self._changed.wait(left)
        self._blocked_ns += time.perf_counter_ns() - began
        if not self._free:
            self._stuck = self._returned

    def _make(self) -> Slab:
        if self.memory is not None:
            memory = torch.from_numpy(self.memory.bytes[self._made * self.slab_bytes : (self._made + 1) * self.slab_bytes])
        else:
            memory = torch.empty(self.slab_bytes, dtype=torch.uint8, pin_memory=self._pinned)
        states_bytes = self.rows * self._shape[0] * self._shape[1] * self._dtype.itemsize
        ids_at = -(-states_bytes // _IDS_ALIGNMENT) * _IDS_ALIGNMENT
        states = memory[:states_bytes].view(self._dtype).view(self.rows, *self._shape)
        ids = memory[ids_at : ids_at + self.rows * ID_BYTES].view(torch.int32)
        bits = states.view(torch.uint16).numpy()
        # It sleeps instead of spinning: the writer thread shares its core with the scheduler.
        event = torch.cuda.Event(blocking=True) if self._pinned else None  # type: ignore[no-untyped-call] # torch has no types here
        self._made += 1
        return Slab(states, ids, bits, ids.numpy(), event)


def _shared_memory(nbytes: int, *, pinned: bool) -> SharedMemory | None:
    """Memory for another process to map, pinned where wanted. None, and a line in the log, where it cannot be had.

    Pinned as SGLang itself pins a shared mapping of a memfd (`multimodal_gen/runtime/entrypoints/utils.py`), and with its pages
    there before: those that only appear later the device might not see (`mem_cache/storage/mmap/mmap_allocator.py`).
    """
    try:
        memory = SharedMemory(nbytes)
    except OSError as error:
        log.warning("capture.memory_unshared bytes=%d reason=%s", nbytes, error)
        return None
    try:
        refusal = _pin(memory) if pinned else ""
    except RuntimeError as error:  # torch's word for whatever a driver says
        refusal = str(error)
    if refusal:
        memory.close()
        log.warning("capture.memory_unshared bytes=%d reason=%s", nbytes, refusal)
        return None
    return memory


def _pin(memory: SharedMemory) -> str:
    """Pins shared memory for CUDA; why that is refused, or ""."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch has no types here
    memory.bytes[:: mmap.PAGESIZE] = 0
    error = int(runtime.cudaHostRegister(address(memory.bytes), len(memory.bytes), 0))
    if not error and torch.from_numpy(memory.bytes).is_pinned():
        return ""
    if not error:
        runtime.cudaHostUnregister(address(memory.bytes))
        return "torch does not take registered memory for pinned"
    # The runtime keeps the error for whoever asks next, which would be the model's next launch.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return f"cudaHostRegister: error {error}"


def _power_of_two_within(nbytes: int) -> int:
    return 1 << max(0, nbytes.bit_length() - 1)
