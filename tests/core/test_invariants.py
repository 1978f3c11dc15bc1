"""Each invariant holds for sound evidence, and is the one reported when it alone is broken."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsx.core.dump import DumpHeader
from hsx.core.invariants import INVARIANTS, Answer, Content, Evidence, judge_answer, judge_dump
from hsx.core.marker import Marker
from hsx.core.policy import POLICY
from hsx.core.spec import CaptureSpec

MARKER = Marker("0a1b2c3d", 7, 2, 5)
SPEC = CaptureSpec((1, 4), "post_norm")
DUMP = DumpHeader(MARKER, "epoch-a", 3, SPEC, 8, "model", "sglang 0.5.23")
CONTENT = Content(None, False, 0, None, 0, None, (), ())
SOUND = Evidence(MARKER, "epoch-a", SPEC, 8, DUMP, CONTENT)
ANSWER = Answer(5, 0, "length", 0)

BROKEN = {
    "epoch": replace(SOUND, dump=replace(DUMP, epoch="epoch-b")),
    "expected": replace(SOUND, dump=replace(DUMP, marker=replace(MARKER, attempt=1))),
    "rows": replace(SOUND, dump=replace(DUMP, spec=CaptureSpec((1, 5), "post_norm"))),
    "tokens_equal": replace(SOUND, content=replace(CONTENT, ids_differ_at=4)),
    "finite": replace(SOUND, content=replace(CONTENT, nonfinite=1, nonfinite_at=(2, 1))),
    "nonzero_rows": replace(SOUND, content=replace(CONTENT, zero_rows=1, zero_row_at=(0, 2))),
    "not_repeated": replace(SOUND, content=replace(CONTENT, equal_states=((0, 1),))),
}
BROKEN_ANSWERS = {
    "prompt_tokens": [replace(ANSWER, prompt_tokens=4), replace(ANSWER, prompt_tokens=6)],
    "uncached": [replace(ANSWER, cached_tokens=1), replace(ANSWER, retractions=1), replace(ANSWER, finish_reason="abort")],
}


def test_sound_evidence_violates_nothing() -> None:
    assert judge_dump(SOUND) is None
    assert judge_answer(MARKER, ANSWER) is None


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_dump_is_reported_by_name(name: str) -> None:
    violation = judge_dump(BROKEN[name])
    assert violation is not None
    assert violation.invariant == name
    assert violation.evidence


@pytest.mark.parametrize("name", BROKEN_ANSWERS)
def test_a_broken_answer_is_reported_by_name(name: str) -> None:
    for answer in BROKEN_ANSWERS[name]:
        violation = judge_answer(MARKER, answer)
        assert violation is not None
        assert violation.invariant == name


@pytest.mark.parametrize(
    "dump",
    [
        replace(DUMP, hidden_size=9),
        replace(DUMP, spec=CaptureSpec((1, 4), "pre_norm")),
        replace(DUMP, spec=CaptureSpec((1,), "post_norm")),
    ],
)
def test_rows_covers_width_final_and_number_of_layers(dump: DumpHeader) -> None:
    violation = judge_dump(replace(SOUND, dump=dump))
    assert violation is not None
    assert violation.invariant == "rows"


def test_constant_rows_are_a_violation_unless_the_prompt_repeats_one_id() -> None:
    constant = replace(CONTENT, constant_states=(1,))
    violation = judge_dump(replace(SOUND, content=constant))
    assert violation is not None
    assert violation.invariant == "not_repeated"
    assert judge_dump(replace(SOUND, content=replace(constant, ids_all_equal=True))) is None


@given(st.sets(st.sampled_from(sorted(BROKEN)), min_size=1))
def test_with_several_faults_the_deepest_is_named(names: set[str]) -> None:
    evidence = SOUND
    for name in names:
        broken = BROKEN[name]
        evidence = replace(
            evidence,
            dump=replace(
                evidence.dump,
                **{
                    field: getattr(broken.dump, field)
                    for field in ("epoch", "marker", "spec")
                    if getattr(broken.dump, field) != getattr(DUMP, field)
                },
            ),
            content=replace(
                evidence.content,
                **{
                    field: getattr(broken.content, field)
                    for field in Content.__slots__
                    if getattr(broken.content, field) != getattr(CONTENT, field)
                },
            ),
        )
    violation = judge_dump(evidence)
    assert violation is not None
    assert violation.invariant == min(names, key=list(INVARIANTS).index)


def test_every_invariant_says_what_it_proves() -> None:
    assert all(invariant.proves.endswith(".") or ":" in invariant.proves for invariant in INVARIANTS.values())


def test_only_identity_speaks_against_the_epoch() -> None:
    assert {POLICY[reason].epoch for reason in ("tokens_equal", "published", "dump_invalid")} == {"count"}
    assert {POLICY[reason].epoch for reason in ("finite", "nonzero_rows", "not_repeated", "request_failed")} == {"test"}
    assert POLICY["request_refused"].epoch == "-"
