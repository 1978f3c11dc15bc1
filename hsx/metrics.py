"""Prometheus metrics, made at scrape time from the telemetry's snapshot: the hot path pays nothing for them.

Labels take the names of states, reasons, invariants, steps and roots only; never a sample's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from hsx.core.invariants import INVARIANTS
from hsx.core.lifecycle import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from hsx.telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class TelemetryCollector(Collector):
    """Turns a telemetry's snapshot into metric families."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        """All families, in a fixed order. Counters count this run of hsx: a restart resets them, as Prometheus expects."""
        data = self._telemetry.snapshot()
        progress, engine = data["progress"], data["engine"]
        yield _counter("hsx_samples_committed", "Samples committed by this run", progress["samples"]["committed_by_run"])
        yield _counter("hsx_tokens_committed", "Tokens committed by this run", progress["tokens"]["committed_by_run"])
        yield _counter(
            "hsx_bytes_committed", "Bytes of shard files committed by this run", progress["bytes"]["committed_by_run"]
        )
        yield _counter("hsx_samples_adopted", "Samples committed from a dump of an earlier hsx", progress["adopted"])
        yield _counter("hsx_samples_quarantined", "Samples quarantined by this run", data["quarantine"]["by_run"])
        # Every invariant is there from the start, at 0: an alert on an absent series never fires.
        violations = dict.fromkeys(INVARIANTS, 0) | data["invariants"]["by_name"]
        yield _counters("hsx_violations", "Violated invariants", "invariant", violations)
        yield _counters("hsx_attempts_failed", "Attempts failed by the sample's fault", "reason", data["failed_attempts"])
        yield _counters("hsx_restarts", "Restarts of the server", "reason", engine["restarts"]["by_reason"])
        yield _counters("hsx_step_seconds", "Seconds that committed samples spent in a step", "step", progress["step_seconds"])
        states = {state.value: int(state.value == engine["state"]) for state in State}
        yield _gauges("hsx_engine_state", "1 for the state the engine is in", "state", states)
        yield _gauge("hsx_epochs", "Epochs begun in this run", engine["epoch"]["count"])
        yield _gauge("hsx_requests_in_flight", "Requests sent and not yet answered", data["in_flight"]["requests"])
        yield _gauge("hsx_tokens_in_flight", "Prompt tokens of the requests in flight", data["in_flight"]["tokens"])
        yield _gauge("hsx_staging_bytes", "Bytes of the dump directory in use", data["staging"]["bytes"])
        free = {name: root["free_bytes"] for name, root in data["roots"].items()}
        yield _gauges("hsx_root_free_bytes", "Free bytes of a root", "root", free)
        if "total" in progress["samples"]:
            yield _gauge("hsx_job_samples", "Samples of the job, rejected rows excluded", progress["samples"]["total"])
            yield _gauge("hsx_samples_pending", "Samples neither committed nor quarantined", progress["samples"]["pending"])


def registry_of(telemetry: Telemetry) -> CollectorRegistry:
    """A registry of its own, holding this telemetry's metrics only."""
    registry = CollectorRegistry()
    registry.register(TelemetryCollector(telemetry))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text exposition format."""
    return generate_latest(registry)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in _ordered(values):
        family.add_metric([key], value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in _ordered(values):
        family.add_metric([key], value)
    return family


def _ordered(values: Mapping[str, float]) -> Iterable[tuple[str, float]]:
    return sorted(values.items())
