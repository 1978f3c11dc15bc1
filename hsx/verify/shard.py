"""Judges one shard: reads it, proves it, and where that fails finds out what happened to it.

It is read in pieces, so that memory does not grow with the samples. Several threads read shards of one root, more than may look
at what they have read at a time: while some compute, the others keep the disk at work, from one shard into the next.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import threading
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from hsx.core import invariants
from hsx.core.dump import DumpHeader
from hsx.core.layout import PAGE
from hsx.core.marker import Marker
from hsx.core.spec import BF16_BYTES
from hsx.errors import RunError
from hsx.stores.checksum import crc32c, ids_digest
from hsx.stores.reduced import decode
from hsx.stores.selection import digest
from hsx.stores.shard_reader import ShardError, ShardFile, read_record
from hsx.verify.content import ContentJudge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.layout import StoreLayout
    from hsx.core.shard_record import ShardRecord
    from hsx.stores.reader import Store

PIECE_BYTES: Final = 4 << 20
"""At most so much is read at once, in whole inner chunks, of which one may be larger."""
READERS: Final = 4
"""So many threads read for each one that may compute; what they wait for is in flight at the disk. Each holds one piece."""
_ZEROS_BYTES: Final = 2 << 20
AHEAD_BYTES: Final = 8 << 20
"""So far ahead of the reading the kernel is asked to read: enough to keep a fast disk busy."""
SECTOR: Final = 512
"""Real states have no run of zeros as long as this; disks lose nothing shorter."""
_AT_ONCE: Final = nullcontext()
IDENTITY: Final = ("store", "index", "marker", "tokens", "layers", "final", "hidden_size", "rows", "kept", "dtype")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the shard of a committed sample has to be; None where nothing tells.

    Attributes:
        index: the sample.
        tokens: its tokens, out of the token arrays.
        root: name of the root where it lies.
        path: its shard.
        nbytes: size of the shard file.
        crc32c: of the payload.
        marker: the attempt whose dump was stored.
    """

    index: int
    tokens: int
    root: str
    path: Path
    nbytes: int | None = None
    crc32c: int | None = None
    marker: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a shard: one of `hsx.verify.KINDS`, and what was expected and found."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Proof:
    """What became of reading one shard: the bytes of its file, and what is wrong; nothing is: it is proved."""

    nbytes: int
    findings: tuple[Finding, ...]


class Stopped(Exception):  # noqa: N818 - not an error
    """The verification is given up; says nothing of the shard."""


class ShardProver:
    """Proves shards; threads may do so at once.

    Args:
        store: the store.
        cold: read from the disk, not from the kernel's cache, and leave nothing in it.
        stopped: asked between pieces; True gives up.
    """

    def __init__(self, store: Store, *, cold: bool = False, stopped: Callable[[], bool] = lambda: False) -> None:
        self._store = store
        self._layout = store.info.layout
        self._cold = cold
        self._direct = cold and self._layout.codec == "none" and self._layout.chunk_bytes % PAGE == 0
        self._stopped = stopped
        self._local = threading.local()
        chunks = min(max(PIECE_BYTES // self._layout.chunk_bytes, 1), self._layout.shard_chunks)
        self._step = chunks * self._layout.chunk_tokens

    def look(self, expected: Expected) -> list[Finding]:
        """What can be said of a shard without reading it."""
        path = expected.path
        try:
            size = path.stat().st_size
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            return [Finding("missing" if missing else "unreadable", f"shard {path}: {error.strerror}")]
        if expected.nbytes is not None and size != expected.nbytes:
            kind = "truncated" if size < expected.nbytes else "size"
            return [Finding(kind, f"shard {path} has {size} bytes; expected {expected.nbytes}")]
        return []

    def prove(self, expected: Expected, turn: AbstractContextManager[object] = _AT_ONCE) -> Proof:
        """Reads one shard and judges it, piece by piece; holds `turn` while it computes, not while it reads. Raises Stopped."""
        found = self.look(expected)
        if found and found[0].kind in ("missing", "unreadable"):
            return Proof(0, tuple(found))
        with reading_ahead(expected.path, cold=self._cold) as ahead:
            return self._prove(expected, found, ahead, turn)

    def _prove(
        self, expected: Expected, found: list[Finding], ahead: Callable[[int], None], turn: AbstractContextManager[object]
    ) -> Proof:
        ids, unsound = self._ids(expected.index)
        record, no_record = self._record(expected.path)
        if record is not None:
            same = ids is not None and record.ids == ids_digest(ids)
            foreign = self._foreign(expected, record, same=same)
            if foreign:
                return Proof(0, (Finding("record", foreign),))
            if ids is not None and not same:
                unsound = [Finding("ids", f"shard {expected.path} was made of other ids than the token arrays have")]
        if found and found[0].kind == "truncated":
            return Proof(0, (*found, *unsound))
        size = 0
        try:
            positions = self._kept(expected)
            if positions is not None and ids is not None:
                ids = ids[positions]  # of two equal ids, the states before the first layer are equal
            with ShardFile(expected.path, self._layout, expected.tokens if positions is None else len(positions)) as shard:
                size = shard.nbytes
                crc, violations = self._read(shard, expected, ids, ahead, turn)
        except ShardError as error:
            cause = diagnose(expected.path, self._layout, error)
            return Proof(size, (*found, cause, *unsound))
        for wanted, whose in ((expected.crc32c, "as committed"), (record and record.crc32c, "by the shard's own record")):
            if wanted is not None and crc != wanted:
                found.append(Finding("crc32c", f"shard {expected.path} holds payload {crc:08x}; expected {wanted:08x} {whose}"))
                break
        return Proof(size, (*found, *no_record, *unsound, *violations))

    def _ids(self, index: int) -> tuple[NDArray[np.int32] | None, list[Finding]]:
        try:
            return self._store.input_ids_numpy(index), []
        except RunError as error:
            return None, [Finding("ids", f"the ids of the sample cannot be read: {error.message}")]

    def _kept(self, expected: Expected) -> NDArray[np.int64] | None:
        """The tokens whose rows the shard has to hold; None for all of them. Raises ShardError."""
        if not self._layout.selects:
            return None
        try:
            return self._store.positions_numpy(expected.index)
        except RunError as error:
            raise ShardError("tokens", expected.path, f"holds nobody knows which tokens: {error.message}") from error

    def _record(self, path: Path) -> tuple[ShardRecord | None, list[Finding]]:
        if not self._layout.records:
            return None, []
        try:
            return read_record(path, self._layout), []
        except ShardError as error:
            return None, [Finding(error.problem, error.message)]

    def _foreign(self, expected: Expected, record: ShardRecord, *, same: bool) -> str:
        """Whose shard it is, where the record says that it is not this sample's; "" where it is.

        One that was made of the `same` ids is its own, too, if it is of the attempt that was committed.
        """
        info = self._store.info
        wanted = {
            "store": info.store_id,
            "index": record.index if same else expected.index,
            "marker": record.marker if expected.marker is None else expected.marker,
            "tokens": expected.tokens,
            "layers": tuple(info.spec.layers),
            "final": info.spec.final,
            "hidden_size": self._layout.hidden_size,
            "dtype": self._layout.dtype,
            **self._wanted_rows(expected, record),
        }
        for name in IDENTITY:
            given = getattr(record, name)
            if given != wanted[name]:
                return (
                    f"shard {expected.path} is that of sample {record.index}, marker {record.marker}, by its own record: "
                    f"{name} is {given}; expected {wanted[name]}"
                )
        return ""

    def _wanted_rows(self, expected: Expected, record: ShardRecord) -> dict[str, int | str]:
        """What the record has to say of the rows. Where the loss mask cannot be read, `_kept` tells, and here anything goes."""
        try:
            positions = self._kept(expected)
        except ShardError:
            return {"rows": record.rows, "kept": record.kept}
        return {"rows": 0, "kept": ""} if positions is None else {"rows": len(positions), "kept": digest(positions)}

    def _read(
        self,
        shard: ShardFile,
        expected: Expected,
        ids: NDArray[np.int32] | None,
        ahead: Callable[[int], None],
        turn: AbstractContextManager[object],
    ) -> tuple[int, list[Finding]]:
        """The crc32c of the payload, and the content invariants that do not hold. Raises ShardError, Stopped."""
        layout, tokens = self._layout, shard.rows
        content = ContentJudge(layout.states, layout.chunk_tokens)
        payload = 0
        end = layout.chunks(tokens) * layout.chunk_tokens
        for start in range(0, end, self._step):
            if self._stopped():
                raise Stopped
            stop = min(start + self._step, end)
            first, read = start // layout.chunk_tokens, self._buffer(stop - start)
            rows, filled = read[: tokens - start], read[tokens - start :]
            if not self._direct or layout.dtype != "bf16":
                ahead(stop // layout.chunk_tokens * layout.block_bytes)
            if layout.dtype != "bf16":
                with turn:
                    stored = shard.read(start, min(stop, tokens), rows)
                    payload = crc32c(stored.reshape(-1).view(np.uint8), payload)
                    content.add(decode(stored, layout))
                continue
            if layout.codec != "none":
                with turn:
                    content.add(shard.read(start, min(stop, tokens), rows))
                continue
            recorded = shard.read_unproved(start, read, direct=self._cold)
            with turn:
                crcs = content.add(rows)
                for number, crc in enumerate(crcs[:-1] if len(filled) else crcs):
                    shard.prove(first + number, crc, recorded[number])
                if len(filled):
                    shard.prove_last(crcs[-1], recorded[-1], rows[-1], filled)
        marker = Marker("00000000", expected.index, 1, tokens)  # a stand-in: identity is not judged here
        spec = self._store.info.spec
        evidence = invariants.Evidence(
            marker=marker,
            epoch="",
            spec=spec,
            hidden_size=layout.hidden_size,
            dump=DumpHeader(marker, "", 1, spec, layout.hidden_size, "", ""),
            content=content.finish(ids_all_equal=ids is None or bool((ids == ids[:1]).all())),
        )
        judges = (invariants.finite, invariants.nonzero_rows, invariants.not_repeated)
        violations = [violation for judge in judges if (violation := judge(evidence)) is not None]
        crc = content.payload if layout.dtype == "bf16" else payload
        return crc, [Finding(v.invariant, f"shard {expected.path}: {v.evidence}") for v in violations]

    def _buffer(self, tokens: int) -> NDArray[np.uint16]:
        """This thread's reading buffer."""
        shape = (self._step, self._layout.states, self._layout.row_words)
        buffer: NDArray[np.uint16] | None = getattr(self._local, "buffer", None)
        if buffer is None:
            # Page-aligned: copying out of the kernel to any other address takes three times as long.
            memory = np.frombuffer(mmap.mmap(-1, math.prod(shape) * BF16_BYTES), np.uint16)
            buffer = self._local.buffer = memory.reshape(shape)
        return buffer[:tokens]


@contextmanager
def reading_ahead(path: Path, *, cold: bool) -> Iterator[Callable[[int], None]]:
    """Has the kernel read a file ahead of its reader, who says at which byte it is. Refused advice costs speed alone.

    Args:
        path: the file.
        cold: drop what is cached of it before and after.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield lambda _offset: None
        return

    asked = 0

    def ahead(offset: int) -> None:
        nonlocal asked
        if offset + AHEAD_BYTES >= asked:  # in steps: to ask for what is cached costs time, too
            start, asked = max(asked, offset), offset + 2 * AHEAD_BYTES
            with suppress(OSError):
                os.posix_fadvise(fd, start, asked - start, os.POSIX_FADV_WILLNEED)

    def drop() -> None:
        with suppress(OSError):
            if cold:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    try:
        drop()
        yield ahead
        drop()
    finally:
        os.close(fd)


def diagnose(path: Path, layout: StoreLayout, error: ShardError) -> Finding:
    """What happened to a shard that cannot be decoded: lost blocks, zeros in place of data, or changed bits.

    A hole is what the file system says was never written, or was given back to it; zeros are what a device returns for what it
    lost. Neither is looked for in a shard that is sound, so a file system that stores zeros as holes raises no alarm.
    """
    if error.problem in ("missing", "unreadable", "truncated"):
        return Finding(error.problem, error.message)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return Finding(error.problem, error.message)
    try:
        size = os.fstat(fd).st_size
        if gaps := holes(fd, size):
            shown = ", ".join(f"bytes {start} to {stop - 1}" for start, stop in gaps[:3])
            return Finding("hole", f"{error.message}; nothing is allocated for {shown} of {size}; expected all to be written")
        if zeros := zeroed(fd, size, layout):
            start, stop = zeros
            return Finding("zeroed", f"{error.message}; bytes {start} to {stop - 1} of {size} are zero")
    except OSError as failure:
        return Finding("unreadable", f"{error.message}; then: {failure.strerror}")
    finally:
        os.close(fd)
    return Finding(error.problem, error.message)


def holes(fd: int, size: int) -> list[tuple[int, int]]:
    """(start, stop) of each range of a file that the file system holds no data for. Raises OSError."""
    found: list[tuple[int, int]] = []
    at = 0
    while at < size:
        start = os.lseek(fd, at, os.SEEK_HOLE)
        if start >= size:
            break
        try:
            at = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # none after it
                raise
            at = size
        found.append((start, at))
    return found


def zeroed(fd: int, size: int, layout: StoreLayout) -> tuple[int, int] | None:
    """(start, stop) of the longest run of zero sectors in a file that cannot be what was written. Raises OSError.

    What pads blocks, and fills the space before the index, is zero too, and always shorter than a page in one piece.
    """
    longest: tuple[int, int] | None = None
    start = end = 0
    suspect = False
    for at in range(0, size, _ZEROS_BYTES):
        data = np.frombuffer(os.pread(fd, _ZEROS_BYTES, at), np.uint8)
        whole = data[: data.size // SECTOR * SECTOR].reshape(-1, SECTOR)
        for sector in np.flatnonzero(~whole.any(axis=1)).tolist():
            place = at + sector * SECTOR
            if place != end:
                start, suspect = place, False
            end = place + SECTOR
            suspect = suspect or end == size or end - start > PAGE or _within_payload(place, size, layout)
            if suspect and (longest is None or end - start > longest[1] - longest[0]):
                longest = (start, end)
    return longest


def _within_payload(place: int, size: int, layout: StoreLayout) -> bool:
    """Whether a sector is all payload in a shard as hsx writes it; with a codec nobody knows, the index being lost."""
    inside = place % layout.block_bytes + SECTOR <= layout.chunk_bytes
    return layout.codec == "none" and place < size - layout.tail_bytes and inside
