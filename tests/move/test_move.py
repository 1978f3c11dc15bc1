"""A root is drained: everything lies on the others afterwards, whole; what cannot be moved stays and is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hsx.errors import RunError
from hsx.stores.draining import begin_draining, end_draining, is_draining
from hsx.testing.moving import MoveBench

if TYPE_CHECKING:
    from pathlib import Path


def test_everything_is_moved_and_nothing_else(bench: MoveBench) -> None:
    before = bench.rows()
    report = bench.move("a")
    assert (report.moved, report.left, report.damaged, report.stopped, report.under_way) == (3, 0, 0, False, 0)
    assert report.nbytes == sum(row.nbytes for row in before if row.root == "a")
    assert bench.shards("a") == []
    bench.in_order()
    homes = bench.homes_now()
    assert {index for index, home in homes.items() if home == "a"} == set()
    for old, new in zip(before, bench.rows(), strict=True):
        assert old == new or (old.root == "a" and new.root in "bc")
        if old.root != "a":
            assert new == old


@pytest.mark.parametrize("codec", ["blosc", "zstd"])
def test_compressed_shards_are_moved_as_they_are(tmp_path: Path, codec: str) -> None:
    bench = MoveBench(tmp_path, codec=codec)
    before = {row.index: (bench.info.folder("a") / f"c.{row.index}.0.0.0") for row in bench.rows() if row.root == "a"}
    data = {index: path.read_bytes() for index, path in before.items()}
    assert bench.move("a").moved == 3
    bench.in_order()
    for index, home in bench.homes_now().items():
        if index in data:
            assert (bench.info.folder(home) / f"c.{index}.0.0.0").read_bytes() == data[index]


def test_only_the_roots_that_are_named_take_samples(bench: MoveBench) -> None:
    bench.move("a", ["c"])
    assert {home for index, home in bench.homes_now().items() if index % 3 == 0} == {"c"}
    bench.in_order()


def test_moving_again_has_nothing_to_do(bench: MoveBench) -> None:
    bench.move("a")
    assert bench.move("a").moved == 0
    bench.in_order()


def test_there_and_back_again(bench: MoveBench) -> None:
    bench.move("a", ["b"])
    end_draining(bench.info.folder("a"), "a")
    bench.move("b", ["a", "c"])
    bench.in_order()
    assert "b" not in bench.homes_now().values()


@pytest.mark.parametrize("batch", [1, 2, 3, 64])
def test_it_does_not_matter_how_many_go_at_once(bench: MoveBench, batch: int) -> None:
    assert bench.move("a", batch=batch).moved == 3
    bench.in_order()


def test_a_damaged_sample_stays_and_the_others_go(bench: MoveBench) -> None:
    shard = bench.info.folder("a") / "c.3.0.0.0"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    report = bench.move("a")
    assert (report.moved, report.left, report.damaged) == (2, 1, 1)
    assert report.damage[0][0] == 3
    assert "crc32c" in report.damage[0][1]
    assert bench.homes_now()[3] == "a"
    assert bench.partials() == []


def test_a_shard_of_another_sample_is_not_moved(bench: MoveBench) -> None:
    folder = bench.info.folder("a")
    (folder / "c.3.0.0.0").write_bytes((folder / "c.6.0.0.0").read_bytes())
    report = bench.move("a")
    assert [index for index, _ in report.damage] == [3]
    assert bench.homes_now()[3] == "a"


def test_a_missing_shard_is_told(bench: MoveBench) -> None:
    (bench.info.folder("a") / "c.0.0.0.0").unlink()
    report = bench.move("a")
    assert (report.moved, report.damage[0][0]) == (2, 0)
    assert "cannot be read: No such file" in report.damage[0][1]


def test_a_stray_under_the_final_name_gives_way(bench: MoveBench) -> None:
    """A writer killed between rename and commit left it; by the ledger the sample is committed on the other root."""
    for target in ("b", "c"):
        (bench.info.folder(target) / "c.3.0.0.0").write_bytes(b"of an attempt that was not committed")
    assert bench.move("a").moved == 3
    bench.in_order()


def test_a_stray_that_comes_while_it_is_copied_gives_way(bench: MoveBench) -> None:
    def leave(step: str) -> None:
        if step == "copied" and bench.homes_now()[3] == "a":
            for target in ("b", "c"):
                (bench.info.folder(target) / "c.3.0.0.0").write_bytes(b"of an attempt that was not committed")

    assert bench.move("a", ["b"], reached=leave).moved == 3
    assert bench.move("a", ["b", "c"]).moved == 0  # clears what was left on the root that did not take it
    bench.in_order()


def test_a_copy_that_goes_missing_is_made_again(bench: MoveBench) -> None:
    taken: list[str] = []

    def take(step: str) -> None:
        if step == "copied" and not taken:
            taken.extend(bench.partials())
            for name in taken:
                for root in ("b", "c"):
                    (bench.info.folder(root) / name).unlink(missing_ok=True)

    assert bench.move("a", batch=1, reached=take).moved == 3
    assert taken
    bench.in_order()


def test_copies_that_always_go_missing_end_the_move(bench: MoveBench) -> None:
    def take(step: str) -> None:
        if step == "copied":
            for root in ("b", "c"):
                for path in bench.info.folder(root).glob("*.partial"):
                    path.unlink()

    with pytest.raises(RunError, match=r"root_unusable.*3 samples on root a cannot be moved"):
        bench.move("a", batch=1, reached=take)
    assert bench.shards("a") == [0, 3, 6]
    bench.in_order()


def test_a_request_to_stop_ends_it_in_good_order(bench: MoveBench) -> None:
    steps: list[str] = []
    report = bench.move("a", batch=1, reached=steps.append, stopped=lambda: "committed" in steps)
    assert (report.stopped, report.moved, report.left) == (True, 1, 2)
    assert is_draining(bench.info.folder("a"))
    bench.in_order()
    assert bench.move("a").moved == 2
    bench.in_order()


def test_a_cancelled_draining_ends_it_too(bench: MoveBench) -> None:
    def cancel(step: str) -> None:
        if step == "committed":
            end_draining(bench.info.folder("a"), "a")

    report = bench.move("a", batch=1, reached=cancel)
    assert (report.stopped, report.moved) == (True, 1)
    bench.in_order()


def test_what_is_committed_meanwhile_is_moved_too(bench: MoveBench) -> None:
    """As by a running job that had begun to write there before the root was marked."""

    def come(step: str) -> None:
        if step == "named" and bench.homes_now()[1] == "b":
            bench.view.link(1, "a")
            (bench.info.folder("b") / "c.1.0.0.0").rename(bench.info.folder("a") / "c.1.0.0.0")
            with bench.ledger() as ledger, ledger.transaction():
                ledger.rehome([1], "a")

    report = bench.move("a", ["c"], batch=64, reached=come)
    assert (report.moved, report.left) == (4, 0)
    bench.in_order()


def test_a_root_is_not_moved_to_itself(bench: MoveBench) -> None:
    with pytest.raises(ValueError, match="root b is to be moved to itself"):
        bench.move("b", ["a", "b"])
    bench.in_order()


def test_reserves_are_kept(bench: MoveBench) -> None:
    with pytest.raises(
        RunError, match=r"roots_full.*no root can take a shard of [0-9.]+ kB from root a \(b: 0 bytes of room; c: 0"
    ):
        bench.move("a", reserves={"b": 1 << 60, "c": 1 << 60})
    bench.in_order()
    bench.move("a", reserves={"b": 1 << 60})
    assert {home for index, home in bench.homes_now().items() if index % 3 == 0} == {"c"}
    bench.in_order()


def test_the_mark_is_kept_and_taken_away(bench: MoveBench) -> None:
    folder = bench.info.folder("b")
    assert not is_draining(folder)
    assert end_draining(folder, "b") is False
    begin_draining(folder, "b")
    begin_draining(folder, "b")
    assert is_draining(folder)
    assert end_draining(folder, "b") is True
    assert not is_draining(folder)


def test_a_mark_that_cannot_be_made_or_taken_away(bench: MoveBench) -> None:
    with pytest.raises(RunError, match=r"root_unusable.*root x: .*nowhere"):
        begin_draining(bench.folder / "nowhere", "x")
    (bench.info.folder("b") / "hsx-draining").mkdir()
    with pytest.raises(RunError, match=r"root_unusable.*root b"):
        end_draining(bench.info.folder("b"), "b")
