"""What a run counts and remembers."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from hsx import metrics
from hsx.core.invariants import INVARIANTS
from hsx.core.lifecycle import State
from hsx.core.marker import Marker
from hsx.progress_view import summary_line
from hsx.records import Counts
from hsx.status import StatusServer
from hsx.status.document import Phase
from hsx.telemetry import LAST_ERRORS, LAST_RESTARTS, Telemetry

EPOCH = "8d4b7f0e-0000-4000-8000-000000000001"


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def telemetry(time: Time, events: list[dict[str, Any]]) -> Telemetry:
    def keep(_logger: object, level: str, event: Any) -> str:
        events.append({"level": level, **event})
        raise structlog.DropEvent

    logger = structlog.wrap_logger(
        structlog.PrintLogger(), processors=[keep], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    return Telemetry(clock=time, wall=lambda: 1e9 + time.now, logger=logger)


def commit(telemetry: Telemetry, index: int = 0, tokens: int = 10, *, adopted: bool = False) -> None:
    marker = Marker("aabbccdd", index, 1, tokens)
    timings = {"request": 0.5, "write": 0.25}
    telemetry.sample_committed(index, marker, EPOCH, index + 1, tokens, tokens * 100, "a", 1, timings, adopted, f"id-{index}")


def begin(telemetry: Telemetry, pending: int = 10) -> None:
    counts = Counts(
        pending=pending, committed=5, quarantined=1, rejected=2, tokens_total=200, tokens_committed=50, bytes_committed=9
    )
    telemetry.job_began("job", "aabbccdd", "/store", counts)


def test_totals_add_to_what_the_ledger_held(telemetry: Telemetry, time: Time) -> None:
    begin(telemetry)
    commit(telemetry, 0)
    commit(telemetry, 1, 20, adopted=True)
    time.now += 10
    progress = telemetry.snapshot()["progress"]
    assert progress["samples"] | {"per_second": None} == {
        "committed_by_run": 2,
        "revoked_by_run": 0,
        "per_second": None,
        "total": 16,
        "committed": 7,
        "pending": 8,
    }
    assert progress["tokens"]["committed"] == 80
    assert progress["tokens"]["per_second"]["run"] == pytest.approx(3.0)
    assert progress["bytes"]["committed"] == 3009
    assert progress["adopted"] == 1
    assert progress["eta"] == {"seconds": pytest.approx(40.0), "basis": "tokens/s of this run"}
    assert progress["step_seconds"] == {"request": 1.0, "write": 0.5}


def test_before_the_job_is_open_totals_are_unknown(telemetry: Telemetry) -> None:
    progress = telemetry.snapshot()["progress"]
    assert "total" not in progress["samples"]
    assert progress["eta"]["seconds"] is None


def test_one_canonical_line_for_each_committed_sample(telemetry: Telemetry, events: list[dict[str, Any]]) -> None:
    commit(telemetry, 7)
    assert events == [
        {
            "level": "info",
            "event": "sample.committed",
            "index": 7,
            "id": "id-7",
            "marker": "hsx1-aabbccdd-7-1-10",
            "epoch": EPOCH,
            "sequence": 8,
            "tokens": 10,
            "bytes": 1000,
            "root": "a",
            "attempt": 1,
            "adopted": False,
            "timings": {"request": 0.5, "write": 0.25},
        }
    ]


def test_failures_are_told_apart_from_quarantine(telemetry: Telemetry, events: list[dict[str, Any]]) -> None:
    begin(telemetry)
    telemetry.attempt_failed("m", "finite", "NaN", quarantined=False)
    telemetry.attempt_failed("m", "finite", "NaN", quarantined=True)
    data = telemetry.snapshot()
    assert data["failed_attempts"] == {"finite": 2}
    quarantine = data["quarantine"]
    counts = {key: quarantine[key] for key in ("count", "by_run", "convicted", "rejected_rows")}
    assert counts == {"count": 2, "by_run": 1, "convicted": 0, "rejected_rows": 2}
    assert quarantine["by_reason"] == {"finite": 1}
    assert quarantine["last"] == [{"time": 1e9 + 100, "marker": "m", "reason": "finite", "evidence": "NaN"}]
    assert data["progress"]["samples"]["pending"] == 9
    assert [(event["event"], event["level"]) for event in events[1:]] == [
        ("attempt.failed", "warning"),
        ("sample.quarantined", "error"),
    ]
    assert data["last_errors"][0] == {"time": 1e9 + 100, "kind": "finite", "message": "NaN", "marker": "m"}


def test_revoked_samples_are_pending_again(telemetry: Telemetry, events: list[dict[str, Any]]) -> None:
    begin(telemetry)
    commit(telemetry, 0)
    commit(telemetry, 1, 20)
    telemetry.samples_revoked(EPOCH, "fingerprint", "other states", count=1, tokens=20, nbytes=2000)
    progress = telemetry.snapshot()["progress"]
    samples = progress["samples"]
    assert (samples["committed"], samples["pending"], samples["total"]) == (6, 9, 16)
    assert (samples["committed_by_run"], samples["revoked_by_run"]) == (2, 1)
    assert (progress["tokens"]["committed"], progress["bytes"]["committed"]) == (60, 1009)
    assert events[-1] == {
        "level": "error",
        "event": "samples.revoked",
        "epoch": EPOCH,
        "invariant": "fingerprint",
        "evidence": "other states",
        "count": 1,
    }
    assert telemetry.snapshot()["last_errors"][-1]["message"] == "samples revoked: 1; other states"
    assert b"hsx_samples_revoked_total 1.0" in metrics.render(metrics.registry_of(telemetry))


def test_canaries_and_convictions(telemetry: Telemetry, events: list[dict[str, Any]]) -> None:
    telemetry.canary_passed(EPOCH, 2)
    telemetry.canary_passed(EPOCH, 504)
    telemetry.sample_convicted(17, deaths=5)
    data = telemetry.snapshot()
    assert data["canaries"] == {"passed": 2, "time": 1e9 + 100, "epoch": EPOCH, "sequence": 504}
    assert data["quarantine"]["convicted"] == 1
    assert [(event["event"], event["level"]) for event in events] == [
        ("canary.passed", "info"),
        ("canary.passed", "info"),
        ("sample.convicted", "error"),
    ]
    assert (events[-1]["index"], events[-1]["deaths"]) == (17, 5)
    assert b"hsx_canaries_passed_total 2.0" in metrics.render(metrics.registry_of(telemetry))


def test_violations_of_the_whole_job_are_told_apart_from_this_runs(telemetry: Telemetry) -> None:
    counts = Counts(pending=1, committed=0, quarantined=0, rejected=0, tokens_total=1, tokens_committed=0, bytes_committed=0)
    telemetry.job_began("job", "aabbccdd", "/store", counts, {"finite": 2, "alive": 1})
    telemetry.violation("m", "finite", "NaN")
    assert telemetry.snapshot()["invariants"] == {
        "violations": 1,
        "by_name": {"finite": 1},
        "job": {"violations": 4, "by_name": {"finite": 3, "alive": 1}},
    }
    text = metrics.render(metrics.registry_of(telemetry)).decode()
    assert 'hsx_violations_total{invariant="finite"} 1.0' in text
    assert 'hsx_job_violations{invariant="finite"} 3.0' in text
    assert 'hsx_job_violations{invariant="twins"} 0.0' in text


def test_the_engines_life(telemetry: Telemetry, time: Time, events: list[dict[str, Any]]) -> None:
    telemetry.engine_state(State.STARTING)
    telemetry.engine_waiting("the server is coming up")
    assert "waiting: the server is coming up" in summary_line(telemetry.snapshot())
    telemetry.epoch_began(EPOCH, continued=True)
    time.now += 5
    telemetry.engine_state(State.BACKOFF, "silence")
    assert "waiting" not in summary_line(telemetry.snapshot())
    telemetry.engine_restarted("advancing", "nothing came out", requeued=3, delay_s=2.0)
    engine = telemetry.snapshot()["engine"]
    assert (engine["state"], engine["reason"], engine["since"]) == ("BACKOFF", "silence", 1e9 + 105)
    assert engine["epoch"] == {"id": EPOCH, "continued": True, "count": 1}
    assert engine["restarts"]["by_reason"] == {"advancing": 1}
    assert engine["restarts"]["last"][0]["requeued"] == engine["restarts"]["requeued"] == 3
    assert b"hsx_samples_requeued_total 3.0" in metrics.render(metrics.registry_of(telemetry))
    assert [event["event"] for event in events] == [
        "engine.state_changed",
        "engine.waiting",
        "epoch.began",
        "engine.state_changed",
        "engine.restarted",
    ]


def test_gauges_show_the_present(telemetry: Telemetry) -> None:
    telemetry.gauges(3, 400, 5000)
    telemetry.gauges(2, 300, 4000)
    telemetry.root_space("a", 7)
    data = telemetry.snapshot()
    assert data["in_flight"] == {"requests": 2, "tokens": 300}
    assert data["staging"] == {"bytes": 4000}
    assert data["roots"]["a"]["free_bytes"] == 7


def test_a_snapshot_is_a_copy_and_plain_data(telemetry: Telemetry) -> None:
    telemetry.violation(None, "advancing", "silence")
    first = telemetry.snapshot()
    telemetry.violation(None, "advancing", "silence")
    telemetry.root_space("a", 1)
    assert first["invariants"]["by_name"] == {"advancing": 1}
    assert first["roots"] == {}
    assert json.loads(json.dumps(telemetry.snapshot()))["invariants"]["violations"] == 2


def deep_size(value: object, seen: set[int]) -> int:
    """Bytes of an object and of all that it holds, but for classes, functions and modules."""
    if id(value) in seen or isinstance(value, type) or callable(value):
        return 0
    seen.add(id(value))
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(deep_size(part, seen) for pair in value.items() for part in pair)
    if isinstance(value, list | tuple | set | deque):
        return size + sum(deep_size(part, seen) for part in value)
    return size + deep_size(getattr(value, "__dict__", None), seen) if hasattr(value, "__dict__") else size


def test_memory_does_not_grow_with_the_samples(time: Time) -> None:
    silent = structlog.wrap_logger(structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(50))
    telemetry = Telemetry(clock=time, wall=lambda: 0.0, logger=silent)

    def work(first: int, count: int) -> int:
        for index in range(first, first + count):
            time.now += 0.5
            commit(telemetry, index)
            telemetry.attempt_failed(f"m{index:09}", "finite", f"evidence {index:09}", quarantined=False)
            telemetry.violation(f"m{index:09}", "finite", "x")
            telemetry.engine_restarted("advancing", f"evidence {index:09}", 1, 1.0)
            telemetry.root_space("a", index + 10**6)
        return deep_size(telemetry.__dict__, set())

    early = work(0, 2000)
    late = work(2000, 10_000)
    # A single pointer kept for each of the 10,000 samples would be 80,000 bytes; numbers that get longer are a few hundred.
    assert abs(late - early) < 8000
    data = telemetry.snapshot()
    assert (len(data["last_errors"]), len(data["engine"]["restarts"]["last"])) == (LAST_ERRORS, LAST_RESTARTS)
    assert data["last_errors"][-1]["message"] == "evidence 000011999"


@dataclass(frozen=True)
class Fixed:
    """Somebody who holds a status document."""

    document: dict[str, Any]

    def snapshot(self) -> dict[str, Any]:
        return self.document


def samples_of(telemetry: metrics.HasSnapshot) -> dict[tuple[str, str], float]:
    """Every exported sample by its name and its label's value, through Prometheus' own parser."""
    text = metrics.render(metrics.registry_of(telemetry)).decode()
    return {
        (sample.name, "".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics(telemetry: Telemetry) -> None:
    begin(telemetry)
    commit(telemetry, 0)
    telemetry.attempt_failed("m", "request_refused", "400", quarantined=True)
    telemetry.violation("m", "finite", "NaN")
    telemetry.engine_state("READY")
    telemetry.engine_restarted("alive", "gone", 0, 1.0)
    telemetry.epoch_began(EPOCH, continued=False)
    telemetry.gauges(1, 2, 3)
    telemetry.root_space('we"ird', 4)
    found = samples_of(telemetry)
    expected = {
        ("hsx_samples_committed_total", ""): 1,
        ("hsx_tokens_committed_total", ""): 10,
        ("hsx_bytes_committed_total", ""): 1000,
        ("hsx_samples_quarantined_total", ""): 1,
        ("hsx_violations_total", "finite"): 1,
        ("hsx_violations_total", "rows"): 0,
        ("hsx_attempts_failed_total", "request_refused"): 1,
        ("hsx_restarts_total", "alive"): 1,
        ("hsx_engine_state", "READY"): 1,
        ("hsx_engine_state", "FAILED"): 0,
        ("hsx_epochs", ""): 1,
        ("hsx_requests_in_flight", ""): 1,
        ("hsx_tokens_in_flight", ""): 2,
        ("hsx_staging_bytes", ""): 3,
        ("hsx_root_free_bytes", 'we"ird'): 4,
        ("hsx_job_samples", ""): 16,
        ("hsx_samples_pending", ""): 8,
        ("hsx_step_seconds_total", "request"): 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert {name for name, _ in found} <= {spec.name for spec in metrics.METRICS}


def test_every_invariant_and_state_has_its_series_from_the_start(telemetry: Telemetry) -> None:
    found = samples_of(telemetry)
    assert {label for name, label in found if name == "hsx_violations_total"} == set(INVARIANTS)
    assert {label for name, label in found if name == "hsx_engine_state"} == {state.value for state in State}


def test_metrics_of_a_run_that_knows_nothing_yet_leave_the_unknown_out(telemetry: Telemetry) -> None:
    assert ("hsx_job_samples", "") not in samples_of(telemetry)


def test_a_lost_root_keeps_its_reason_and_is_remembered(telemetry: Telemetry) -> None:
    telemetry.root_space("a", 70, room=60, booked=5, speed=1.5e9, state="in_service")
    telemetry.root_space("b", 7, room=-3, state="refusing")
    telemetry.root_lost("a", "root_unusable", "root a: EIO")
    telemetry.root_space("a", 0, room=0, state="lost")
    roots = telemetry.snapshot()["roots"]
    assert (roots["a"]["state"], roots["a"]["reason"]) == ("lost", "root a: EIO")
    assert (roots["b"]["state"], roots["b"]["room_bytes"], roots["b"]["bytes_per_second"]) == ("refusing", 0, None)
    assert telemetry.snapshot()["last_errors"][-1]["kind"] == "root_unusable"


def test_a_silent_root_is_out_of_service_until_it_answers(telemetry: Telemetry, events: list[dict[str, Any]]) -> None:
    telemetry.root_space("a", 70, room=60, booked=5, speed=1.5e9, state="in_service")
    telemetry.root_silent("a", 5.0)
    assert telemetry.snapshot()["roots"]["a"]["state"] == "silent"
    assert samples_of(telemetry)["hsx_root_in_service", "a"] == 0
    assert samples_of(telemetry)["hsx_root_free_bytes", "a"] == 70
    telemetry.root_answered("a")
    assert samples_of(telemetry)["hsx_root_in_service", "a"] == 1
    assert [event["event"] for event in events if event.get("root") == "a"] == ["root.silent", "root.answered"]


def test_a_pause_of_the_intake_is_logged_once_and_shown_until_it_is_over(
    telemetry: Telemetry, events: list[dict[str, Any]]
) -> None:
    telemetry.intake_paused("roots_full", "free 2 MB on root a")
    telemetry.intake_paused("roots_full", "free 1 MB on root a")
    telemetry.intake_resumed("staging_full")
    shown = telemetry.snapshot()
    telemetry.intake_resumed("roots_full")
    telemetry.intake_resumed("roots_full")
    assert [event["event"] for event in events] == ["intake.paused", "intake.resumed"]
    assert [pause["message"] for pause in shown["intake"]["pauses"]] == ["free 1 MB on root a"]
    assert "PAUSED: free 1 MB on root a" in summary_line(shown)
    assert telemetry.snapshot()["intake"] == {"paused": False, "pauses": []}


def test_metrics_of_limits_verdicts_and_the_end(telemetry: Telemetry, time: Time) -> None:
    begin(telemetry)
    time.now += 10.0
    commit(telemetry, 0)
    telemetry.phase("extracting")
    telemetry.root_known("a", "/a", 1000, 10)
    telemetry.root_lost("a", "root_unusable", "EIO")
    facts = {
        "limits": {"requests": 4, "tokens": 40, "staging_bytes": 400},
        "restart_budget": {"allowed": 5, "window_s": 3600.0, "left": 2},
    }
    document = StatusServer(telemetry, lambda: facts, "127.0.0.1", 0).document()
    found = samples_of(Fixed(document))
    tokens, left = document["progress"]["tokens"], document["progress"]["eta"]["seconds"]
    assert left > 0
    expected = {
        ("hsx_phase", "extracting"): 1,
        ("hsx_phase", "done"): 0,
        ("hsx_sound", ""): 1,
        ("hsx_ready", ""): 0,
        ("hsx_requests_limit", ""): 4,
        ("hsx_tokens_limit", ""): 40,
        ("hsx_staging_limit_bytes", ""): 400,
        ("hsx_restart_budget", ""): 5,
        ("hsx_restart_budget_left", ""): 2,
        ("hsx_root_size_bytes", "a"): 1000,
        ("hsx_root_lost", "a"): 1,
        ("hsx_job_tokens", ""): tokens["total"],
        ("hsx_tokens_pending", ""): tokens["total"] - tokens["committed"],
        ("hsx_eta_seconds", ""): left,
        ("hsx_expected_end_timestamp_seconds", ""): document["time"] + left,
    }
    assert {key: found.get(key) for key in expected} == expected
    # What voids an epoch is there at 0 before it happens: an increase from nothing to 1 is none to Prometheus.
    assert found["hsx_restarts_total", "alive"] == 0
    # A run that has all of it exports every metric of the table; it lacks those that count reasons or pauses of its own.
    assert {spec.name for spec in metrics.METRICS} - {name for name, _ in found} == {
        "hsx_attempts_failed_total",
        "hsx_root_bytes_per_second",
    }


def test_the_phases_of_the_metric_are_those_of_the_document() -> None:
    assert get_args(get_type_hints(Phase)["name"]) == metrics.PHASES
