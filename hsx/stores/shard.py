"""Writes shards: the one place where hidden states reach a disk.

The bytes go straight from the dump's mapping to the device where the file system has O_DIRECT, so that a sample costs one
checksum pass and no copy. A shard appears under its name only when it is whole and its data is on the disk; the name itself
is durable after `ShardRoot.sync`.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core.crc import combine
from hsx.core.layout import CRC_BYTES, MISSING, NAN_BITS, PAGE, StoreLayout, round_up, shard_key
from hsx.ports import Receipt
from hsx.stores.checksum import crc32c
from hsx.stores.durable import root_error, write_all

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

PARTIAL: Final = ".partial"
BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 256  # two buffers a block; the kernel takes 1024 in one call


class ShardWriter:
    """Writes the shards of one root into its folder. Threads may write different samples at once.

    Args:
        folder: the root's folder of this store, where the shards lie.
        root: the root's name, for messages.
        layout: the store's shape.
        direct: use O_DIRECT where the file system has it.
    """

    def __init__(self, folder: Path, root: str, layout: StoreLayout, *, direct: bool = True) -> None:
        self._folder = folder
        self._root = root
        self._layout = layout
        self._direct = direct
        self._local = threading.local()

    @property
    def direct(self) -> bool:
        """Whether O_DIRECT is (still) used: turned off by the first refusal of the file system."""
        return self._direct

    def write(self, index: int, marker: str, states: NDArray[np.uint16]) -> Receipt:
        """Writes the shard of sample `index`.

        Args:
            index: the sample; its shard of an earlier, uncommitted attempt is replaced.
            marker: the attempt's marker, part of the partial file's name.
            states: bf16 bits [tokens, L, H], C-contiguous; page-aligned for the best speed. Not changed, not copied.

        Raises:
            RunError: `roots_full` (ENOSPC, EDQUOT; found by preallocation, before the first byte), `root_unusable` (any other
                failure). The partial file is removed. A failed fdatasync is not tried again: the kernel tells of a loss once.
            ValueError: `states` does not fit the layout.
        """
        if states.dtype != np.uint16 or states.ndim != 3 or not states.flags.c_contiguous:
            raise ValueError(f"states are {states.dtype} {states.shape}; expected C-contiguous uint16 [tokens, L, H]")
        if states.shape[1:] != self._layout.shape[2:] or not 0 <= index < self._layout.samples:
            raise ValueError(f"sample {index} has states {states.shape}; the store is {self._layout.shape}")
        self._layout.check_tokens(states.shape[0])
        final = self._folder / shard_key(index)
        partial = self._folder / f"{final.name}.{marker}{PARTIAL}"
        size = self._layout.file_bytes(states.shape[0])
        try:
            try:
                fd = self._create(partial)
                try:
                    os.posix_fallocate(fd, 0, size)
                    crc = self._fill(fd, states)
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
                partial.rename(final)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
        except OSError as error:
            raise root_error(error, self._root, partial) from error
        return Receipt(root=self._root, nbytes=size, crc32c=crc)

    def _create(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        if self._direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct = False
        return os.open(path, flags, 0o644)

    def _fill(self, fd: int, states: NDArray[np.uint16]) -> int:
        """Writes all blocks and the index; returns the crc32c of the payload."""
        layout, tokens = self._layout, states.shape[0]
        chunk_bytes = layout.chunk_bytes
        straight = not self._direct or (states.ctypes.data % PAGE == 0 and chunk_bytes % PAGE == 0)
        # Of each chunk, `head` bytes are written from where they are; the rest, with the checksum, goes through scratch.
        scratch = self._scratch(chunk_bytes // PAGE * PAGE if straight else 0)
        flat = states.reshape(-1).view(np.uint8)
        whole, rest = divmod(tokens, layout.chunk_tokens)
        crcs: list[int] = []
        payload = 0
        offset = 0
        for first in range(0, whole, scratch.blocks):
            buffers: list[memoryview] = []
            for slot, chunk in enumerate(range(first, min(first + scratch.blocks, whole))):
                data = flat[chunk * chunk_bytes : (chunk + 1) * chunk_bytes]
                crcs.append(crc32c(data))
                payload = combine(payload, crcs[-1], chunk_bytes)
                tail = scratch.tails[slot]
                copied = chunk_bytes - scratch.head
                tail[:copied] = data[scratch.head :]
                tail[copied : copied + CRC_BYTES].view("<u4")[0] = crcs[-1]
                buffers += (data[: scratch.head].data, tail.data) if scratch.head else (tail.data,)
            offset = write_all(fd, buffers, offset)
        ending = scratch.ending[layout.block_bytes :]
        if rest:
            data = flat[whole * chunk_bytes :]
            ending = scratch.ending
            ending[: data.size] = data
            ending[data.size : chunk_bytes].view(np.uint16)[:] = NAN_BITS
            crcs.append(crc32c(ending[:chunk_bytes]))
            payload = crc32c(data, payload)
            ending[chunk_bytes : chunk_bytes + CRC_BYTES].view("<u4")[0] = crcs[-1]
        index = scratch.ending[-layout.index_bytes :]
        entries = index[:-CRC_BYTES].view("<u8").reshape(-1, 2)
        entries[:] = MISSING
        entries[: len(crcs), 0] = np.arange(len(crcs), dtype=np.uint64) * np.uint64(layout.block_bytes)
        entries[: len(crcs), 1] = chunk_bytes + CRC_BYTES
        index[-CRC_BYTES:].view("<u4")[0] = crc32c(index[:-CRC_BYTES])
        write_all(fd, [ending.data], offset)
        return payload

    def _scratch(self, head: int) -> _Scratch:
        """This thread's scratch; made anew when the way of writing changes, so that padding stays zero."""
        scratch: _Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None or scratch.head != head:
            scratch = self._local.scratch = _Scratch(self._layout, head)
        return scratch


class _Scratch:
    """Page-aligned buffers of one writer thread, used again for every shard.

    Attributes:
        head: bytes of a chunk that do not pass through here.
        blocks: how many blocks one call writes.
        tails: uint8 [blocks, block_bytes - head]: what follows the head of each block.
        ending: uint8, the last, partly filled block followed by the pages of the index.
    """

    def __init__(self, layout: StoreLayout, head: int) -> None:
        self.head = head
        self.blocks = min(max(BATCH_BYTES // layout.block_bytes, 1), BATCH_BLOCKS)
        tail = layout.block_bytes - head
        ending = layout.block_bytes + round_up(layout.index_bytes, PAGE)
        memory = np.frombuffer(mmap.mmap(-1, self.blocks * tail + ending), np.uint8)
        self.tails = memory[: self.blocks * tail].reshape(self.blocks, tail)
        self.ending = memory[self.blocks * tail :]
