"""The rules of assembly: what becomes a dump, what fails, what is forgotten."""

from __future__ import annotations

import random

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hsx.capture.assembly import MAX_PARTIAL, MAX_SETTLED, PATIENCE, Assembly, Failure, Piece
from hsx.core.marker import Marker

RUN = "0a0b0c0d"


def marker(index: int, tokens: int) -> Marker:
    return Marker(RUN, index, 1, tokens)


def forward(assembly: Assembly, *chunks: tuple[Marker, int, int]) -> tuple[tuple[Piece, ...], tuple[Failure, ...]]:
    plan = assembly.forward([str(m) for m, _, _ in chunks], [o for _, o, _ in chunks], [n for _, _, n in chunks])
    return plan.pieces, plan.failures


def test_one_chunk_is_a_whole_dump() -> None:
    one = marker(0, 5)
    plan = Assembly().forward([str(one)], [0], [5])
    assert plan.pieces == (Piece(one, 0, 0, 5, begins=True, whole=True),)
    assert plan.rows == 5


def test_chunks_continue_where_the_last_one_ended() -> None:
    assembly, long, short = Assembly(), marker(0, 10), marker(1, 3)
    assert forward(assembly, (long, 0, 4))[0] == (Piece(long, 0, 0, 4, begins=True, whole=False),)
    pieces, _ = forward(assembly, (long, 4, 6), (short, 0, 3))
    assert pieces == (
        Piece(long, 0, 4, 6, begins=False, whole=True),
        Piece(short, 6, 0, 3, begins=True, whole=True),
    )


def test_foreign_rows_are_counted_and_skipped() -> None:
    assembly, mine = Assembly(), marker(0, 2)
    plan = assembly.forward(["HEALTH_CHECK_1", str(mine), "f" * 32, "f" * 32], [0, 0, 0, 7], [1, 2, 3, 4])
    assert plan.pieces == (Piece(mine, 1, 0, 2, begins=True, whole=True),)
    assert plan.rows == 10
    assert plan.foreign == 2


def test_cached_prefix_fails() -> None:
    pieces, failures = forward(Assembly(), (marker(0, 10), 9, 1))
    assert pieces == ()
    assert failures[0].reason == "a chunk begins at token 9; expected 0 (a cached prefix or a lost chunk)"


def test_gap_and_overlap_fail() -> None:
    for offset in (3, 5):
        assembly, one = Assembly(), marker(0, 10)
        forward(assembly, (one, 0, 4))
        pieces, failures = forward(assembly, (one, offset, 2))
        assert pieces == ()
        assert failures == (Failure(one, f"a chunk begins at token {offset}; expected 4 (a cached prefix or a lost chunk)"),)


def test_more_tokens_than_promised_fail() -> None:
    pieces, failures = forward(Assembly(), (marker(0, 10), 0, 11))
    assert pieces == ()
    assert failures[0].reason == "a chunk ends at token 11; expected at most 10"


def test_retraction_begins_again() -> None:
    assembly, one = Assembly(), marker(0, 10)
    forward(assembly, (one, 0, 4))
    assert forward(assembly, (one, 0, 6))[0] == (Piece(one, 0, 0, 6, begins=True, whole=False),)
    assert forward(assembly, (one, 6, 4))[0][0].whole


def test_settled_is_ignored() -> None:
    assembly, one = Assembly(), marker(0, 10)
    forward(assembly, (one, 0, 10))
    assembly.settle(one)
    assert forward(assembly, (one, 0, 10)) == ((), ())
    assert forward(assembly, (one, 3, 12)) == ((), ())
    assert assembly.is_settled(one)


def test_vanished_request_is_dropped_after_patience() -> None:
    assembly, gone = Assembly(), marker(0, 10)
    forward(assembly, (gone, 0, 4))
    for turn in range(PATIENCE):
        assert assembly.forward([f"other-{turn}"], [0], [1]).gone == ()
    assert assembly.forward(["other"], [0], [1]).gone == (gone,)
    assert assembly.partial == 0
    # Were it not gone after all, the next chunk must not pass for a continuation.
    assert forward(assembly, (gone, 4, 6))[1][0].reason.startswith("a chunk begins at token 4; expected 0")


def test_returning_request_keeps_its_patience() -> None:
    assembly, slow = Assembly(), marker(0, 100)
    for offset in range(0, 100, 10):
        for turn in range(PATIENCE):
            assert assembly.forward([f"other-{turn}"], [0], [1]).gone == ()
        assert forward(assembly, (slow, offset, 10))[1] == ()


def test_partial_markers_are_bounded() -> None:
    assembly = Assembly()
    gone: list[Marker] = []
    for index in range(3 * MAX_PARTIAL):
        gone += assembly.forward([str(marker(index, 10))], [0], [4]).gone
    assert assembly.partial <= MAX_PARTIAL
    assert len(gone) + assembly.partial == 3 * MAX_PARTIAL


def test_a_batch_larger_than_the_bound_survives() -> None:
    assembly, many = Assembly(), [marker(i, 10) for i in range(2 * MAX_PARTIAL)]
    plan = assembly.forward([str(m) for m in many], [0] * len(many), [4] * len(many))
    assert plan.gone == ()
    assert len(plan.pieces) == len(many)


def test_settled_memory_is_bounded() -> None:
    assembly = Assembly()
    for index in range(MAX_SETTLED + 10):
        assembly.settle(marker(index, 1))
    assert not assembly.is_settled(marker(9, 1))
    assert assembly.is_settled(marker(10, 1))


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 17), st.integers(0, 2**32))
def test_any_schedule_covers_every_token_once(lengths: list[int], budget: int, seed: int) -> None:
    """However the server cuts prompts into chunks under a shared budget, each row goes to one token of one marker."""
    rng = random.Random(seed)
    assembly = Assembly()
    markers = [marker(i, n) for i, n in enumerate(lengths)]
    done = dict.fromkeys(markers, 0)
    covered: dict[Marker, list[int]] = {m: [] for m in markers}
    while pending := [m for m in markers if done[m] < m.tokens]:
        chunks, left = [], budget
        for one in pending:
            count = min(left, one.tokens - done[one])
            if count and rng.random() < 0.8:
                chunks.append((one, done[one], count))
                done[one] += count
                left -= count
        plan = assembly.forward([str(m) for m, _, _ in chunks], [o for _, o, _ in chunks], [n for _, _, n in chunks])
        assert plan.failures == ()
        assert [p.row for p in plan.pieces] == [sum(n for _, _, n in chunks[:i]) for i in range(len(chunks))]
        for piece in plan.pieces:
            covered[piece.marker] += range(piece.offset, piece.offset + piece.count)
            assert piece.whole == (done[piece.marker] == piece.marker.tokens)
        assume(plan.gone == ())  # a request that this schedule starves is rightly given up
    assert all(covered[m] == list(range(m.tokens)) for m in markers)
