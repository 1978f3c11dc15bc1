"""A sample, and the lease under which it is worked on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the dataset: its index in the store and the number of tokens of its prompt."""

    index: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to make one attempt at one sample.

    Attributes:
        sample: what to extract.
        attempt: number of this attempt, from 1, durable before the lease is handed out.
        failures: how many earlier attempts failed by the sample's own fault.
    """

    sample: Sample
    attempt: int
    failures: int
