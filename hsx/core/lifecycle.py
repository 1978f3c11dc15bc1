"""The life of the engine as a table. A missing entry is the error, and an illegal event changes nothing."""

from __future__ import annotations

from enum import Enum
from typing import Final


class State(Enum):
    """States of the engine."""

    STOPPED = "STOPPED"
    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    BACKOFF = "BACKOFF"
    FAILED = "FAILED"


class Event(Enum):
    """What can happen to it."""

    START = "start"
    GATE_PASSED = "gate_passed"
    VOIDED = "voided"
    RETRY_AFTER = "retry_after"
    BUDGET_SPENT = "budget_spent"
    REFUSED = "refused"
    DRAIN = "drain"
    STOPPED = "stopped"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.STOPPED, Event.START): State.STARTING,
    (State.STARTING, Event.GATE_PASSED): State.READY,
    (State.STARTING, Event.VOIDED): State.BACKOFF,
    (State.STARTING, Event.REFUSED): State.FAILED,
    (State.STARTING, Event.DRAIN): State.DRAINING,
    (State.READY, Event.VOIDED): State.BACKOFF,
    (State.READY, Event.DRAIN): State.DRAINING,
    (State.BACKOFF, Event.RETRY_AFTER): State.STARTING,
    (State.BACKOFF, Event.BUDGET_SPENT): State.FAILED,
    (State.BACKOFF, Event.DRAIN): State.DRAINING,
    (State.DRAINING, Event.STOPPED): State.STOPPED,
    (State.DRAINING, Event.VOIDED): State.DRAINING,
    (State.FAILED, Event.DRAIN): State.DRAINING,
}


class IllegalTransitionError(Exception):
    """The event has no entry for the state; the state is as it was."""


def step(state: State, event: Event) -> State:
    """The state after `event`. Raises IllegalTransitionError where the table has no entry."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransitionError(f"engine is {state.value}; event {event.value} is not possible there") from None
