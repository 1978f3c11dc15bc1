"""What hsx relies on in a root, as tests: every way of writing shards passes the same suite.

A test module subclasses `RootContract` and gives it a fixture `made` with an empty store and one root of it. What was written
is read back in three ways that share no code with the writers: hsx's own shard reader, zarr-python and tensorstore.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from hsx.core.layout import CHUNK_TOKENS, PAGE, StoreLayout, shard_key
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec
from hsx.dumps.measure import measure
from hsx.errors import RunError, SampleError
from hsx.records import Payload
from hsx.stores.attach import attach_roots
from hsx.stores.checksum import crc32c, ids_digest
from hsx.stores.group import create_store
from hsx.stores.shard_reader import ShardError, ShardFile, read_record
from hsx.testing.stores import EPOCH, RUN, payload, random_bits, random_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.ports import Root
    from hsx.records import Receipt
    from hsx.stores.group import StoreInfo

SPEC: Final = CaptureSpec((1, 2), "pre_norm")
LENGTHS: Final = (1, 63, 64, 65, 128, 200, 320)
SAMPLES: Final = 12


@dataclass(frozen=True, slots=True)
class Made:
    """A root under test.

    Attributes:
        info: its store.
        root: it.
        folder: where its shards lie.
    """

    info: StoreInfo
    root: Root
    folder: Path

    def write(self, states: NDArray[np.uint16], index: int = 0, attempt: int = 1) -> Receipt:
        """Writes states as an attempt of a sample."""
        return self.root.write(payload(Marker(RUN, index, attempt, len(states)), states))

    def shard(self, index: int = 0) -> Path:
        """The shard of a sample."""
        return self.folder / shard_key(index)

    def names(self) -> set[str]:
        """All names in the folder."""
        return {entry.name for entry in os.scandir(self.folder)}


def make(
    folder: Path,
    hidden_size: int = 32,
    codec: str = "none",
    less: Mapping[str, Any] | None = None,
    **how: Any,  # noqa: ANN401 - passed on
) -> Made:
    """An empty store in `folder/store`, and its root `folder/a`, an existing or new folder.

    `less` is for the layout, where the store keeps less or has other inner chunks; `how` is for `attach_roots`.
    """
    layout = StoreLayout(SAMPLES, max(LENGTHS), SPEC.states, hidden_size, codec=codec, **(less or {}))
    (folder / "a").mkdir(parents=True, exist_ok=True)
    info, (root,) = attach_roots(create_store(folder / "store", layout, SPEC, {}), {"a": folder / "a"}, **how)
    return Made(info, root, root.folder)


def as_dump(states: NDArray[np.uint16], folder: Path, index: int = 0, chunk_tokens: int = CHUNK_TOKENS) -> Payload:
    """The payload of a dump that was judged: states in a file's mapping, their checksums, and the file for the kernel."""
    tokens = len(states)
    path = folder / f"dump-{index}"
    path.write_bytes(bytes(PAGE) + states.tobytes())
    fd = os.open(path, os.O_RDONLY)  # the test's process ends before it matters
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    mapped = np.frombuffer(mapping, np.uint16, states.size, PAGE).reshape(states.shape)
    ids = np.arange(tokens, dtype=np.int32)[::-1].copy()
    crcs = measure(mapped, ids, ids, chunk_tokens).crcs
    return Payload(Marker(RUN, index, 1, tokens), EPOCH, 7, ids, mapped, crcs, (fd, PAGE))


class RootContract:
    """The suite. Subclasses provide the fixture `made`."""

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_states_come_back_bit_equal_by_every_reader(self, made: Made, tokens: int) -> None:
        """Any bits, whichever reader reads them; what follows them is fill; and the receipt is right."""
        import tensorstore
        import zarr

        layout = made.info.layout
        states = random_bits(np.random.default_rng(tokens), tokens, layout.states, layout.hidden_size)
        receipt = made.write(states)
        assert receipt.root == made.root.name
        assert receipt.nbytes == made.shard().stat().st_size <= layout.file_bytes(tokens)
        assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))
        assert np.array_equal(made.root.read(0, tokens), states)
        (made.info.path / "hidden_states" / shard_key(0)).symlink_to(made.shard())
        group = zarr.open_group(made.info.path, mode="r")
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(made.folder)}}
        for found in (
            np.asarray(group["hidden_states"][0]),  # type: ignore[index]  # an array, by its place
            tensorstore.open(spec, read=True).result()[0].read().result().view(np.uint16),
        ):
            assert np.array_equal(found[:tokens], states)
            assert bool((found[tokens:] == 0x7FC0).all())

    @pytest.mark.parametrize("tokens", [1, 100, 320])
    def test_a_judged_dump_is_written_as_it_was_judged(self, made: Made, tmp_path: Path, tokens: int) -> None:
        """Mapped states with checksums and a file behind them give the same shard as the same states alone."""
        layout = made.info.layout
        states = random_bits(np.random.default_rng(tokens), tokens, layout.states, layout.hidden_size)
        judged = as_dump(states, tmp_path, chunk_tokens=layout.chunk_tokens)
        receipt = made.root.write(judged)
        assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))
        with ShardFile(made.shard(), layout, tokens, owner=(made.info.store_id, 0)) as shard:
            found, crc = shard.read_all()
        assert np.array_equal(found, states)
        assert crc == receipt.crc32c

    def test_bytes_that_change_after_they_were_judged_contradict_their_shard(self, made: Made, tmp_path: Path) -> None:
        """What is committed is what was judged; other bytes are found by whoever proves the shard."""
        layout = made.info.layout
        states = random_states(np.random.default_rng(4), 100, layout.states, layout.hidden_size)
        judged = as_dump(states, tmp_path, chunk_tokens=layout.chunk_tokens)
        changed = states.copy()
        changed[70, 0, 0] ^= 1
        receipt = made.root.write(replace(judged, states=changed, source=None))
        assert receipt.crc32c == crc32c(states.reshape(-1).view(np.uint8))
        with ShardFile(made.shard(), layout, 100) as shard:
            try:
                _, crc = shard.read_all()
            except ShardError:
                return
        assert crc != receipt.crc32c

    def test_the_shard_says_whose_it_is(self, made: Made, tmp_path: Path) -> None:
        """Its record has all that a lost ledger would need."""
        layout = made.info.layout
        judged = as_dump(
            random_states(np.random.default_rng(0), 70, layout.states, layout.hidden_size), tmp_path, 3, layout.chunk_tokens
        )
        receipt = made.root.write(judged)
        record = read_record(made.shard(3), layout)
        assert (record.store, record.index, record.marker) == (made.info.store_id, 3, str(judged.marker))
        assert (record.epoch, record.sequence, record.tokens) == (EPOCH, 7, 70)
        assert record.ids == ids_digest(judged.input_ids)
        assert (record.layers, record.final, record.hidden_size) == (SPEC.layers, SPEC.final, layout.hidden_size)
        assert record.crc32c == receipt.crc32c

    def test_rows_that_look_like_fill_are_rows(self, made: Made) -> None:
        """A chunk of NaN is stored as any other: the content gates judge, a writer does not leave out."""
        states = np.full((130, *made.info.layout.shape[2:]), 0x7FC0, np.uint16)
        states[-1] = 1
        made.write(states)
        assert np.array_equal(made.root.read(0, 130), states)

    def test_nothing_but_the_shard_is_left(self, made: Made) -> None:
        """No partial file, no second name."""
        before = made.names()
        made.write(random_states(np.random.default_rng(0), 70, *made.info.layout.shape[2:]))
        made.root.sync()
        assert made.names() - before == {shard_key(0)}

    def test_a_later_attempt_replaces_an_earlier_one(self, made: Made) -> None:
        """Also by a shorter shard of an attempt that began anew; nothing of the first is left."""
        first = random_states(np.random.default_rng(0), 200, *made.info.layout.shape[2:])
        second = random_states(np.random.default_rng(1), 200, *made.info.layout.shape[2:])
        made.write(first)
        receipt = made.write(second, attempt=2)
        assert np.array_equal(made.root.read(0, 200), second)
        assert made.shard().stat().st_size == receipt.nbytes

    def test_threads_write_different_samples_at_once(self, made: Made) -> None:
        """Scratch memory is a thread's own."""
        shape = made.info.layout.shape[2:]
        states = [random_states(np.random.default_rng(i), LENGTHS[i % len(LENGTHS)], *shape) for i in range(SAMPLES)]
        with ThreadPoolExecutor(4) as pool:
            receipts = list(pool.map(made.write, states, range(SAMPLES)))
        for index, (sample, receipt) in enumerate(zip(states, receipts, strict=True)):
            assert np.array_equal(made.root.read(index, len(sample)), sample)
            assert receipt.crc32c == crc32c(sample.reshape(-1).view(np.uint8))

    def test_discard_and_sweep(self, made: Made) -> None:
        """Only what they name, and what is not there is fine."""
        shape = made.info.layout.shape[2:]
        for index in range(2):
            made.write(random_states(np.random.default_rng(index), 10, *shape), index)
        (made.folder / f"{shard_key(5)}.hsx1-{RUN}-5-1-10.partial").write_bytes(b"torn")
        assert made.root.sweep() == 1
        made.root.discard(0)
        made.root.discard(0)
        assert shard_key(0) not in made.names()
        assert made.root.read(1, 10).shape == (10, *shape)
        assert made.root.free() > 0

    def test_what_is_not_there_is_not_read(self, made: Made) -> None:
        """Absent is an error, never zeros."""
        with pytest.raises(RunError, match="cannot be opened") as error:
            made.root.read(4, 10)
        assert error.value.kind == "store_invalid"

    def test_a_changed_byte_is_found(self, made: Made) -> None:
        """In the first block and in the index."""
        states = random_states(np.random.default_rng(0), 70, *made.info.layout.shape[2:])
        for at in (40, -8):
            made.write(states)
            content = bytearray(made.shard().read_bytes())
            content[at] ^= 1
            made.shard().write_bytes(content)
            with pytest.raises(RunError, match="has crc32c") as error:
                made.root.read(0, 70)
            assert error.value.kind == "store_invalid"

    def test_payloads_that_do_not_fit_are_refused(self, made: Made) -> None:
        """Before anything is written."""
        before = made.names()
        shape = made.info.layout.shape[2:]
        with pytest.raises(ValueError, match=f"sample has {max(LENGTHS) + 1} tokens"):
            made.write(random_states(np.random.default_rng(0), max(LENGTHS) + 1, *shape))
        with pytest.raises(ValueError, match=f"sample {SAMPLES} has states"):
            made.write(random_states(np.random.default_rng(0), 3, *shape), SAMPLES)
        with pytest.raises(ValueError, match="expected C-contiguous uint16"):
            made.write(random_states(np.random.default_rng(0), 20, *shape)[::2])
        assert made.names() == before

    def test_a_root_that_is_gone_is_unusable(self, made: Made) -> None:
        """Whatever is asked of it."""
        states = random_states(np.random.default_rng(0), 3, *made.info.layout.shape[2:])
        made.folder.rename(made.folder.with_name("away"))
        for ask in (made.root.free, made.root.sync, made.root.sweep, lambda: made.write(states)):
            with pytest.raises(RunError) as error:
                ask()
            assert error.value.kind == "root_unusable"


class ReducedRootContract:
    """What a root has to do in a store that keeps less than was captured. Subclasses provide `made`, whose store does."""

    def _written(self, made: Made, tmp_path: Path, tokens: int, index: int = 0) -> tuple[Payload, Receipt]:
        """Writes a judged dump of which about a third of the tokens is kept, where the store selects."""
        layout, rng = made.info.layout, np.random.default_rng(tokens)
        states = random_states(rng, tokens, layout.states, layout.hidden_size)
        kept = np.union1d(np.flatnonzero(rng.random(tokens) < 0.3), [tokens - 1]) if layout.selects else None
        dump = replace(as_dump(states, tmp_path, index, layout.chunk_tokens), kept=kept)
        return dump, made.root.write(dump)

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_every_reader_finds_the_kept_rows(self, made: Made, tmp_path: Path, tokens: int) -> None:
        """Converted by a reference that shares no code with the writer; what follows them is fill; the receipt is right."""
        import tensorstore
        import zarr

        layout = made.info.layout
        dump, receipt = self._written(made, tmp_path, tokens)
        wanted = dump.states if dump.kept is None else dump.states[dump.kept]
        raw = _reference(wanted, layout)
        assert receipt.nbytes == made.shard().stat().st_size <= layout.file_bytes(len(wanted))
        assert receipt.crc32c == crc32c(raw.reshape(-1)) == made.root.checksum(0, tokens)
        assert np.array_equal(made.root.read(0, tokens), _restored(raw, layout))
        (made.info.path / "hidden_states" / shard_key(0)).symlink_to(made.shard())
        group = zarr.open_group(made.info.path, mode="r")
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(made.folder)}}
        for array in (
            np.asarray(group["hidden_states"][0]),  # type: ignore[index]  # an array, by its place
            tensorstore.open(spec, read=True).result()[0].read().result(),
        ):
            found = np.ascontiguousarray(array).view(np.uint8)
            assert np.array_equal(found[: len(wanted)], raw)
            fill = found[len(wanted) :].reshape(-1).view(np.uint16)
            assert bool((fill == (0x7FC0 if layout.dtype == "bf16" else 0x7F7F)).all())

    def test_the_shard_says_what_it_keeps(self, made: Made, tmp_path: Path) -> None:
        """Beside whose it is: a reader with other tokens in mind is refused."""
        layout = made.info.layout
        dump, receipt = self._written(made, tmp_path, 200, 3)
        record = read_record(made.shard(3), layout)
        assert (record.tokens, record.crc32c, record.dtype) == (200, receipt.crc32c, layout.dtype)
        assert record.ids == ids_digest(dump.input_ids)
        if dump.kept is None:
            assert (record.rows, record.kept) == (0, "")
            return
        own = hashlib.sha256(dump.kept.astype("<i4").tobytes()).hexdigest()
        assert (record.rows, record.kept) == (len(dump.kept), own)
        owner = (made.info.store_id, 3)
        with ShardFile(made.shard(3), layout, len(dump.kept), owner=owner, kept=lambda: own) as shard:
            assert shard.rows == len(dump.kept)
        with pytest.raises(ShardError, match="by the loss mask") as error:
            ShardFile(made.shard(3), layout, len(dump.kept), owner=owner, kept=lambda: "0" * 64)
        assert error.value.problem == "record"

    def test_bytes_that_change_after_they_were_judged_are_not_stored(self, made: Made, tmp_path: Path) -> None:
        """The checksums are those of what is stored, so nobody would find out later."""
        layout = made.info.layout
        states = random_states(np.random.default_rng(4), 100, layout.states, layout.hidden_size)
        kept = np.array([3, 70, 99]) if layout.selects else None
        judged = replace(as_dump(states, tmp_path, chunk_tokens=layout.chunk_tokens), kept=kept)
        changed = states.copy()
        changed[71, 0, 0] ^= 1
        before = made.names()
        with pytest.raises(SampleError, match=f"chunk {71 // layout.chunk_tokens} of the dump") as error:
            made.root.write(replace(judged, states=changed, source=None))
        assert error.value.kind == "dump_invalid"
        assert made.names() == before

    def test_payloads_that_keep_what_the_store_does_not_are_refused(self, made: Made, tmp_path: Path) -> None:
        """Before anything is written."""
        layout = made.info.layout
        states = random_states(np.random.default_rng(4), 10, layout.states, layout.hidden_size)
        dump = as_dump(states, tmp_path, chunk_tokens=layout.chunk_tokens)
        before = made.names()
        wrong = [np.array(kept) for kept in ([], [-1, 2], [2, 10], [3, 3], [4, 1])] if layout.selects else [np.array([1])]
        for kept in [*wrong, *([None] if layout.selects else [])]:
            with pytest.raises(ValueError, match=r"keeps \d+ tokens|the store keeps"):
                made.root.write(replace(dump, kept=kept))
        assert made.names() == before

    def test_a_changed_byte_is_found(self, made: Made, tmp_path: Path) -> None:
        """In the first block and in the index."""
        for at in (40, -8):
            self._written(made, tmp_path, 70)
            content = bytearray(made.shard().read_bytes())
            content[at] ^= 1
            made.shard().write_bytes(content)
            with pytest.raises(RunError, match="has crc32c") as error:
                made.root.checksum(0, 70)
            assert error.value.kind == "store_invalid"

    def test_threads_write_different_samples_at_once(self, made: Made, tmp_path: Path) -> None:
        """Scratch memory is a thread's own."""
        with ThreadPoolExecutor(4) as pool:
            written = list(pool.map(lambda i: self._written(made, tmp_path, LENGTHS[i % len(LENGTHS)], i), range(SAMPLES)))
        for index, (dump, receipt) in enumerate(written):
            wanted = dump.states if dump.kept is None else dump.states[dump.kept]
            assert receipt.crc32c == crc32c(_reference(wanted, made.info.layout).reshape(-1))
            assert made.root.checksum(index, dump.marker.tokens) == receipt.crc32c


def _reference(states: NDArray[np.uint16], layout: StoreLayout) -> NDArray[np.uint8]:
    """What is stored of rows, by numpy and ml_dtypes: uint8 [rows, L, row_bytes]."""
    if layout.dtype == "bf16":
        return np.ascontiguousarray(states).view(np.uint8)
    import ml_dtypes

    values = states.view(ml_dtypes.bfloat16).astype(np.float32)
    scale = np.abs(values).max(axis=-1, keepdims=True) / np.float32(448)
    return np.concatenate([(values / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale.view(np.uint8)], axis=-1)


def _restored(raw: NDArray[np.uint8], layout: StoreLayout) -> NDArray[np.uint16]:
    """bf16 bits of what is stored, as `_reference`."""
    if layout.dtype == "bf16":
        return raw.view(np.uint16)
    import ml_dtypes

    values = raw[..., :-4].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32) * raw[..., -4:].copy().view(np.float32)
    bits: NDArray[np.uint16] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return bits
