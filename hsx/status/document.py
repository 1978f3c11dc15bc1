"""The status document as types: what `/status` answers. Its JSON Schema, docs/status.schema.json, is made from these.

Fields that are not known yet are absent, not null, unless their type says so. Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

VERSION: Final = 1
"""Version of the status document. Added fields do not change it; renamed, removed or redefined ones do."""


class Part(Struct, frozen=True, kw_only=True):
    """Base of all parts. Unknown fields are ignored by readers: they may be newer than the reader."""


class Job(Part, frozen=True, kw_only=True):
    """The job, and the age of this run of it."""

    began: float
    """When this run began."""
    seconds: float
    """How long ago that was."""
    name: str | UnsetType = UNSET
    run: str | UnsetType = UNSET
    """The 8 hex digits of its markers."""
    store: str | UnsetType = UNSET
    """Path of the store."""


class Phase(Part, frozen=True, kw_only=True):
    """Where the run is between its start and its end."""

    name: Literal["starting", "extracting", "draining", "done", "interrupted", "failed"]
    since: float
    kind: str
    """The kind of the error that ended the run, else empty."""
    reason: str
    """For people."""


class Rates(Part, frozen=True, kw_only=True):
    """Amounts per second over the last minute, the last ten minutes and the run."""

    minute: float
    ten_minutes: float
    run: float


class Samples(Part, frozen=True, kw_only=True):
    """Samples: of the job, and of this run."""

    committed_by_run: int
    revoked_by_run: int
    """Taken back by this run: no sound canary vouched for them."""
    per_second: Rates
    total: int | UnsetType = UNSET
    committed: int | UnsetType = UNSET
    pending: int | UnsetType = UNSET
    """Neither committed nor quarantined."""


class Amount(Part, frozen=True, kw_only=True):
    """Tokens, or bytes of shards; `total` is known of tokens only."""

    committed_by_run: int
    per_second: Rates
    total: int | UnsetType = UNSET
    committed: int | UnsetType = UNSET


class Shared(Part, frozen=True, kw_only=True):
    """Samples that were not prefilled, as their prompt is another one's; their bytes are in no other count of bytes."""

    samples_by_run: int
    tokens_by_run: int
    bytes_by_run: int
    samples: int | UnsetType = UNSET
    """Of the whole job; what was taken back is not subtracted."""
    tokens: int | UnsetType = UNSET
    bytes: int | UnsetType = UNSET


class Eta(Part, frozen=True, kw_only=True):
    """Time left, in seconds; null where it cannot be told yet."""

    seconds: float | None
    basis: str
    """What it was reckoned from."""


class Progress(Part, frozen=True, kw_only=True):
    """How far the job is."""

    samples: Samples
    tokens: Amount
    bytes: Amount
    shared: Shared
    adopted: int
    """Samples committed from a dump that an earlier run had asked for."""
    step_seconds: dict[str, float]
    """Seconds that committed samples spent, by step."""
    eta: Eta


class Epoch(Part, frozen=True, kw_only=True):
    """The life of the server that is in use, or was last."""

    id: str
    continued: bool
    """An earlier run of hsx had used it."""
    count: int
    """Epochs begun in this run."""


class Restart(Part, frozen=True, kw_only=True):
    """One restart of the server."""

    time: float
    reason: str
    """An invariant's name, or the kind of an error."""
    evidence: str
    requeued: int
    """Samples that went back to the queue."""
    delay_s: float


class Restarts(Part, frozen=True, kw_only=True):
    """Restarts of the server in this run."""

    total: int
    by_reason: dict[str, int]
    requeued: int
    last: list[Restart]


class Step(Part, frozen=True, kw_only=True):
    """One step of the engine's life."""

    time: float
    state: str
    reason: str


class Engine(Part, frozen=True, kw_only=True):
    """The server, as hsx sees it."""

    state: Literal["STOPPED", "STARTING", "READY", "DRAINING", "BACKOFF", "FAILED"]
    reason: str
    waiting_for: str
    """What a starting engine waits for."""
    since: float
    epoch: Epoch
    restarts: Restarts
    timeline: list[Step]
    """The last steps of its life, oldest first."""


class InFlight(Part, frozen=True, kw_only=True):
    """What the server works on."""

    requests: int
    tokens: int


class Staging(Part, frozen=True, kw_only=True):
    """The dump directory; its limit is in `limits`."""

    bytes: int


class RootRun(Part, frozen=True, kw_only=True):
    """What this run has committed to a root."""

    samples: int
    bytes: int


class Root(Part, frozen=True, kw_only=True):
    """One disk. What has not been looked at yet is null."""

    state: Literal["in_service", "refusing", "draining", "silent", "lost"]
    reason: str
    """Why it is lost, or silent."""
    free_bytes: int | None
    room_bytes: int | None
    """Free, less reserve and what is promised."""
    promised_bytes: int
    bytes_per_second: int | None
    """Speed of one writer."""
    by_run: RootRun
    path: str | UnsetType = UNSET
    size_bytes: int | UnsetType = UNSET
    """Of its file system."""
    reserve_bytes: int | UnsetType = UNSET
    """Stay free."""


class Pause(Part, frozen=True, kw_only=True):
    """Why no sample is started."""

    kind: str
    """`roots_full` or `staging_full`."""
    message: str
    """What to free, and how much."""
    since: float


class Intake(Part, frozen=True, kw_only=True):
    """Whether samples are started."""

    paused: bool
    pauses: list[Pause]


class Violations(Part, frozen=True, kw_only=True):
    """Violations by invariant; those that always held are absent."""

    violations: int
    by_name: dict[str, int]


class Invariants(Part, frozen=True, kw_only=True):
    """Violations in this run, and in the whole job."""

    violations: int
    by_name: dict[str, int]
    job: Violations


class Canaries(Part, frozen=True, kw_only=True):
    """hsx's own prompts: how many came back sound in this run, and the last of them."""

    passed: int
    time: float | None
    epoch: str
    sequence: int
    """Dumps up to this number are vouched for."""


class Quarantined(Part, frozen=True, kw_only=True):
    """One sample that was given up in this run."""

    time: float
    marker: str
    reason: str
    evidence: str


class Quarantine(Part, frozen=True, kw_only=True):
    """What was given up."""

    count: int
    by_run: int
    convicted: int
    """Of these, samples that kill the server."""
    rejected_rows: int
    """Rows of the dataset that were never samples."""
    by_reason: dict[str, int]
    """Samples of the job, by an invariant's name or the kind of an error."""
    last: list[Quarantined]


class Error(Part, frozen=True, kw_only=True):
    """Something that went wrong."""

    time: float
    kind: str
    message: str
    marker: str


class Curve(Part, frozen=True, kw_only=True):
    """Sums by slice of time, oldest first; the last slice is not over yet."""

    step_seconds: float
    begins: float
    """When the first slice began."""
    samples: list[int]
    tokens: list[int]
    bytes: list[int]
    restarts: list[int]


class History(Part, frozen=True, kw_only=True):
    """What was committed when."""

    recent: Curve
    """The last twenty minutes, finely."""
    minutes: Curve
    """The last day, by the minute."""


class Event(Part, frozen=True, kw_only=True):
    """One log event, as `/events` sends it too."""

    id: int
    """Rises; over restarts of hsx too."""
    time: float
    level: Literal["info", "warning", "error"]
    event: str
    fields: dict[str, Any]


class Limits(Part, frozen=True, kw_only=True):
    """What may be under way at once."""

    requests: int | UnsetType = UNSET
    tokens: int | UnsetType = UNSET
    staging_bytes: int | UnsetType = UNSET


class RestartBudget(Part, frozen=True, kw_only=True):
    """How often the server may be restarted before the run ends."""

    allowed: int
    """Within the window: `watchdog.restart_budget`."""
    window_s: float
    left: int
    """With 0 left, the next restart that is needed ends the run."""


class Capture(Part, frozen=True, kw_only=True):
    """What is extracted."""

    states: list[str]
    hidden_size: int


class Verdict(Part, frozen=True, kw_only=True):
    """Yes, or no and why not."""

    ok: bool
    reason: str


class StatusDocument(Part, frozen=True, kw_only=True):
    """How a run of a job stands."""

    version: int
    time: float
    """When this was written; a document that is old is one of an hsx that hangs or is gone."""
    phase: Phase
    job: Job
    progress: Progress
    engine: Engine
    in_flight: InFlight
    staging: Staging
    roots: dict[str, Root]
    intake: Intake
    invariants: Invariants
    canaries: Canaries
    failed_attempts: dict[str, int]
    """By an invariant's name or the kind of an error."""
    quarantine: Quarantine
    last_errors: list[Error]
    history: History
    events: list[Event]
    """The last log events that do not come once a sample."""
    versions: dict[str, str]
    ready: Verdict
    """What `/readyz` says."""
    health: Verdict
    """What `/healthz` says, while the document is fresh."""
    limits: Limits | UnsetType = UNSET
    restart_budget: RestartBudget | UnsetType = UNSET
    capture: Capture | UnsetType = UNSET


def encode(document: dict[str, Any]) -> bytes:
    """The document as JSON. Raises msgspec.ValidationError where it is not what the types say: that is a fault of hsx."""
    return msgspec.json.encode(msgspec.convert(document, StatusDocument))
