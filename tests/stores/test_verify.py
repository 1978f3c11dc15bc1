"""verify finds every kind of damage, and nothing in a whole store; show tells of one sample."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.layout import shard_key
from hsx.core.marker import Marker
from hsx.errors import RunError
from hsx.show import row_norms, show
from hsx.stores.reader import Store
from hsx.testing.stores import BuiltStore, build_store, payload, random_states
from hsx.verify import KINDS, Reading, VerifyReport, verify
from hsx.verify.shard import READERS, Expected, ShardProver

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

LENGTHS = (70, 5, 130, 64, 70, 1)


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Six samples on two roots, all committed; samples 0 and 4 are of the same length and on the same root."""
    rng = np.random.default_rng(5)
    return build_store(tmp_path, [random_states(rng, tokens, 3, 16) for tokens in LENGTHS])


def found(report: VerifyReport) -> set[tuple[int | None, str]]:
    assert report.damaged == len(report.damage)
    assert {damage.kind for damage in report.damage} <= KINDS.keys()
    return {(damage.index, damage.kind) for damage in report.damage}


def test_whole_store_passes(built: BuiltStore) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(built.info.path, built.rows, watch=lambda reading: seen.append((reading.samples, reading.samples_total)))
    assert report.ok
    assert (report.samples, report.committed, report.read, report.tokens) == (6, 6, 6, sum(LENGTHS))
    assert report.nbytes == sum(row.nbytes for row in built.rows)
    assert seen == [(i, 6) for i in range(1, 7)]
    assert json.loads(json.dumps(report.as_dict()))["ok"] is True
    assert {**verify(built.info.path).as_dict(), "seconds": report.seconds} == report.as_dict()


def test_more_threads_read_than_compute(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    built = build_store(tmp_path, [random_states(rng, 3, 2, 8) for _ in range(120)], roots=("a",))
    readers: list[int] = []

    def watch(reading: Reading) -> None:
        # So many results are not waited for that none of the threads can be at its end yet.
        if reading.samples == 1:
            readers.append(sum(thread.name == "hsx-verify-a" for thread in threading.enumerate()))

    assert verify(built.info.path, built.rows, threads=3, watch=watch).ok
    assert readers == [3 * READERS]


def test_readers_wait_for_their_turn_with_what_they_have_read(built: BuiltStore) -> None:
    met = threading.Barrier(4, timeout=300)

    class Turns:
        def __enter__(self) -> None:
            met.wait()  # four have read before one of them looks at it

        def __exit__(self, *_: object) -> None:
            pass

    prover = ShardProver(Store(built.info.path), cold=True)
    expected = [
        Expected(row.index, row.tokens, row.root, built.shard(row.index), row.nbytes, row.crc32c, row.marker)
        for row in built.rows[:4]
    ]
    with ThreadPoolExecutor(4) as pool:
        proofs = list(pool.map(lambda one: prover.prove(one, Turns()), expected))
    assert [proof.findings for proof in proofs] == [()] * 4


def flip(built: BuiltStore, index: int, offset: int) -> None:
    content = bytearray(built.shard(index).read_bytes())
    content[offset] ^= 1
    built.shard(index).write_bytes(content)


def cut(built: BuiltStore, index: int) -> None:
    os.truncate(built.shard(index), 100)


def remove(built: BuiltStore, index: int) -> None:
    built.shard(index).unlink()


def copy(built: BuiltStore, source: int, target: int) -> None:
    shutil.copy(built.shard(source), built.shard(target))


def zero(built: BuiltStore, index: int, before_end: int, nbytes: int | None = None) -> None:
    """Puts zeros in place of what begins so many bytes before the end."""
    with built.shard(index).open("r+b") as file:
        file.seek(-before_end, os.SEEK_END)
        file.write(bytes(before_end if nbytes is None else nbytes))


def punch(built: BuiltStore, index: int) -> None:
    """Takes the first page of the payload away from the file; its size stays."""
    subprocess.run(["fallocate", "--punch-hole", "--length", "4096", str(built.shard(index))], check=True)


def sparse_tail(built: BuiltStore) -> None:
    """What a file looks like of which the size reached the disk, and the end did not."""
    os.truncate(built.shard(2), built.rows[2].nbytes - 4096)
    os.truncate(built.shard(2), built.rows[2].nbytes)


DAMAGE: dict[str, tuple[Callable[[BuiltStore], None], set[tuple[int | None, str]]]] = {
    "bit in a payload": (lambda b: flip(b, 2, 10), {(2, "chunk")}),
    "bit in an index": (lambda b: flip(b, 2, -10), {(2, "index")}),
    "bit in a record": (lambda b: flip(b, 2, -b.info.layout.tail_bytes + 30), {(2, "record")}),
    "cut": (lambda b: cut(b, 0), {(0, "truncated")}),
    "cut by a page": (lambda b: os.truncate(b.shard(0), b.rows[0].nbytes - 4096), {(0, "truncated")}),
    "tail zeroed": (lambda b: zero(b, 2, 4096), {(2, "zeroed")}),
    "a sector zeroed": (lambda b: zero(b, 2, b.rows[2].nbytes - 512, 512), {(2, "zeroed")}),
    "all of it zeroed": (lambda b: zero(b, 2, b.rows[2].nbytes), {(2, "zeroed")}),
    "hole": (lambda b: punch(b, 2), {(2, "hole")}),
    "sparse tail": (sparse_tail, {(2, "hole")}),
    "missing": (lambda b: remove(b, 3), {(3, "missing")}),
    "another sample of another length": (lambda b: copy(b, 2, 1), {(1, "record")}),
    "another sample of the same length": (lambda b: copy(b, 0, 4), {(4, "record")}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(built: BuiltStore, name: str) -> None:
    make, expected = DAMAGE[name]
    make(built)
    report = verify(built.info.path, built.rows)
    assert found(report) == expected
    for damage in report.damage:
        assert damage.sample_id == f"sample-{damage.index}"
        assert str(built.shard(damage.index or 0)) in damage.message
    assert not report.ok


def test_missing_and_resized_shards_are_found_without_reading_them(built: BuiltStore) -> None:
    cut(built, 0)
    remove(built, 3)
    report = verify(built.info.path, built.rows, fraction=0.0)
    assert {(3, "missing")} <= found(report)
    assert {index for index, _ in found(report)} == {0, 3}
    assert report.read == 1


def test_fraction_reads_a_share_that_the_seed_chooses(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    built = build_store(tmp_path, [random_states(rng, 3, 2, 8) for _ in range(100)])
    counts = {verify(built.info.path, built.rows, fraction=0.25, seed=seed).read for seed in (1, 1, 2)}
    assert all(5 < count < 60 for count in counts)
    flip(built, 17, 0)
    hits = [not verify(built.info.path, built.rows, fraction=0.25, seed=seed).ok for seed in range(20)]
    assert 0 < sum(hits) < 20


def content(built: BuiltStore, index: int, change: Callable[[NDArray[np.uint16]], None]) -> BuiltStore:
    """Stores changed states, and a ledger row that agrees with them: as if they had been committed without being judged."""
    states = built.states[index].copy()
    change(states)
    root = next(root for root in built.roots if root.name == built.rows[index].root)
    marker = Marker("deadbeef", index, 2, len(states))
    receipt = root.write(payload(marker, states, built.input_ids[index]))
    built.rows[index] = replace(built.rows[index], marker=str(marker), crc32c=receipt.crc32c)
    return built


def put_infinity(states: NDArray[np.uint16]) -> None:
    states[40, 1, 3] = 0x7F80


def put_zero_row(states: NDArray[np.uint16]) -> None:
    states[40, 1] = 0x8000


def put_copied_layer(states: NDArray[np.uint16]) -> None:
    states[:, 2] = states[:, 0]


def put_constant_rows(states: NDArray[np.uint16]) -> None:
    states[:, 2] = states[0, 2]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (put_infinity, "finite"),
        (put_zero_row, "nonzero_rows"),
        (put_copied_layer, "not_repeated"),
        (put_constant_rows, "not_repeated"),
    ],
)
def test_content_is_judged_again(built: BuiltStore, change: Callable[[NDArray[np.uint16]], None], kind: str) -> None:
    assert found(verify(built.info.path, content(built, 0, change).rows)) == {(0, kind)}


def test_ledger_and_store_must_agree(built: BuiltStore) -> None:
    rows = built.rows.copy()
    rows[1] = replace(rows[1], crc32c=rows[1].crc32c ^ 1)
    rows[2] = replace(rows[2], tokens=131)
    rows[3] = replace(rows[3], root="z")
    rows[4] = replace(rows[4], root="b")
    rows[5] = replace(rows[5], nbytes=1)
    assert found(verify(built.info.path, rows)) == {
        (1, "crc32c"),
        (2, "ledger"),
        (3, "root"),
        (4, "link"),
        (4, "missing"),
        (5, "size"),
    }


def test_links_are_judged(built: BuiltStore) -> None:
    built.view.path(0).unlink()
    built.view.link(1, "a")
    assert found(verify(built.info.path, built.rows)) == {(0, "link"), (1, "link")}
    assert found(verify(built.info.path, built.rows[:-1])) == {(0, "link"), (1, "link"), (5, "uncommitted_visible")}


def test_uncommitted_shards_are_no_damage(built: BuiltStore) -> None:
    shutil.copy(built.shard(0), built.roots[1].folder / shard_key(0))  # of an attempt that was written elsewhere
    built.view.path(5).unlink()
    report = verify(built.info.path, built.rows[:5])
    assert report.ok
    assert (report.uncommitted, report.uncommitted_indices, report.committed) == (2, [0, 5], 5)


def test_lost_root_is_named_once_and_its_samples_each(built: BuiltStore, tmp_path: Path) -> None:
    (tmp_path / "b").rename(tmp_path / "away")
    report = verify(built.info.path, built.rows)
    assert found(report) == {(None, "root"), (1, "missing"), (3, "missing"), (5, "missing")}
    assert {(1, "missing")} <= found(verify(built.info.path))


def test_show_tells_of_a_sample(built: BuiltStore) -> None:
    view = show(built.info.path, "sample-2", built.rows[2])
    assert (view.index, view.sample_id, view.tokens, view.loss_tokens, view.committed) == (2, "sample-2", 130, 65, True)
    assert view.first_ids == built.input_ids[2][:8].tolist()
    assert view.last_ids == built.input_ids[2][-8:].tolist()
    assert (view.root, view.shard, view.nbytes) == ("a", str(built.shard(2)), built.rows[2].nbytes)
    assert (view.marker, view.sequence) == ("hsx1-deadbeef-2-1-130", 3)
    values = (built.states[2].astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    expected = np.linalg.norm(values, axis=2)
    assert [state.name for state in view.states] == ["h_1", "h_2", "post_norm"]
    assert [state.mean for state in view.states] == pytest.approx(expected.mean(axis=0).tolist())
    assert [state.smallest for state in view.states] == pytest.approx(expected.min(axis=0).tolist())
    assert [state.largest for state in view.states] == pytest.approx(expected.max(axis=0).tolist())
    assert json.loads(json.dumps(view.as_dict()))["tokens"] == 130


def test_show_takes_a_number_as_an_index(built: BuiltStore) -> None:
    view = show(built.info.path, "1")
    assert (view.index, view.tokens, view.root) == (1, 5, None)
    assert (len(view.first_ids), view.last_ids) == (5, [])
    with pytest.raises(RunError) as error:
        show(built.info.path, "9")
    assert error.value.kind == "sample_unknown"


def test_show_of_an_uncommitted_sample_has_no_norms(built: BuiltStore) -> None:
    built.view.path(5).unlink()
    view = show(built.info.path, 5)
    assert (view.committed, view.states, view.shard, view.nbytes, view.tokens) == (False, [], None, None, 1)


def test_norms_of_long_samples_are_taken_in_blocks() -> None:
    bits = random_states(np.random.default_rng(0), 600, 2, 8)
    values = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    assert np.allclose(row_norms(bits), np.linalg.norm(values, axis=2))
