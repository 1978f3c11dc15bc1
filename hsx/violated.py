"""The errors that carry a violation: an invariant does not hold, for an attempt or for a canary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hsx.errors import EngineError, SampleError

if TYPE_CHECKING:
    from hsx.core.invariants import Violation
    from hsx.core.marker import Marker


class ViolatedError(SampleError):
    """An invariant does not hold for this attempt."""

    def __init__(self, marker: Marker, violation: Violation) -> None:
        super().__init__("violation", f"{marker}: {violation.invariant}: {violation.evidence}")
        self.violation = violation


class CanaryError(EngineError):
    """A canary was answered, and an invariant does not hold for it: the server's states are not to be trusted.

    Args:
        kind: `capture_off` where the dumps are missing or not the canary's, `canary_failed` where the states are wrong.
        violation: what does not hold.
    """

    def __init__(self, kind: str, violation: Violation) -> None:
        super().__init__(kind, f"the canary violates {violation.invariant}: {violation.evidence}")
        self.violation = violation
