"""What a running job and a running move change under a verification is no damage; what is damaged stays so."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hsx.core.marker import Marker
from hsx.testing.changing_rows import ChangingRows
from hsx.testing.stores import BuiltStore, build_store, payload, random_states
from hsx.verify import VerifyReport, verify

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hsx.records import CommittedRow


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Four samples on two roots by turns, all committed."""
    rng = np.random.default_rng(5)
    return build_store(tmp_path, [random_states(rng, tokens, 3, 16) for tokens in (70, 5, 130, 64)])


def verified(built: BuiltStore, index: int, later: Sequence[CommittedRow | None]) -> VerifyReport:
    return verify(built.info.path, ChangingRows(built.rows, {index: later}))


def damages(report: VerifyReport) -> list[tuple[int | None, str]]:
    return [(damage.index, damage.kind) for damage in report.damage]


def moved(built: BuiltStore, index: int, root: str) -> CommittedRow:
    """Moves a shard as `hsx move` does; returns the row of its new home."""
    row = replace(built.rows[index], root=root)
    shutil.move(built.shard(index), built.info.folder(root) / built.shard(index).name)
    built.view.link(index, root)
    return row


@pytest.mark.parametrize("asked", [0, 1])
def test_a_sample_that_moves_is_read_where_it_is(built: BuiltStore, asked: int) -> None:
    before = built.rows[0]
    report = verified(built, 0, [*[before] * asked, moved(built, 0, "b")])
    assert damages(report) == []
    assert (report.committed, report.read, report.uncommitted) == (4, 4, 0)


def test_what_is_looked_at_and_not_read_is_asked_again_too(built: BuiltStore) -> None:
    row = moved(built, 3, "a")
    rows = ChangingRows(built.rows, {3: [row]})
    assert damages(verify(built.info.path, rows, fraction=0.0)) == []
    (built.info.folder("a") / "c.3.0.0.0").unlink()
    assert (3, "missing") in damages(verify(built.info.path, rows, fraction=0.0))


def test_a_sample_that_moved_and_is_damaged_there_is_damaged(built: BuiltStore) -> None:
    before = built.rows[0]
    row = moved(built, 0, "b")
    path = built.info.folder("b") / "c.0.0.0.0"
    path.write_bytes(path.read_bytes()[:-4096])
    assert damages(verified(built, 0, [before, row])) == [(0, "truncated")]


@pytest.mark.parametrize("asked", [0, 1])
def test_a_sample_that_was_revoked_is_not_missed(built: BuiltStore, asked: int) -> None:
    row = built.rows[2]
    built.shard(2).unlink()
    built.view.unlink(2)
    report = verified(built, 2, [*[row] * asked, None])
    assert damages(report) == []
    assert (report.committed, report.read) == (3, 3)


def test_a_sample_that_is_extracted_again_is_held_against_its_new_commit(built: BuiltStore) -> None:
    before = built.rows[2]
    marker = Marker("deadbeef", 2, 2, 130)
    receipt = built.roots[0].write(payload(marker, built.states[2][::-1].copy(), built.input_ids[2]))
    row = replace(before, marker=str(marker), crc32c=receipt.crc32c)
    assert damages(verified(built, 2, [before, row])) == []
    assert damages(verified(built, 2, [before])) == [(2, "record")]


def test_a_link_that_follows_its_commit_is_waited_for(built: BuiltStore) -> None:
    built.view.unlink(1)
    assert damages(verify(built.info.path, ChangingRows(built.rows, {}))) == [(1, "link")]
    assert damages(verified(built, 1, [built.rows[1], None])) == []


def test_a_link_that_is_gone_after_all_was_no_damage(built: BuiltStore) -> None:
    rows = ChangingRows(built.rows[:3], {3: [None, None]})
    assert damages(verify(built.info.path, rows)) == [(3, "uncommitted_visible")]
    committed_meanwhile = ChangingRows(built.rows[:3], {3: [built.rows[3]]})
    assert damages(verify(built.info.path, committed_meanwhile)) == []


def test_every_damage_is_told_as_it_is_met(built: BuiltStore) -> None:
    built.shard(1).unlink()
    told: list[int | None] = []
    report = verify(built.info.path, built.rows, on_damage=lambda damage: told.append(damage.index))
    assert told == [1]
    assert damages(report) == [(1, "missing")]


def test_a_slow_reader_of_one_root_is_waited_for(built: BuiltStore) -> None:
    for threads in (1, 3):
        report = verify(built.info.path, built.rows, threads=threads, cold=True)
        assert (report.ok, report.read, report.nbytes) == (True, 4, sum(row.nbytes for row in built.rows))


def test_what_goes_wrong_in_a_reading_thread_is_raised_and_ends_all(built: BuiltStore) -> None:
    class Broken(ChangingRows):
        def row(self, index: int) -> CommittedRow | None:
            raise ZeroDivisionError(f"sample {index}")

    with pytest.raises(ZeroDivisionError, match="sample"):
        verify(built.info.path, Broken(built.rows, {}))
