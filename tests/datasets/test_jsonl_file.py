"""The line reader: compressions, line ends, and files that fail."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from hsx.datasets.jsonl import BLOCK, JsonlFile
from hsx.errors import RunError

Write = Callable[[bytes], Path]
TEXT = b"".join(b'{"id": "row-%d", "x": "%s"}\n' % (i, b"abc" * (i % 50)) for i in range(4000))


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


def read(path: Path) -> list[tuple[int, bytes]]:
    return list(JsonlFile(path).lines())


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_compression_is_told_by_content_not_by_name(write: Write, pack: Callable[[bytes], bytes]) -> None:
    path = write(pack(TEXT))
    assert [line for _, line in read(path)] == TEXT.splitlines()


@pytest.mark.parametrize("pack", [gzip.compress, zstd], ids=["gzip", "zstd"])
def test_concatenated_members_are_one_file(write: Write, pack: Callable[[bytes], bytes]) -> None:
    path = write(pack(TEXT) + pack(b"last\n"))
    lines = read(path)
    assert len(lines) == 4001
    assert lines[-1] == (4001, b"last")


def test_gzip_zero_padding_is_ignored(write: Write) -> None:
    assert read(write(gzip.compress(b"a\nb\n") + bytes(1000))) == [(1, b"a"), (2, b"b")]


def test_zstd_skippable_frame_in_front(write: Write) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"pzst"
    assert read(write(skippable + zstd(b"a\n"))) == [(1, b"a")]


def test_blank_lines_are_skipped_but_counted(write: Write) -> None:
    assert read(write(b"\na\n  \t\r\n\nb")) == [(2, b"a"), (5, b"b")]


def test_byte_order_mark_and_crlf(write: Write) -> None:
    assert read(write(b"\xef\xbb\xbfa\r\nb\r\n")) == [(1, b"a"), (2, b"b")]


def test_empty_file_has_no_lines(write: Write) -> None:
    assert read(write(b"")) == []


def test_line_separators_of_unicode_do_not_end_a_line(write: Write) -> None:
    line = '"\u2028\u0085\u2029"'.encode()
    assert read(write(line + b"\n")) == [(1, line)]


def test_five_megabyte_line_across_blocks(write: Write) -> None:
    long = b"x" * (5 * BLOCK + 17)
    assert read(write(b"a\n" + long + b"\nb\n")) == [(1, b"a"), (2, long), (3, b"b")]


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, BLOCK + 1])
def test_line_end_on_a_block_boundary(write: Write, size: int) -> None:
    assert read(write(b"x" * size + b"\ny\n")) == [(1, b"x" * size), (2, b"y")]


def test_highly_compressible_gzip_is_read_whole(write: Write) -> None:
    content = b"0" * (20 * BLOCK)
    assert read(write(gzip.compress(content))) == [(1, content)]


def test_hash_is_the_files_whether_lines_were_read_or_not(write: Write) -> None:
    content = gzip.compress(TEXT)
    file = JsonlFile(write(content))
    before = file.sha256()
    fresh = JsonlFile(file.path)
    assert len(list(fresh.lines())) == 4000
    assert before == fresh.sha256() == hashlib.sha256(content).hexdigest()


def test_hash_after_a_partial_pass_covers_the_whole_file(write: Write) -> None:
    file = JsonlFile(write(TEXT * 20))
    next(file.lines())
    assert file.sha256() == hashlib.sha256(TEXT * 20).hexdigest()


def test_file_that_changes_between_hash_and_reading_is_refused(write: Write) -> None:
    file = JsonlFile(write(b"a\n"))
    file.sha256()
    file.path.write_bytes(b"b\n")
    with pytest.raises(RunError, match="changed since") as caught:
        list(file.lines())
    assert caught.value.kind == "dataset_unreadable"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (gzip.compress(TEXT)[:-20], "truncated gzip"),
        (gzip.compress(TEXT)[:-4], "truncated gzip"),
        (gzip.compress(TEXT)[:5], "truncated gzip"),
        (gzip.compress(TEXT) + b"garbage", "damaged gzip"),
        (gzip.compress(TEXT)[:300] + b"\xff" * 20 + gzip.compress(TEXT)[320:], "damaged gzip"),
        (zstd(TEXT)[:-10], "truncated zstandard"),
        (zstd(TEXT) + b"garbage!", "damaged zstandard"),
        (zstd(TEXT)[:40] + b"\xff" * 20 + zstd(TEXT)[60:], "damaged zstandard"),
        (b'{"a": 1}\n{"b": "\xff\xfe"}\n', "line 2 is not UTF-8: byte 0xff at byte 7"),
        ("a\nb\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_damaged_files_are_named_with_the_fault(write: Write, content: bytes, expected: str) -> None:
    path = write(content)
    with pytest.raises(RunError, match=expected) as caught:
        read(path)
    assert caught.value.kind == "dataset_unreadable"
    assert str(path) in caught.value.message


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RunError, match=r"No such file|is a folder; expected a JSONL file") as caught:
            read(path)
        assert caught.value.kind == "dataset_unreadable"
        with pytest.raises(RunError, match=r"No such file|is a folder; expected a JSONL file"):
            JsonlFile(path).sha256()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("content", [b'[{"id": 1},\n{"id": 2}]\n', b'[\n  {"id": 1}\n]\n'])
def test_a_json_array_is_not_jsonl(write: Write, pack: Callable[[bytes], bytes], content: bytes) -> None:
    with pytest.raises(RunError, match=r"line 2 is a JSON array; expected one object a line \(JSONL\)") as caught:
        read(write(pack(b"\n" + content)))
    assert caught.value.kind == "dataset_unreadable"


def test_parquet_and_a_folder_are_named(write: Write, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rows\.jsonl: looks like Parquet; expected JSONL"):
        read(write(b"PAR1\x15\x04"))
    with pytest.raises(RunError, match="is a folder; expected a JSONL file") as caught:
        read(tmp_path)
    assert caught.value.kind == "dataset_unreadable"
