"""Lines of a JSONL file: plain, gzip or zstandard, in bounded memory.

The compression is told by the first bytes of the file, never by its name. Reading also hashes the file, so that a full pass
gives the fingerprint for nothing.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import TYPE_CHECKING, Final

from hsx.datasets.fields import Bad, JsonFields
from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

BLOCK: Final = 1 << 20
ZSTD_INPUT: Final = 1 << 16  # small, because one zstandard block can expand a thousandfold
LONGEST_LINE: Final = 256 << 20
GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
PARQUET_MAGIC: Final = b"PAR1"
_ARRAY_OF_OBJECTS: Final = re.compile(rb"\[\s*(\{|$)")
NOT_A_FOLDER: Final = "is a folder; expected a JSONL file"
UTF8_BOM: Final = b"\xef\xbb\xbf"
UTF16_BOMS: Final = (b"\xff\xfe", b"\xfe\xff")


class JsonlFile:
    """One JSONL file.

    Args:
        path: the file; lines end with LF or CRLF, a UTF-8 byte order mark is allowed, blank lines are skipped.
    """

    kind: Final = "jsonl"
    unit: Final = "line"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._digest: str | None = None

    def records(self) -> Iterator[tuple[int, JsonFields | Bad]]:
        """Each line that is not blank, with its number, as fields or as what is wrong with it. Raises what `lines` raises."""
        for number, line in self.lines():
            try:
                yield number, JsonFields(line)
            except Bad as bad:
                yield number, bad

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Each line that is not blank, with its 1-based number in the (decompressed) file and without its line end.

        Valid UTF-8 throughout. Raises RunError `dataset_unreadable` where the file cannot be opened or read, is truncated or
        damaged, is a folder, Parquet or one JSON array, holds bytes that are not UTF-8, or a line of more than 256 MiB.
        """
        number = 0
        first = True
        try:
            for number, raw in enumerate(self._split(), 1):
                line = raw.removeprefix(UTF8_BOM) if number == 1 else raw
                if number == 1 and line.startswith(UTF16_BOMS):
                    raise self._fault("it begins with a UTF-16 byte order mark; expected UTF-8")
                line = line.strip()
                if not line:
                    continue
                if first and _ARRAY_OF_OBJECTS.match(line):
                    raise self._fault(f"line {number} is a JSON array; expected one object a line (JSONL)")
                first = False
                if not line.isascii():
                    self._check_utf8(number, line)
                yield number, line
        except IsADirectoryError as error:
            raise self._fault(NOT_A_FOLDER) from error
        except OSError as error:
            raise self._fault(f"after line {number}: {error.strerror or error}") from error

    def sha256(self) -> str:
        """SHA-256 of the file's bytes on the disk, in hex. Free after a full pass of `lines`, else reads the file."""
        if self._digest is None:
            hasher = hashlib.sha256()
            try:
                with self.path.open("rb") as file:
                    while block := file.read(BLOCK):
                        hasher.update(block)
            except IsADirectoryError as error:
                raise self._fault(NOT_A_FOLDER) from error
            except OSError as error:
                raise self._fault(str(error.strerror or error)) from error
            self._digest = hasher.hexdigest()
        return self._digest

    def _fault(self, what: str) -> RunError:
        return RunError("dataset_unreadable", f"{self.path}: {what}")

    def _check_utf8(self, number: int, line: bytes) -> None:
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._fault(
                f"line {number} is not UTF-8: byte {line[error.start]:#04x} at byte {error.start} of the line"
            ) from error

    def _split(self) -> Iterator[bytes]:
        """The lines, without LF. A list of parts, because growing one bytes object makes a 5 MB line quadratic."""
        parts: list[bytes] = []
        size = 0
        for block in self._content():
            first, *rest = block.split(b"\n")
            parts.append(first)
            size += len(first)
            if size > LONGEST_LINE:
                raise self._fault(f"a line is longer than {LONGEST_LINE} bytes; expected one JSON object a line")
            if rest:
                yield b"".join(parts)
                yield from rest[:-1]
                parts = [rest[-1]]
                size = len(rest[-1])
        if size:
            yield b"".join(parts)

    def _blocks(self) -> Iterator[bytes]:
        hasher = hashlib.sha256()
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                hasher.update(block)
                yield block
        if self._digest not in (None, hasher.hexdigest()):
            raise self._fault("its content changed since it was first read; a job needs a file that stays as it is")
        self._digest = hasher.hexdigest()

    def _content(self) -> Iterator[bytes]:
        blocks = self._blocks()
        first = next(blocks, b"")
        if first.startswith(PARQUET_MAGIC):
            raise self._fault("looks like Parquet; expected JSONL")
        if first.startswith(GZIP_MAGIC):
            return self._gunzip(first, blocks)
        if first.startswith(ZSTD_MAGIC) or _skippable(first):
            return self._unzstd(first, blocks)
        return _chain(first, blocks)

    def _gunzip(self, first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
        member = zlib.decompressobj(wbits=31)
        started = False
        for block in _chain(first, blocks):
            pending = block
            while pending:
                if member.eof:
                    # The next member, or the zero padding that tape tools leave after the last one.
                    pending = pending.lstrip(b"\0")
                    if not pending:
                        break
                    member, started = zlib.decompressobj(wbits=31), False
                try:
                    content = member.decompress(pending, BLOCK)
                except zlib.error as error:
                    raise self._fault(f"damaged gzip data: {error}") from error
                started = True
                pending = member.unused_data if member.eof else member.unconsumed_tail
                if content:
                    yield content
            # All input is taken, but a full output block may have left some behind in the decompressor.
            while not member.eof and (content := member.decompress(b"", BLOCK)):
                yield content
        if started and not member.eof:
            raise self._fault("truncated gzip data: the file ends within a member")

    def _unzstd(self, first: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
        import zstandard

        decompressor = zstandard.ZstdDecompressor()
        frame = decompressor.decompressobj()
        ended = True
        for block in _chain(first, blocks):
            for start in range(0, len(block), ZSTD_INPUT):
                pending = block[start : start + ZSTD_INPUT]
                while pending:
                    if frame.eof:
                        frame = decompressor.decompressobj()
                    try:
                        content = frame.decompress(pending)
                    except zstandard.ZstdError as error:
                        raise self._fault(f"damaged zstandard data: {error}") from error
                    pending = frame.unused_data
                    ended = frame.eof
                    if content:
                        yield content
        if not ended:
            raise self._fault("truncated zstandard data: the file ends within a frame")


def _skippable(first: bytes) -> bool:
    """Whether this is a zstandard skippable frame, which parallel compressors write first."""
    return first[1:4] == b"\x2a\x4d\x18" and first[0] & 0xF0 == 0x50


def _chain(first: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    if first:
        yield first
    yield from rest
