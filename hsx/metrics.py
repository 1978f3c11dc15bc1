"""Prometheus metrics, made at scrape time from the telemetry's snapshot: the hot path pays nothing for them.

`METRICS` is the table. Labels take the names of states, reasons, invariants, steps and roots only; never a sample's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hsx.core.invariants import INVARIANTS
from hsx.core.lifecycle import State
from hsx.core.policy import POLICY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

PHASES: Final = ("starting", "extracting", "draining", "done", "interrupted", "failed")
"""As the status document has them (`hsx.status.document.Phase`)."""

Values = float | Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """A row of the table.

    Attributes:
        name: as it is exported.
        kind: counters count one run of hsx: a restart resets them, as Prometheus expects.
        label: name of its one label, "" where it has none.
        text: its help.
        values: takes a snapshot of the telemetry; by label value where there is a label, None where it is not known yet.
    """

    name: str
    kind: Literal["counter", "gauge"]
    label: str
    text: str
    values: Callable[[dict[str, Any]], Values]


def _by_run(what: str) -> Callable[[dict[str, Any]], Values]:
    return lambda data: data["progress"][what]["committed_by_run"]


def _violations(data: dict[str, Any]) -> Values:
    # Every invariant is there from the start, at 0: an alert on an absent series never fires.
    counted: dict[str, float] = data["invariants"]["by_name"]
    return {name: counted.get(name, 0) for name in {**INVARIANTS, **counted}}


def _violations_of_job(data: dict[str, Any]) -> Values:
    counted: dict[str, float] = data["invariants"]["job"]["by_name"]
    return {name: counted.get(name, 0) for name in {**INVARIANTS, **counted}}


def _restarts(data: dict[str, Any]) -> Values:
    # A counter that appears with its first restart has not increased, to Prometheus: what voids an epoch is there at 0.
    voiding = {reason: 0.0 for reason, rule in POLICY.items() if rule.epoch in ("void", "count")}
    return {**voiding, **data["engine"]["restarts"]["by_reason"]}


def _phases(data: dict[str, Any]) -> Values:
    return {phase: int(phase == data["phase"]["name"]) for phase in PHASES}


def _said(verdict: str) -> Callable[[dict[str, Any]], Values]:
    return lambda data: int(data[verdict]["ok"]) if verdict in data else None


def _limit(name: str) -> Callable[[dict[str, Any]], Values]:
    return lambda data: data.get("limits", {}).get(name)


def _budget(name: str) -> Callable[[dict[str, Any]], Values]:
    return lambda data: data.get("restart_budget", {}).get(name)


def _tokens_pending(data: dict[str, Any]) -> Values:
    tokens = data["progress"]["tokens"]
    return max(0, tokens["total"] - tokens["committed"]) if "total" in tokens else None


def _end(data: dict[str, Any]) -> Values:
    left: float | None = data["progress"]["eta"]["seconds"]
    return None if left is None else data["time"] + left


def _states(data: dict[str, Any]) -> Values:
    return {state.value: int(state.value == data["engine"]["state"]) for state in State}


def _paused(data: dict[str, Any]) -> Values:
    kinds = {pause["kind"] for pause in data["intake"]["pauses"]}
    return {kind: int(kind in kinds) for kind in ("roots_full", "staging_full")}


def _of_roots(value: Callable[[dict[str, Any]], float | None]) -> Callable[[dict[str, Any]], Values]:
    def values(data: dict[str, Any]) -> Values:
        found = {name: value(root) for name, root in data["roots"].items()}
        return {name: known for name, known in found.items() if known is not None}

    return values


METRICS: Final[tuple[MetricSpec, ...]] = (
    MetricSpec("hsx_samples_committed_total", "counter", "", "Samples committed by this run", _by_run("samples")),
    MetricSpec("hsx_tokens_committed_total", "counter", "", "Tokens committed by this run", _by_run("tokens")),
    MetricSpec("hsx_bytes_committed_total", "counter", "", "Bytes of shards committed by this run", _by_run("bytes")),
    MetricSpec(
        "hsx_samples_shared_total",
        "counter",
        "",
        "Samples committed by this run whose prompt is that of another one, without a prefill",
        lambda data: data["progress"]["shared"]["samples_by_run"],
    ),
    MetricSpec(
        "hsx_samples_adopted_total",
        "counter",
        "",
        "Samples committed from a dump that an earlier run had asked for",
        lambda data: data["progress"]["adopted"],
    ),
    MetricSpec(
        "hsx_samples_quarantined_total",
        "counter",
        "",
        "Samples quarantined by this run",
        lambda data: data["quarantine"]["by_run"],
    ),
    MetricSpec(
        "hsx_samples_revoked_total",
        "counter",
        "",
        "Committed samples that this run took back, to extract them again",
        lambda data: data["progress"]["samples"]["revoked_by_run"],
    ),
    MetricSpec("hsx_violations_total", "counter", "invariant", "Invariants violated in this run", _violations),
    MetricSpec("hsx_job_violations", "gauge", "invariant", "Invariants violated in the whole job", _violations_of_job),
    MetricSpec(
        "hsx_attempts_failed_total",
        "counter",
        "reason",
        "Attempts failed by the sample's own fault",
        lambda data: data["failed_attempts"],
    ),
    MetricSpec(
        "hsx_restarts_total",
        "counter",
        "reason",
        "Restarts of the server",
        _restarts,
    ),
    MetricSpec(
        "hsx_samples_requeued_total",
        "counter",
        "",
        "Samples that went back to the queue because their epoch was voided",
        lambda data: data["engine"]["restarts"]["requeued"],
    ),
    MetricSpec(
        "hsx_canaries_passed_total", "counter", "", "Canaries that came back sound", lambda data: data["canaries"]["passed"]
    ),
    MetricSpec(
        "hsx_step_seconds_total",
        "counter",
        "step",
        "Seconds that committed samples spent in a step",
        lambda data: data["progress"]["step_seconds"],
    ),
    MetricSpec("hsx_engine_state", "gauge", "state", "1 for the state the engine is in, 0 for the others", _states),
    MetricSpec("hsx_phase", "gauge", "phase", "1 for the phase the run is in, 0 for the others", _phases),
    MetricSpec(
        "hsx_sound", "gauge", "", "What /healthz says: 1 while the run gets on, or waits for something known", _said("health")
    ),
    MetricSpec("hsx_ready", "gauge", "", "What /readyz says: 1 while the engine is READY and there is room", _said("ready")),
    MetricSpec(
        "hsx_restart_budget", "gauge", "", "Restarts of the server that are allowed within the window", _budget("allowed")
    ),
    MetricSpec(
        "hsx_restart_budget_left", "gauge", "", "Restarts left; with 0, the next one needed ends the run", _budget("left")
    ),
    MetricSpec("hsx_epochs", "gauge", "", "Epochs begun in this run", lambda data: data["engine"]["epoch"]["count"]),
    MetricSpec(
        "hsx_requests_in_flight", "gauge", "", "Requests sent and not yet answered", lambda data: data["in_flight"]["requests"]
    ),
    MetricSpec(
        "hsx_tokens_in_flight", "gauge", "", "Prompt tokens of the requests in flight", lambda data: data["in_flight"]["tokens"]
    ),
    MetricSpec("hsx_staging_bytes", "gauge", "", "Bytes of the dump directory in use", lambda data: data["staging"]["bytes"]),
    MetricSpec("hsx_requests_limit", "gauge", "", "Requests that may be at the server at once", _limit("requests")),
    MetricSpec("hsx_tokens_limit", "gauge", "", "Prompt tokens that may be at the server at once", _limit("tokens")),
    MetricSpec("hsx_staging_limit_bytes", "gauge", "", "Bytes that dumps may take at once", _limit("staging_bytes")),
    MetricSpec(
        "hsx_root_size_bytes", "gauge", "root", "Size of a root's file system", _of_roots(lambda root: root.get("size_bytes"))
    ),
    MetricSpec(
        "hsx_root_free_bytes",
        "gauge",
        "root",
        "Free bytes of a root",
        _of_roots(lambda root: root["free_bytes"]),
    ),
    MetricSpec(
        "hsx_root_room_bytes",
        "gauge",
        "root",
        "Bytes that may still be promised to a root: free, less its reserve and what is under way to it",
        _of_roots(lambda root: root["room_bytes"]),
    ),
    MetricSpec(
        "hsx_root_bytes_per_second",
        "gauge",
        "root",
        "Speed that one writer of a root reaches, as measured; placement is weighted by it",
        _of_roots(lambda root: root["bytes_per_second"]),
    ),
    MetricSpec(
        "hsx_root_in_service",
        "gauge",
        "root",
        "1 while a root takes shards, 0 once it is lost, and while it is drained, refuses or does not answer",
        _of_roots(lambda root: int(root["state"] == "in_service")),
    ),
    MetricSpec("hsx_root_lost", "gauge", "root", "1 once a root is lost", _of_roots(lambda root: int(root["state"] == "lost"))),
    MetricSpec("hsx_intake_paused", "gauge", "kind", "1 while no sample is started for want of room, by kind", _paused),
    MetricSpec(
        "hsx_job_samples",
        "gauge",
        "",
        "Samples of the job, rejected rows excluded",
        lambda data: data["progress"]["samples"].get("total"),
    ),
    MetricSpec(
        "hsx_samples_pending",
        "gauge",
        "",
        "Samples neither committed nor quarantined",
        lambda data: data["progress"]["samples"].get("pending"),
    ),
    MetricSpec(
        "hsx_job_tokens", "gauge", "", "Tokens of the job's samples", lambda data: data["progress"]["tokens"].get("total")
    ),
    MetricSpec("hsx_tokens_pending", "gauge", "", "Tokens of the job that are not committed", _tokens_pending),
    MetricSpec(
        "hsx_eta_seconds",
        "gauge",
        "",
        "Time left; absent while it cannot be told",
        lambda data: data["progress"]["eta"]["seconds"],
    ),
    MetricSpec(
        "hsx_expected_end_timestamp_seconds", "gauge", "", "When the job will be done, in Unix seconds; absent as above", _end
    ),
)


class HasSnapshot(Protocol):
    """`hsx.telemetry.Telemetry`, or whoever holds a status document that was made from it."""

    def snapshot(self) -> dict[str, Any]:
        """What the metrics are made of."""
        ...


class TelemetryCollector(Collector):
    """Turns a telemetry's snapshot into metric families."""

    def __init__(self, telemetry: HasSnapshot) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of `METRICS`."""
        data = self._telemetry.snapshot()
        for spec in METRICS:
            values = spec.values(data)
            if values is None:
                continue
            family_of = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            if isinstance(values, Mapping):
                family = family_of(spec.name, spec.text, labels=[spec.label])
                for key in sorted(values):
                    family.add_metric([key], values[key])
            else:
                family = family_of(spec.name, spec.text, value=values)
            yield family


def registry_of(telemetry: HasSnapshot) -> CollectorRegistry:
    """A registry of its own, holding this telemetry's metrics only."""
    registry = CollectorRegistry()
    registry.register(TelemetryCollector(telemetry))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text exposition format."""
    return generate_latest(registry)
