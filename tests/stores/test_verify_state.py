"""A verification that was cut short goes on; what it proved is not read again unless it changed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import pytest

from hsx.errors import RunError
from hsx.testing.stores import BuiltStore, build_store, random_states
from hsx.verify import Reading, VerifyReport, verify
from hsx.verify.state import MARGIN_S, RECORD, VerifyState, read_past, state_beside

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = 8


class Cut(Exception):  # noqa: N818 - what a kill would be
    """Ends a verification."""


@pytest.fixture
def built(tmp_path: Path) -> BuiltStore:
    """Eight samples on one root."""
    rng = np.random.default_rng(5)
    return build_store(tmp_path, [random_states(rng, 3, 2, 8) for _ in range(SAMPLES)], roots=("a",))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "verify.json"


def cut_after(built: BuiltStore, path: Path, reads: int) -> None:
    """A verification that ends after the first so many shards. One thread reads: of several, a slow one may come to its first
    shard when others have had the next."""

    def watch(reading: Reading) -> None:
        if reading.samples == reads:
            raise Cut

    with (
        pytest.raises(Cut),
        VerifyState(path, built.info, resume=False) as state,
        patch("hsx.verify.store.READERS", 1),
    ):
        verify(built.info.path, built.rows, state=state, watch=watch, threads=1)


def resumed(built: BuiltStore, path: Path) -> VerifyReport:
    with VerifyState(path, built.info, resume=True) as state:
        report = verify(built.info.path, built.rows, state=state)
        state.finish(sound=report.ok, since=None)
    return report


def test_the_next_one_reads_the_rest(built: BuiltStore, path: Path) -> None:
    cut_after(built, path, 3)
    assert read_past(path, built.info.store_id).began is not None
    report = resumed(built, path)
    assert (report.ok, report.committed, report.resumed, report.read) == (True, SAMPLES, 3, SAMPLES - 3)
    again = resumed(built, path)
    assert (again.resumed, again.read) == (0, SAMPLES)  # it had come to its end: nothing to go on with


def test_without_resume_everything_is_read(built: BuiltStore, path: Path) -> None:
    cut_after(built, path, 3)
    with VerifyState(path, built.info, resume=False) as state:
        assert verify(built.info.path, built.rows, state=state).read == SAMPLES


def test_what_is_damaged_or_has_changed_is_read_again(built: BuiltStore, path: Path) -> None:
    built.shard(1).unlink()
    cut_after(built, path, 4)
    built.rows[2] = replace(built.rows[2], crc32c=built.rows[2].crc32c ^ 1)
    report = resumed(built, path)
    assert report.resumed == 2
    assert {(damage.index, damage.kind) for damage in report.damage} == {(1, "missing"), (2, "crc32c")}


def test_a_shard_that_is_lost_after_it_was_proved_is_told_all_the_same(built: BuiltStore, path: Path) -> None:
    cut_after(built, path, 4)
    built.shard(0).unlink()
    assert [(damage.index, damage.kind) for damage in resumed(built, path).damage] == [(0, "missing")]


def test_a_torn_record_is_no_record(built: BuiltStore, path: Path) -> None:
    cut_after(built, path, 3)
    proved = path.with_name("verify.json.proved")
    assert len(proved.read_bytes()) == 3 * RECORD.itemsize
    proved.write_bytes(proved.read_bytes()[:-5])
    report = resumed(built, path)
    assert (report.resumed, report.read) == (2, SAMPLES - 2)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "hsx-verify-0"}'])
def test_a_state_that_cannot_be_read_is_none(built: BuiltStore, path: Path, content: str) -> None:
    cut_after(built, path, 3)
    path.write_text(content)
    assert resumed(built, path).read == SAMPLES


def test_the_state_of_another_store_is_none(built: BuiltStore, path: Path) -> None:
    cut_after(built, path, 3)
    other = replace(built.info, store_id="00000000-0000-4000-8000-00000000000f")
    assert read_past(path, other.store_id).began is None
    with VerifyState(path, other, resume=True) as state:
        assert verify(built.info.path, built.rows, state=state).read == SAMPLES


def test_only_a_sound_verification_of_all_that_was_new_moves_the_mark(built: BuiltStore, path: Path) -> None:
    def mark() -> float | None:
        return read_past(path, built.info.store_id).sound_until

    def end(*, sound: bool, since: float | None) -> float:
        with VerifyState(path, built.info, resume=False) as state:
            state.finish(sound=sound, since=since)
            return state.began - MARGIN_S

    end(sound=False, since=None)
    end(sound=True, since=5.0)
    assert mark() is None
    first = end(sound=True, since=None)
    assert mark() == first
    end(sound=True, since=first + 1)  # what was committed in between was not looked at
    end(sound=False, since=first)
    assert mark() == first
    assert end(sound=True, since=first) == mark()


def test_a_state_that_cannot_be_written(built: BuiltStore, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written") as error:
        VerifyState(tmp_path / "nowhere" / "verify.json", built.info, resume=False)
    assert error.value.kind == "store_unwritable"


def test_a_store_has_its_state_beside_it(built: BuiltStore) -> None:
    assert state_beside(built.info.path) == built.info.path.with_name(".store.verify.json")
