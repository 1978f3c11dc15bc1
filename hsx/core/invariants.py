"""The invariants: what must hold before a state may be stored.

Each is a pure function over records that returns None when it holds and a `Violation` when it does not. `SAMPLE_INVARIANTS`
lists those that are judged for every sample, in order of judgement; the counter and progress invariants of a run are
judged by `pairing.py` and `progress.py`, and named here so that there is one table of names.
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
    """All that is known of one attempt when it is judged.

    Attributes:
        marker: the attempt's marker; its tokens are the sample's.
        epoch: the current epoch.
        spec: the job's capture spec.
        hidden_size: H of the job's model.
        answer: the HTTP answer, or None for a dump adopted after a restart of hsx, whose answer was lost with its process.
        dump: the dump's header.
        content: what was measured in its tensors.
    """

    marker: Marker
    epoch: str
    spec: CaptureSpec
    hidden_size: int
    answer: Answer | None
    dump: DumpHeader
    content: Content


def prompt_tokens(evidence: Evidence) -> Violation | None:
    """The server counted as many prompt tokens as the sample has: it did not truncate, template or add anything."""
    answer = evidence.answer
    if answer is None or answer.prompt_tokens == evidence.marker.tokens:
        return None
    return Violation("prompt_tokens", f"server counted {answer.prompt_tokens} prompt tokens; expected {evidence.marker.tokens}")


def uncached(evidence: Evidence) -> Violation | None:
    """Every token went through this very prefill: none came from a cache, nothing was retracted or aborted."""
    answer = evidence.answer
    if answer is None:
        return None
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
    """A row of the table: name, group, and the judge for those that are judged per sample."""

    name: str
    group: Group
    judge: Callable[[Evidence], Violation | None] | None = None
    proves: str = ""


def _row(group: Group, judge: Callable[[Evidence], Violation | None]) -> Invariant:
    return Invariant(judge.__name__, group, judge, (judge.__doc__ or "").split("\n")[0])


# Order matters: identity first, so that the reason given is the deepest one. A dump of another sample breaks `expected`, not
# merely `tokens_equal`; and rows must be right before a position in them means anything.
SAMPLE_INVARIANTS: Final[tuple[Invariant, ...]] = (
    _row("counter", epoch),
    _row("counter", expected),
    _row("token", prompt_tokens),
    _row("token", uncached),
    _row("token", rows),
    _row("token", tokens_equal),
    _row("content", finite),
    _row("content", nonzero_rows),
    _row("content", not_repeated),
)

RUN_INVARIANTS: Final[tuple[Invariant, ...]] = (
    Invariant("published", "counter", None, "A 200 answer is followed by its dump within its deadline."),
    Invariant(
        "advancing", "progress", None, "With requests in flight, something comes out within a deadline that grows with them."
    ),
    Invariant("alive", "progress", None, "The server process lives and its record still matches."),
)

INVARIANTS: Final[dict[str, Invariant]] = {i.name: i for i in (*SAMPLE_INVARIANTS, *RUN_INVARIANTS)}


def judge(evidence: Evidence) -> Violation | None:
    """The first violated invariant of the sample, or None when the states are proved to be this sample's."""
    for invariant in SAMPLE_INVARIANTS:
        violation = invariant.judge(evidence) if invariant.judge is not None else None
        if violation is not None:
            return violation
    return None
