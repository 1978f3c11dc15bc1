"""The invariants: what must hold before a state may be stored.

Each is a pure function over records that returns None when it holds and a `Violation` when it does not. The tables at the end
list them in order of judgement: those of the server's answer, of the dump, of the canary, and of the whole run, which are
judged elsewhere (`counter.py`, `progress.py`, the pipeline's deadlines, the supervisor) and named here so that there is one
list of names. What is done about each is `policy.py`'s table.
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
        crcs: crc32c of the rows of each inner chunk, in order: of the very bytes that were judged; empty where not reckoned.
    """

    ids_differ_at: int | None
    ids_all_equal: bool
    nonfinite: int
    nonfinite_at: tuple[int, int] | None
    zero_rows: int
    zero_row_at: tuple[int, int] | None
    equal_states: tuple[tuple[int, int], ...]
    constant_states: tuple[int, ...]
    crcs: tuple[int, ...] = ()


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
class Parting:
    """How far one state of two prompts lies apart, where their ids are equal at first and then part.

    All distances are relative: the norm of the difference over the norm, of one row.

    Attributes:
        shared_beyond: share of the rows before the parting that lie further apart than the tolerance.
        last_shared: distance of the last row before the ids part.
        first_own: distance of the first row at which the ids differ.
    """

    shared_beyond: float
    last_shared: float
    first_own: float


NOISE_SHARE: Final = 0.1
"""Share of a canary's rows that may lie beyond the tolerance: batches are rounded differently, and a mixture of experts may
route a token elsewhere for it. A shift, another layer or another prompt moves nearly all of them."""


def twins(partings: tuple[Parting, ...], tolerance: float) -> Violation | None:
    """Two prompts with a shared prefix, sent together, keep their own rows: their states part at the very row where their
    ids part.

    A causal model cannot know the ids that follow, so before the parting the rows are equal but for rounding, and at it they
    differ. States that are shifted against their ids, mixed between requests or taken from a cache fail this without any
    reference.

    Args:
        partings: one per state, in stored order.
        tolerance: relative distance that rounding may cause.
    """
    for state, parting in enumerate(partings):
        if parting.shared_beyond > NOISE_SHARE:
            evidence = f"{parting.shared_beyond:.0%} of the shared rows differ by more than {tolerance}; expected none to"
        elif parting.first_own <= tolerance:
            evidence = f"the first row of their own differs by {parting.first_own:.3g}; expected more than {tolerance}"
        elif parting.last_shared > parting.first_own / 2:
            evidence = (
                f"the last shared row differs by {parting.last_shared:.3g}, the first of their own by {parting.first_own:.3g}; "
                "expected the states to part where the ids part"
            )
        else:
            continue
        return Violation("twins", f"state {state} of two prompts with a shared prefix: {evidence}")
    return None


def fingerprint(beyond: tuple[float, ...], tolerance: float) -> Violation | None:
    """A fixed prompt gives the same states as at the first boot: same weights, same layers, rows in their places.

    Args:
        beyond: for each state, the share of its rows whose relative distance from the recorded row exceeds the tolerance.
        tolerance: relative distance that rounding may cause.
    """
    for state, share in enumerate(beyond):
        if share > NOISE_SHARE:
            return Violation(
                "fingerprint",
                f"state {state} of the fixed prompt: {share:.0%} of its rows differ from the first boot's by over {tolerance}; "
                f"expected at most {NOISE_SHARE:.0%}",
            )
    return None


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
CANARY_INVARIANTS: Final[tuple[tuple[Group, Callable[..., Violation | None]], ...]] = (
    ("canary", twins),
    ("canary", fingerprint),
)
RUN_INVARIANTS: Final[tuple[Invariant, ...]] = (
    Invariant(
        "sequence",
        "counter",
        "The server numbers its dumps without a gap, none twice, never below what it had reached when the request was sent.",
    ),
    Invariant("sole_writer", "counter", "One server process alone writes into the epoch, for this job alone."),
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
        *(_named(group, judge) for group, judge in CANARY_INVARIANTS),
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
