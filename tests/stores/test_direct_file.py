"""Chunks read past the page cache are the same bytes with the same checksums; what cannot be read so is read otherwise."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.stores.checksum import crc32c
from hsx.stores.direct_file import AT_ONCE, DirectFile
from hsx.stores.shard_reader import ShardError, ShardFile
from hsx.testing.stores import BuiltStore, build_store, random_bits
from hsx.verify import verify

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

TOKENS = 200  # three inner chunks, and a part of one


def store(folder: Path, hidden_size: int) -> BuiltStore:
    rng = np.random.default_rng(0)
    return build_store(folder, [random_bits(rng, TOKENS, 2, hidden_size)], roots=("a",))


def aligned(tokens: int, hidden_size: int) -> NDArray[np.uint16]:
    memory = np.frombuffer(mmap.mmap(-1, tokens * 2 * hidden_size * 2), np.uint16)
    return memory.reshape(tokens, 2, hidden_size)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("hidden_size", [32, 31])  # with 31, chunks fill no whole pages
def test_whole_chunks_are_read_with_their_checksums(tmp_path: Path, hidden_size: int, direct: bool) -> None:
    built = store(tmp_path, hidden_size)
    out = aligned(128, hidden_size)
    with ShardFile(built.shard(0), built.info.layout, TOKENS) as shard:
        recorded = shard.read_unproved(64, out, direct=direct)
        assert np.array_equal(out, built.states[0][64:192])
        assert len(recorded) == 2
        with pytest.raises(ShardError, match="chunk 1 has crc32c") as error:
            shard.prove(1, recorded[0] ^ 1, recorded[0])
        assert error.value.problem == "chunk"


@pytest.mark.parametrize("direct", [False, True])
def test_the_last_chunk_is_proved_with_its_fill(tmp_path: Path, direct: bool) -> None:
    built = store(tmp_path, 32)
    out = aligned(64, 32)
    for tokens, wrong in ((TOKENS, ""), (TOKENS - 1, "there is data after row 198"), (TOKENS + 1, "row 200 is fill")):
        layout = replace(built.info.layout, max_tokens=TOKENS + 1)
        with ShardFile(built.shard(0), layout, tokens) as shard:
            recorded = shard.read_unproved(192, out, direct=direct)[0]
            rows, filled = out[: tokens - 192], out[tokens - 192 :]
            crc = crc32c(rows.reshape(-1).view(np.uint8))
            if not wrong:
                shard.prove_last(crc, recorded, rows[-1], filled)
                with pytest.raises(ShardError, match="chunk 3 has crc32c"):
                    shard.prove_last(crc ^ 1, recorded, rows[-1], filled)
                continue
            with pytest.raises(ShardError, match=wrong) as error:
                shard.prove_last(crc, recorded, rows[-1], filled)
            assert error.value.problem == "tokens"


def test_it_is_the_device_that_is_read(tmp_path: Path) -> None:
    built = store(tmp_path, 32)
    layout, out = built.info.layout, aligned(64, 32)
    file = DirectFile(built.shard(0), layout)
    try:
        fd = os.open(built.shard(0), os.O_RDONLY | os.O_DIRECT)
    except OSError:
        assert file.read([0], out.reshape(1, -1).view(np.uint8)) is None
        return
    os.close(fd)
    recorded = file.read([0], out.reshape(1, -1).view(np.uint8))
    assert recorded is not None
    assert np.array_equal(out, built.states[0][:64])
    unaligned = np.empty(layout.chunk_bytes + 2, np.uint8)[2:].reshape(1, -1)
    assert file.read([0], unaligned) is None
    assert file.read([512], out.reshape(1, -1).view(np.uint8)) is None
    beyond = built.rows[0].nbytes
    assert file.read([beyond], out.reshape(1, -1).view(np.uint8)) is None
    file.close()
    file.close()
    assert file.read([0], out.reshape(1, -1).view(np.uint8)) is None


def test_more_chunks_are_read_than_one_call_takes(tmp_path: Path) -> None:
    chunks = AT_ONCE + 3
    states = random_bits(np.random.default_rng(0), 8 * chunks, 2, 128)
    built = build_store(tmp_path, [states], roots=("a",), chunk_tokens=8)
    layout, out = built.info.layout, aligned(8 * chunks, 128)
    places = [number * layout.block_bytes for number in range(chunks)]
    file = DirectFile(built.shard(0), layout)
    recorded = file.read(places, out.reshape(chunks, -1).view(np.uint8))
    file.close()
    if recorded is None:
        with pytest.raises(OSError, match="Invalid argument"):  # no O_DIRECT here
            os.close(os.open(built.shard(0), os.O_RDONLY | os.O_DIRECT))
        return
    assert np.array_equal(out, states)
    assert recorded == [crc32c(chunk) for chunk in states.reshape(chunks, -1).view(np.uint8)]


@pytest.mark.parametrize(("start", "tokens"), [(1, 64), (0, 63)])
def test_parts_of_chunks_are_refused(tmp_path: Path, start: int, tokens: int) -> None:
    built = store(tmp_path, 32)
    with ShardFile(built.shard(0), built.info.layout, TOKENS) as shard, pytest.raises(ValueError, match="whole chunks"):
        shard.read_unproved(start, aligned(tokens, 32))


def test_verification_reads_both_ways(tmp_path: Path) -> None:
    built = build_store(tmp_path, [np.full((TOKENS, 2, 32), 0x3F80, np.uint16)], roots=("a",))
    for cold in (True, False):
        assert [damage.kind for damage in verify(built.info.path, built.rows, cold=cold).damage] == ["not_repeated"]
    content = bytearray(built.shard(0).read_bytes())
    content[built.info.layout.block_bytes + 7] ^= 1
    built.shard(0).write_bytes(content)
    for cold in (True, False):
        (damage,) = verify(built.info.path, built.rows, cold=cold).damage
        assert damage.kind == "chunk"
        assert "chunk 1 has crc32c" in damage.message
