"""The invariants: what must hold before a state may be stored.

Each is a pure function over records that returns None when it holds and a `Violation` when it does not. The tables at the end
list them in order of judgement: those of the server's answer, those of the dump, and those of the whole run, which are
judged elsewhere (`progress.py`, the pipeline's deadlines, the supervisor) and named here so that there is one list of names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from hsx.core.dump import DumpHeader
from hsx.core.marker import Marker
from hsx.core.spec import CaptureSpec

Group = Literal["token", "content", "counter", "progress", "canary"]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, with the evidence: what was expected and what was found."""

    invariant: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What the server's HTTP answer says of one request.

    Attributes:
        prompt_tokens: the server's count of the prompt.
        cached_tokens: prompt tokens it did not prefill.
        finish_reason: `length`, `stop`, `abort`, ...
        retractions: how often it was taken out of a batch and started again.
    """

    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    retractions: int


@dataclass(frozen=True, slots=True)
class Content:
    """What one pass over a dump's tensors measured.

    Attributes:
        ids_differ_at: position of the first id that is not the sample's; None when all are equal.
        ids_all_equal: the sample repeats a single id (its rows may then rightly be equal).
        nonfinite: count of NaN and infinite values; `nonfinite_at` is the first one's (token, state).
        zero_rows: count of all-zero rows (one token, one state); `zero_row_at` is the first one's (token, state).
        equal_states: pairs of states that are bit-equal over all tokens.
        constant_states: states whose rows are all equal; always empty for a single token.
    """

    ids_differ_at: int | None
    ids_all_equal: bool
    nonfinite: int
    nonfinite_at: tuple[int, int] | None
    zero_rows: int
    zero_row_at: tuple[int, int] | None
    equal_states: tuple[tuple[int, int], ...]
    constant_states: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """A dump, and what it is judged against.

    Attributes:
        marker: the attempt's marker; its tokens are the sample's.
        epoch: the current epoch.
        spec: the job's capture spec.
        hidden_size: H of the job's model.
        dump: the dump's header.
        content: what was measured in its tensors.
    """

    marker: Marker
    epoch: str
    spec: CaptureSpec
    hidden_size: int
    dump: DumpHeader
    content: Content


def prompt_tokens(marker: Marker, answer: Answer) -> Violation | None:
    """The server counted as many prompt tokens as the sample has: it did not truncate, template or add anything."""
    if answer.prompt_tokens == marker.tokens:
        return None
    return Violation("prompt_tokens", f"server counted {answer.prompt_tokens} prompt tokens; expected {marker.tokens}")


def uncached(_marker: Marker, answer: Answer) -> Violation | None:
    """Every token went through this very prefill: none came from a cache, nothing was retracted or aborted."""
    if answer.cached_tokens:
        return Violation("uncached", f"{answer.cached_tokens} tokens came from the prefix cache; expected 0")
    if answer.retractions:
        return Violation("uncached", f"request was retracted {answer.retractions} times; expected 0")
    if answer.finish_reason == "abort":
        return Violation("uncached", "request was aborted by the server; expected it to finish")
    return None


def epoch(evidence: Evidence) -> Violation | None:
    """The dump was written by the server that is running now, not by one that was replaced."""
    if evidence.dump.epoch == evidence.epoch:
        return None
    return Violation("epoch", f"dump is of epoch {evidence.dump.epoch}; expected {evidence.epoch}")


def expected(evidence: Evidence) -> Violation | None:
    """The dump carries, inside, the very marker under whose name it was found."""
    if evidence.dump.marker == evidence.marker:
        return None
    return Violation("expected", f"dump is of marker {evidence.dump.marker}; expected {evidence.marker}")


def rows(evidence: Evidence) -> Violation | None:
    """The states have one row per token, the job's layers in the job's order, and the model's width."""
    dump = evidence.dump
    found = (dump.tokens, dump.spec.names, dump.hidden_size)
    wanted = (evidence.marker.tokens, evidence.spec.names, evidence.hidden_size)
    if found == wanted:
        return None
    return Violation("rows", f"dump has (tokens, states, width) {found}; expected {wanted}")


def tokens_equal(evidence: Evidence) -> Violation | None:
    """The ids that the server prefilled, recorded beside the states, are the sample's, all of them."""
    at = evidence.content.ids_differ_at
    if at is None:
        return None
    return Violation("tokens_equal", f"dump's input_ids differ from the sample's at position {at}")


def finite(evidence: Evidence) -> Violation | None:
    """No value is NaN or infinite: one such value ruins a training run."""
    content = evidence.content
    if content.nonfinite == 0:
        return None
    where = _where(evidence, content.nonfinite_at)
    return Violation("finite", f"{content.nonfinite} values are NaN or infinite, the first at {where}; expected none")


def nonzero_rows(evidence: Evidence) -> Violation | None:
    """No token has an all-zero vector: that is what unwritten memory looks like, and training on it seems to converge."""
    content = evidence.content
    if content.zero_rows == 0:
        return None
    where = _where(evidence, content.zero_row_at)
    return Violation("nonzero_rows", f"{content.zero_rows} rows are all zero, the first at {where}; expected none")


def not_repeated(evidence: Evidence) -> Violation | None:
    """States are not copies of each other, and a state's rows are not all the same: both are signs of a stale buffer.

    A prompt that repeats one id has, rightly, equal rows at every position (attention averages equal values, and rotary
    embeddings do not touch them), so the second check is left out for it.
    """
    content = evidence.content
    names = evidence.dump.spec.names
    if content.equal_states:
        a, b = content.equal_states[0]
        return Violation("not_repeated", f"states {names[a]} and {names[b]} are bit-equal; expected different states")
    if content.constant_states and not content.ids_all_equal:
        return Violation("not_repeated", f"all rows of {names[content.constant_states[0]]} are equal; expected them to differ")
    return None


def _where(evidence: Evidence, at: tuple[int, int] | None) -> str:
    if at is None:
        return "an unknown place"
    token, state = at
    return f"token {token}, {evidence.dump.spec.names[state]}"


@dataclass(frozen=True, slots=True)
class Invariant:
    """A row of the tables: name, group, and what it proves."""

    name: str
    group: Group
    proves: str


# Order matters: identity first, so that the reason given is the deepest one. A dump of another sample breaks `expected`, not
# merely `tokens_equal`; and rows must be right before a position in them means anything.
ANSWER_INVARIANTS: Final[tuple[tuple[Group, Callable[[Marker, Answer], Violation | None]], ...]] = (
    ("token", prompt_tokens),
    ("token", uncached),
)
DUMP_INVARIANTS: Final[tuple[tuple[Group, Callable[[Evidence], Violation | None]], ...]] = (
    ("counter", epoch),
    ("counter", expected),
    ("token", rows),
    ("token", tokens_equal),
    ("content", finite),
    ("content", nonzero_rows),
    ("content", not_repeated),
)
RUN_INVARIANTS: Final[tuple[Invariant, ...]] = (
    Invariant("published", "counter", "A 200 answer is followed by its dump within its deadline."),
    Invariant("advancing", "progress", "With requests in flight, something comes out within a deadline that grows with them."),
    Invariant("alive", "progress", "The server process lives and its record still matches."),
    Invariant("canary", "canary", "A probe prompt of hsx's own comes back sound, at boot and when samples fail in a row."),
)


def _named(group: Group, judge: Callable[..., Violation | None]) -> Invariant:
    return Invariant(judge.__name__, group, " ".join((judge.__doc__ or "").split("\n\n")[0].split()))


INVARIANTS: Final[dict[str, Invariant]] = {
    row.name: row
    for row in (
        *(_named(group, judge) for group, judge in ANSWER_INVARIANTS),
        *(_named(group, judge) for group, judge in DUMP_INVARIANTS),
        *RUN_INVARIANTS,
    )
}


def judge_answer(marker: Marker, answer: Answer) -> Violation | None:
    """The first invariant that the server's answer violates, or None.

    A dump adopted after a restart of hsx has no answer any more, and is judged by `judge_dump` alone: rows and ids, written by
    the server beside each other, prove as much, since tokens that came from a cache would have left their rows unwritten,
    and such a dump is never published.
    """
    return next((v for _, judge in ANSWER_INVARIANTS if (v := judge(marker, answer)) is not None), None)


def judge_dump(evidence: Evidence) -> Violation | None:
    """The first invariant that the dump violates, or None: then the states are proved to be this sample's."""
    return next((v for _, judge in DUMP_INVARIANTS if (v := judge(evidence)) is not None), None)
