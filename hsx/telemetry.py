"""What a run tells about itself: one place that counts, logs and keeps the recent past.

The pipeline, the supervisor and the watchdog report facts here with plain synchronous calls on the event loop; the status
endpoint, the metrics, the progress view and the final summary read from here. Nothing in here grows with the number of
samples: totals, rings of fixed length, and tables whose keys are the names of states, invariants, error kinds and roots.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import structlog

from hsx.core.history import History
from hsx.core.lifecycle import State
from hsx.core.rates import Meter, eta
from hsx.events import PER_SAMPLE, PER_TWIN
from hsx.logs import configure
from hsx.recent import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hsx.core.marker import Marker
    from hsx.records import Counts

__all__ = ["LAST_ERRORS", "LAST_RESTARTS", "Telemetry", "configure"]

LAST_ERRORS: Final = 50
LAST_RESTARTS: Final = 20
LAST_QUARANTINED: Final = 20
LAST_STATES: Final = 100
RECENT_S: Final = (5.0, 241)
"""Slices of the recent history, in seconds, and how many are kept: twenty minutes."""
MINUTES_S: Final = (60.0, 1441)
"""The same of the day's history."""


class Telemetry:
    """Counters, rates and the recent past of one run.

    Not thread-safe: every method is called on the event loop's thread.

    Args:
        clock: monotonic seconds.
        wall: seconds since 1970, for the times that people read.
        logger: a structlog logger; default: the configured one.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        logger: structlog.typing.FilteringBoundLogger | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self.log = EventLog(structlog.get_logger() if logger is None else logger, wall)
        self._began = clock()
        self._began_wall = wall()
        self._samples, self._tokens, self._bytes = Meter(self._began), Meter(self._began), Meter(self._began)
        self._histories = {"recent": History(*RECENT_S, self._began), "minutes": History(*MINUTES_S, self._began)}
        self._phase: dict[str, Any] = {"name": "starting", "since": self._began_wall, "kind": "", "reason": ""}
        self._job: dict[str, Any] = {}
        self._before: Counts | None = None
        self._adopted = 0
        self._quarantined = 0
        self._revoked: Counter[str] = Counter()
        self._shared: Counter[str] = Counter()
        self._convicted = 0
        self._canary: dict[str, Any] = {"passed": 0, "time": None, "epoch": "", "sequence": 0}
        self._step_seconds: defaultdict[str, float] = defaultdict(float)
        self._failures: Counter[str] = Counter()
        self._violations: Counter[str] = Counter()
        self._violations_before: Counter[str] = Counter()
        self._restarts: Counter[str] = Counter()
        self._requeued = 0
        self._engine = (State.STOPPED.value, "", self._began_wall)
        self._waiting = ""
        self._epoch: dict[str, Any] = {"id": "", "continued": False, "count": 0}
        self._in_flight = {"requests": 0, "tokens": 0}
        self._staging_bytes = 0
        self._roots: dict[str, dict[str, Any]] = {}
        self._paused: dict[str, dict[str, Any]] = {}
        self._errors: deque[dict[str, Any]] = deque(maxlen=LAST_ERRORS)
        self._last_restarts: deque[dict[str, Any]] = deque(maxlen=LAST_RESTARTS)
        self._states: deque[dict[str, Any]] = deque(maxlen=LAST_STATES)
        self._quarantine_reasons: Counter[str] = Counter()
        self._last_quarantined: deque[dict[str, Any]] = deque(maxlen=LAST_QUARANTINED)
        self._on_root: dict[str, Counter[str]] = {}

    def job_began(
        self,
        name: str,
        run: str,
        store: str,
        counts: Counts,
        violations: Mapping[str, int] | None = None,
        quarantined: Mapping[str, int] | None = None,
    ) -> None:
        """The job is open.

        Args:
            name: the job's.
            run: the 8 hex digits of its markers.
            store: path of its store.
            counts: what the ledger held before this run did anything.
            violations: those that it held, by invariant.
            quarantined: the samples that it held as quarantined, by reason.
        """
        self._job = {"name": name, "run": run, "store": store}
        self._before = counts
        self._violations_before = Counter(violations or {})
        self._quarantine_reasons.update(quarantined or {})
        self.log.info("job.began", **self._job, **asdict(counts))

    def phase(self, name: str, *, kind: str = "", reason: str = "") -> None:
        """Where the run is between its start and its end; not logged.

        Args:
            name: `starting`, `extracting`, `draining`, `done`, `interrupted` or `failed`.
            kind: of the error that ended the run.
            reason: for people.
        """
        self._phase = {"name": name, "since": self._wall(), "kind": kind, "reason": reason[:2000]}

    def sample_committed(
        self,
        index: int,
        marker: Marker | str,
        epoch: str,
        sequence: int,
        tokens: int,
        nbytes: int,
        root: str,
        attempt: int,
        timings: Mapping[str, float],
        adopted: bool,
        sample_id: str = "",
    ) -> None:
        """A sample is durable: counts it and writes its canonical line.

        Args:
            index: sample index.
            marker: of the attempt that succeeded.
            epoch: the server's epoch.
            sequence: the dump's capture counter.
            tokens: prompt tokens.
            nbytes: bytes of the shard file.
            root: where it lies.
            attempt: number of the attempt.
            timings: seconds by step.
            adopted: the dump outlived an earlier hsx and was not prefilled again.
            sample_id: the dataset's own id, where it is at hand.
        """
        now = self._clock()
        self._samples.add(now, 1)
        self._tokens.add(now, tokens)
        self._bytes.add(now, nbytes)
        for history in self._histories.values():
            history.add(now, samples=1, tokens=tokens, bytes=nbytes)
        self._on_root.setdefault(root, Counter()).update(samples=1, bytes=nbytes)
        self._adopted += adopted
        for step, seconds in timings.items():
            self._step_seconds[step] += seconds
        self.log.info(
            PER_SAMPLE,
            index=index,
            **({"id": sample_id} if sample_id else {}),
            marker=str(marker),
            epoch=epoch,
            sequence=sequence,
            tokens=tokens,
            bytes=nbytes,
            root=root,
            attempt=attempt,
            adopted=adopted,
            timings={step: round(seconds, 4) for step, seconds in timings.items()},
        )

    def sample_shared(self, index: int, marker: Marker | str, tokens: int, nbytes: int, root: str, sample_id: str = "") -> None:
        """A sample is durable without a prefill of its own: its shard is a link to that of `marker`, of the same prompt."""
        self._shared.update(samples=1, tokens=tokens, bytes=nbytes)
        self.log.info(
            PER_TWIN,
            index=index,
            **({"id": sample_id} if sample_id else {}),
            marker=str(marker),
            tokens=tokens,
            bytes=nbytes,
            root=root,
        )

    def attempt_failed(self, marker: Marker | str, reason: str, evidence: str, quarantined: bool) -> None:
        """An attempt failed by the sample's own fault, for `reason` (an invariant or an error kind); perhaps for good."""
        self._failures[reason] += 1
        self._quarantined += quarantined
        if quarantined:
            self._quarantine_reasons[reason] += 1
            entry = {"time": self._wall(), "marker": str(marker), "reason": reason, "evidence": evidence[:2000]}
            self._last_quarantined.append(entry)
        self._remember(reason, evidence, str(marker))
        write = self.log.error if quarantined else self.log.warning
        write("sample.quarantined" if quarantined else "attempt.failed", marker=str(marker), reason=reason, evidence=evidence)

    def violation(self, marker: Marker | str | None, invariant: str, evidence: str) -> None:
        """An invariant does not hold; `marker` is None where it speaks of the whole run."""
        self._violations[invariant] += 1
        self.log.warning(
            "invariant.violated", invariant=invariant, evidence=evidence, marker=None if marker is None else str(marker)
        )

    def engine_state(self, state: State | str, reason: str = "") -> None:
        """The engine's life took a step."""
        name = state.value if isinstance(state, State) else state
        self._engine = (name, reason, self._wall())
        if name != State.STARTING.value:
            self._waiting = ""  # the next report may be the last, and come before anybody says so
        self._states.append({"time": self._engine[2], "state": name, "reason": reason[:500]})
        self.log.info("engine.state_changed", state=name, reason=reason)

    def engine_waiting(self, situation: str) -> None:
        """What the engine waits for while it is coming up; "" once it is not. Logged when it changes."""
        if situation != self._waiting:
            self._waiting = situation
            if situation:
                self.log.info("engine.waiting", reason=situation)

    def engine_restarted(self, reason: str, evidence: str, requeued: int, delay_s: float) -> None:
        """The epoch was voided, and a restart follows after `delay_s` seconds; `requeued` samples went back to the queue."""
        self._restarts[reason] += 1
        self._requeued += requeued
        for history in self._histories.values():
            history.add(self._clock(), restarts=1)
        entry = {"reason": reason, "evidence": evidence, "requeued": requeued, "delay_s": round(delay_s, 3)}
        self._last_restarts.append({"time": self._wall(), **entry})
        self._remember(reason, evidence, "")
        self.log.error("engine.restarted", **entry)

    def epoch_began(self, epoch: str, continued: bool) -> None:
        """A server passed the boot gate; `continued` where it is one that an earlier hsx had used."""
        self._epoch = {"id": epoch, "continued": continued, "count": self._epoch["count"] + 1}
        self.log.info("epoch.began", epoch=epoch, continued=continued)

    def samples_revoked(self, epoch: str, invariant: str, evidence: str, count: int, tokens: int, nbytes: int) -> None:
        """Committed samples, `count` of them, were taken back with their tokens and the bytes of their shards."""
        self._revoked.update(samples=count, tokens=tokens, bytes=nbytes)
        self._remember(invariant, f"samples revoked: {count}; {evidence}", "")
        self.log.error("samples.revoked", epoch=epoch, invariant=invariant, evidence=evidence, count=count)

    def canary_passed(self, epoch: str, sequence: int) -> None:
        """A canary came back sound; `sequence` is the capture number up to which it vouches."""
        self._canary = {"passed": self._canary["passed"] + 1, "time": self._wall(), "epoch": epoch, "sequence": sequence}
        self.log.info("canary.passed", epoch=epoch, sequence=sequence)

    def sample_convicted(self, index: int, deaths: int) -> None:
        """A sample was found to kill the server, which died `deaths` times with it. Its quarantine is reported besides."""
        self._convicted += 1
        self.log.error("sample.convicted", index=index, deaths=deaths)

    def error_met(self, kind: str, message: str) -> None:
        """An error that is neither an attempt's nor a restart's: keeps and logs it."""
        self._remember(kind, message, "")
        self.log.error("error.met", kind=kind, message=message)

    def gauges(self, requests: int, tokens: int, staging_bytes: int) -> None:
        """What is in flight now: requests, their prompt tokens, and bytes of the dump directory in use."""
        self._in_flight = {"requests": requests, "tokens": tokens}
        self._staging_bytes = staging_bytes

    def root_known(self, name: str, path: str, size: int, reserve: int) -> None:
        """A root of the job: where it is, the bytes of its file system, and those that stay free."""
        root = self._roots.setdefault(name, {"reason": "", **_UNSEEN})
        root |= {"path": path, "size_bytes": size, "reserve_bytes": reserve}

    def root_space(
        self, name: str, free: int, *, room: int | None = None, booked: int = 0, speed: float | None = None, state: str = ""
    ) -> None:
        """A root was looked at; see the port."""
        root = self._roots.setdefault(name, {"reason": "", **_UNSEEN})
        root |= {"state": state or "in_service", "free_bytes": free, "room_bytes": free if room is None else max(0, room)}
        root |= {"promised_bytes": booked, "bytes_per_second": None if speed is None else round(speed)}

    def root_lost(self, name: str, kind: str, message: str) -> None:
        """A root is out of service for the rest of the run."""
        self.root_space(name, 0, state="lost")
        self._roots[name]["reason"] = message
        self._remember(kind, message, "")
        self.log.error("root.lost", root=name, kind=kind, message=message)

    def root_silent(self, name: str, seconds: float) -> None:
        """A root did not answer for `seconds`; see the port. Its numbers stay those that were seen last."""
        message = f"root {name} did not answer for {seconds:g} s: its mount hangs"
        root = self._roots.setdefault(name, {"reason": "", **_UNSEEN})
        root |= {"state": "silent", "reason": message, "room_bytes": 0}
        self._remember("root_silent", message, "")
        self.log.error("root.silent", root=name, message=message)

    def root_answered(self, name: str) -> None:
        """A root that was silent answers again."""
        self._roots[name] |= {"state": "in_service", "reason": ""}
        self.log.info("root.answered", root=name)

    def intake_paused(self, kind: str, message: str) -> None:
        """No sample is started for want of room; `message` says what to free. Logged once for each pause."""
        pause = self._paused.get(kind)
        if pause is None:
            self._paused[kind] = {"kind": kind, "message": message, "since": self._wall()}
            self._remember(kind, message, "")
            self.log.error("intake.paused", kind=kind, message=message)
        else:
            pause["message"] = message

    def intake_resumed(self, kind: str) -> None:
        """There is room again, or nobody waits for it; nothing where no pause was."""
        pause = self._paused.pop(kind, None)
        if pause is not None:
            self.log.info("intake.resumed", kind=kind, seconds=round(self._wall() - pause["since"], 3))

    @property
    def paused(self) -> str:
        """Why the intake is paused; "" while it is not."""
        return "; ".join(str(pause["message"]) for pause in self._paused.values())

    @property
    def attempts_failed(self) -> int:
        """Attempts of this run that failed."""
        return sum(self._failures.values())

    def run_unsound(self, fault: str) -> None:
        """The run itself does not get on, for the reason `fault`; or, with "", does again."""
        if fault:
            self.log.error("run.stuck", message=fault)
        else:
            self.log.info("run.recovered")

    @property
    def bytes_committed(self) -> int:
        """Bytes of the job's committed shards."""
        before = self._before.bytes_committed if self._before else 0
        return before + self._bytes.total - self._revoked["bytes"]

    @property
    def bytes_settled(self) -> int:
        """Those, and what samples would take besides whose shards are links to these."""
        before = self._before.bytes_shared if self._before else 0
        return self.bytes_committed + before + self._shared["bytes"]

    def _remember(self, kind: str, message: str, marker: str) -> None:
        self._errors.append({"time": self._wall(), "kind": kind, "message": message[:2000], "marker": marker})

    def snapshot(self) -> dict[str, Any]:
        """Everything, as plain data: the body of the status document (see `hsx.status`) and the source of the metrics."""
        now = self._clock()
        age = now - self._began
        before = self._before
        token_rates = self._tokens.rates(now)
        progress: dict[str, Any] = {
            "samples": {
                "committed_by_run": self._samples.total,
                "revoked_by_run": self._revoked["samples"],
                "per_second": asdict(self._samples.rates(now)),
            },
            "tokens": {"committed_by_run": self._tokens.total, "per_second": asdict(token_rates)},
            "bytes": {"committed_by_run": self._bytes.total, "per_second": asdict(self._bytes.rates(now))},
            "shared": {f"{what}_by_run": self._shared[what] for what in ("samples", "tokens", "bytes")},
            "adopted": self._adopted,
            "step_seconds": {step: round(seconds, 4) for step, seconds in self._step_seconds.items()},
            "eta": {"seconds": None, "basis": "the job's totals are not known yet"},
        }
        quarantined, rejected = self._quarantined, 0
        if before is not None:
            quarantined, rejected = quarantined + before.quarantined, before.rejected
            revoked, shared = self._revoked, self._shared
            done = self._samples.total + shared["samples"]
            committed = before.committed + done - revoked["samples"]
            tokens = before.tokens_committed + self._tokens.total + shared["tokens"] - revoked["tokens"]
            progress["samples"] |= {
                "total": before.pending + before.committed + before.quarantined,
                "committed": committed,
                "pending": max(0, before.pending - done - self._quarantined + revoked["samples"]),
            }
            progress["tokens"] |= {"total": before.tokens_total, "committed": tokens}
            progress["bytes"] |= {"committed": self.bytes_committed}
            progress["shared"] |= {
                "samples": before.shared + shared["samples"],
                "tokens": before.tokens_shared + shared["tokens"],
                "bytes": before.bytes_shared + shared["bytes"],
            }
            # What is left will be prefilled to the part that was so far.
            prefilled = self._tokens.total / ((self._tokens.total + shared["tokens"]) or 1) or 1.0
            progress["eta"] = asdict(eta(round((before.tokens_total - tokens) * prefilled), token_rates, age))
        state, reason, since = self._engine
        violations = self._violations_before + self._violations
        wall = self._wall()
        return {
            "time": wall,
            "phase": dict(self._phase),
            "job": {**self._job, "began": self._began_wall, "seconds": round(age, 3)},
            "progress": progress,
            "engine": {
                "state": state,
                "reason": reason,
                "waiting_for": self._waiting,
                "since": since,
                "epoch": dict(self._epoch),
                "restarts": {
                    "total": sum(self._restarts.values()),
                    "by_reason": dict(self._restarts),
                    "requeued": self._requeued,
                    "last": list(self._last_restarts),
                },
                "timeline": list(self._states),
            },
            "in_flight": dict(self._in_flight),
            "staging": {"bytes": self._staging_bytes},
            "roots": {name: {**root, "by_run": self._of_root(name)} for name, root in self._roots.items()},
            "intake": {"paused": bool(self._paused), "pauses": [dict(pause) for pause in self._paused.values()]},
            "invariants": {
                "violations": self._violations.total(),
                "by_name": dict(self._violations),
                "job": {"violations": violations.total(), "by_name": dict(violations)},
            },
            "canaries": dict(self._canary),
            "failed_attempts": dict(self._failures),
            "quarantine": {
                "count": quarantined,
                "by_run": self._quarantined,
                "convicted": self._convicted,
                "rejected_rows": rejected,
                "by_reason": dict(self._quarantine_reasons),
                "last": list(self._last_quarantined),
            },
            "last_errors": list(self._errors),
            "history": {name: _drawn(history, now, wall) for name, history in self._histories.items()},
            "events": list(self.log.last),
        }

    def _of_root(self, name: str) -> dict[str, int]:
        counted = self._on_root.get(name, Counter())
        return {"samples": counted["samples"], "bytes": counted["bytes"]}


_UNSEEN: Final[dict[str, Any]] = {
    "state": "in_service",
    "free_bytes": None,
    "room_bytes": None,
    "promised_bytes": 0,
    "bytes_per_second": None,
}
"""A root that nobody has looked at yet."""


def _drawn(history: History, now: float, wall: float) -> dict[str, Any]:
    age, series = history.series(now)
    return {"step_seconds": history.step_s, "begins": round(wall - age, 3), **series}
