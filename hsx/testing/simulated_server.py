"""A server that exists in memory only and writes real dumps: a discrete-event simulation, driven from outside.

It prefills in chunks, several prompts at once, ends them in any order, and breaks by plan. It knows no event loop: whoever owns
it calls `advance` with the time. All of it can be pickled, so it outlives a crash of hsx as a server process does.
"""

from __future__ import annotations

import errno
import heapq
import random
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import hsx
from hsx.capture.dumpwriter import DumpWriter
from hsx.capture.report import write_report
from hsx.core.dump import ERROR_SUFFIX, PART_SUFFIX, SUFFIX
from hsx.core.epoch import NORM_NAME, RECORD_NAME, STATE_NAME, CaptureReport, CaptureState, EpochRecord, to_json
from hsx.core.invariants import Answer
from hsx.errors import EngineError, SampleError
from hsx.testing.simulated_faults import ROWS, Planned, Rows, spoil_file, spoil_rows, swap
from hsx.testing.simulated_states import simulated_states

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.marker import Marker
    from hsx.core.spec import CaptureSpec, ModelShape

WORK: Final = ".work"
CHUNK_S: Final = 0.05
"""Longest time for one chunk of a prompt."""


@dataclass(slots=True)
class Plan:
    """What goes wrong.

    Attributes:
        faults: those of single requests; the first that matches strikes, one a request.
        poison: samples that kill the server whenever it is asked for them.
        boot_deaths: the next so many starts fail.
        corrupt_after: after so many more dumps the server gives every prompt the states of one row before, ids right, until its
            end; None for never.
    """

    faults: list[Planned] = field(default_factory=list)
    poison: set[int] = field(default_factory=set)
    boot_deaths: int = 0
    corrupt_after: int | None = None


@dataclass(slots=True)
class Work:
    """A prompt at the server.

    Attributes:
        marker: whose it is.
        rows: what it will leave behind.
        ends: where its chunks end, in tokens; those still to come.
        fault: what goes wrong with it.
        connected: somebody waits for the answer.
        spoiled: its rows are no more those that were written so far.
    """

    marker: Marker
    rows: Rows
    ends: list[int]
    fault: Planned | None
    connected: bool = True
    spoiled: bool = False

    @property
    def kind(self) -> str:
        """The kind of its fault, or ""."""
        return self.fault.kind if self.fault else ""


class SimulatedServer:
    """One server and its successors, in one dump directory.

    Args:
        dump_dir: holds the epochs' folders.
        spec: what is captured.
        shape: of the model that it pretends to serve.
        port: that it pretends to listen on.
        seed: of everything that is left to chance.
    """

    def __init__(self, dump_dir: Path, spec: CaptureSpec, shape: ModelShape, port: int, seed: int) -> None:
        self._dump_dir, self._spec, self._shape, self._port = dump_dir, spec, shape, port
        self._rng = random.Random(seed)
        self.plan = Plan()
        self.now = 0.0
        self.strikes: list[tuple[str, int]] = []
        """Faults that struck so far, each with the sample."""
        self.corrupt: list[str] = []
        """Epochs in which the states went wrong."""
        self.record: EpochRecord | None = None
        self.alive = False
        self.hung = False
        self.death = ""
        self.outcomes: list[tuple[Marker, Answer | SampleError]] = []
        """Answers that nobody has taken yet, oldest first."""
        self._boots = 0
        self._counts = dict.fromkeys(("sequence", "published", "failed", "foreign", "incomplete"), 0)
        self._works: dict[Marker, Work] = {}
        self._events: list[tuple[float, int, str, Marker]] = []
        self._numbers = 0
        self._writer: DumpWriter | None = None
        self._written: dict[Marker, int] = {}
        self._late_rows: dict[Marker, Rows] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Descriptors cannot be kept: dumps that were begun are begun again.
        return {**self.__dict__, "_writer": None, "_written": {}, "outcomes": []}

    @property
    def in_flight(self) -> int:
        """Prompts at the server."""
        return len(self._works)

    # --- life and death

    @property
    def folder(self) -> Path:
        """The current epoch's."""
        assert self.record is not None
        return self._dump_dir / self.record.epoch

    def boot(self) -> EpochRecord:
        """Starts a new life. Raises EngineError `server_start_failed` as often as planned."""
        assert not self.alive
        self._boots += 1
        epoch = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        if self.plan.boot_deaths > 0:
            self.plan.boot_deaths -= 1
            raise EngineError("server_start_failed", f"server {epoch} died at its start, as planned")
        self._forget()
        self._counts = dict.fromkeys(self._counts, 0)
        self.record = EpochRecord(
            epoch=epoch,
            boot_id="simulated",
            pid=(1 << 23) + self._boots,  # above any process id, so nobody takes it for a living one
            start_ticks=self._boots,
            invocation_id="",
            command=("simulated",),
            model="simulated",
            revision="",
            layers=self._spec.layers,
            final=self._spec.final,
            engine="simulated",
            engine_version=hsx.__version__,
            plugin_version=hsx.__version__,
            host="127.0.0.1",
            port=self._port,
        )
        (self.folder / WORK).mkdir(parents=True)
        self._publish_text(RECORD_NAME, to_json(self.record))
        report = CaptureReport(
            epoch=epoch,
            layers=self._spec.layers,
            final=self._spec.final,
            hidden_size=self._shape.hidden_size,
            model_layers=self._shape.layers,
            vocab_size=self._shape.vocab_size,
            norm_eps=1e-6,
            norm_file=NORM_NAME,
            engine_version=hsx.__version__,
            plugin_version=hsx.__version__,
            tp_size=1,
            dp_size=1,
            rank=0,
            architecture="SimulatedModel",
            method="model",
            head_multiplier=1.0,
            dtype="bfloat16",
        )
        write_report(self.folder, report, np.ones(self._shape.hidden_size, np.float32))
        self.alive, self.hung, self.death = True, False, ""
        self._publish_state()
        return self.record

    def kill(self, how: str) -> None:
        """Ends this life: every request under way is lost, and what was half written stays. Harmless when it is dead."""
        if not self.alive:
            return
        self.alive, self.death = False, f"server {how}"
        for work in self._works.values():
            if work.connected:
                lost = SampleError("request_failed", f"{work.marker}: connection was lost: the server {how}")
                self.outcomes.append((work.marker, lost))
        self._forget()

    def _forget(self) -> None:
        self._works.clear()
        self._events.clear()
        self._writer = None
        self._written.clear()
        self._late_rows.clear()

    # --- requests

    def submit(self, marker: Marker, ids: NDArray[np.int32]) -> None:
        """Takes a request; its outcome appears in `outcomes` in its time. Raises EngineError `server_gone`, `server_full`."""
        if not self.alive:
            raise EngineError("server_gone", f"{marker}: nobody listens: {self.death or 'the server was not started'}")
        fault = None if marker.canary else self._take(marker.index)
        kind = fault.kind if fault else ""
        if kind == "full":
            raise EngineError("server_full", f"{marker}: the queue is full")
        if kind in ("refused", "failed", "reset_before"):
            self._at(self._rng.uniform(0, CHUNK_S), kind, marker)
            return
        tokens = len(ids)
        cuts = self._rng.sample(range(1, tokens), min(self._rng.randrange(4), tokens - 1))
        rows = Rows(ids.astype(np.int32), simulated_states(ids, self._spec, self._shape.hidden_size))
        if kind == "other_sample":
            rows.ids = ((rows.ids + 1) % self._shape.vocab_size).astype(np.int32)
            rows.states = simulated_states(rows.ids, self._spec, self._shape.hidden_size)
        work = self._works[marker] = Work(marker, rows, [*sorted(cuts), tokens], fault)
        self._at(self._chunk_s(work), "chunk", marker)
        self._counts["foreign"] += self._rng.random() < 0.1

    def drop(self, marker: Marker) -> None:
        """The client has gone or aborts: the prompt is dropped, unless it is too far on already, which is left to chance."""
        work = self._works.get(marker)
        if work is None or self.hung:
            return
        work.connected = False
        if self._rng.random() < 0.5:
            self._give_up(marker)

    def hang_up(self) -> None:
        """All clients are gone, as when hsx is killed."""
        for marker in list(self._works):
            self.drop(marker)
        self.outcomes.clear()

    def _take(self, index: int) -> Planned | None:
        for fault in self.plan.faults:
            if fault.index == index and fault.count > 0 and (fault.kind != "swapped" or self._works):
                fault.count -= 1
                self.strikes.append((fault.kind, index))
                return fault
        if index in self.plan.poison:
            self.strikes.append(("die", index))
            return Planned("die", index)
        return None

    # --- time

    def next_due(self) -> float | None:
        """When something happens next; None when nothing will."""
        return self._events[0][0] if self._events and self.alive and not self.hung else None

    def advance(self, now: float) -> None:
        """Does all that is due by `now` seconds."""
        while (due := self.next_due()) is not None and due <= now:
            self.now = max(self.now, due)
            _, _, kind, marker = heapq.heappop(self._events)
            if kind == "chunk":
                self._chunk(self._works.get(marker))
            elif kind == "dump":
                self._publish(self._works.get(marker))
            elif kind == "again":
                self._write_again(marker)
            elif kind == "answer":
                self._answer(self._works.get(marker))
            else:
                error = "request_refused" if kind == "refused" else "request_failed"
                self.outcomes.append((marker, SampleError(error, f"{marker}: {kind}, as planned")))
        self.now = max(self.now, now)

    def _at(self, seconds: float, kind: str, marker: Marker) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (self.now + seconds, self._numbers, kind, marker))

    def _chunk_s(self, work: Work) -> float:
        slowness = work.fault.value if work.fault is not None and work.kind == "slow" else 1.0
        return self._rng.uniform(0.1, 1.0) * CHUNK_S * slowness

    def _chunk(self, work: Work | None) -> None:
        if work is None:
            return
        marker, kind = work.marker, work.kind
        self._write(work, work.ends.pop(0))
        if kind == "die":
            self.kill("was killed in the middle of a prompt")
        elif kind == "hang":
            self.hung = True
        elif kind == "lost":
            self._give_up(marker)
            self.outcomes.append((marker, SampleError("request_failed", f"{marker}: aborted by the server, as planned")))
        elif work.ends:
            self._at(self._chunk_s(work), "chunk", marker)
        else:
            if kind != "late":
                self._publish(work)
            self._at(self._rng.uniform(0, 0.01), "answer", marker)

    def _answer(self, work: Work | None) -> None:
        if work is None:
            return
        marker, kind = work.marker, work.kind
        if kind == "late" and work.fault is not None:
            self._at(work.fault.value, "dump", marker)
        else:
            del self._works[marker]
        if not work.connected:
            return
        if kind == "reset_after":
            self.outcomes.append((marker, SampleError("request_failed", f"{marker}: connection was cut after the dump")))
        else:
            counted = marker.tokens + (1 if kind == "miscounted" else 0)
            self.outcomes.append((marker, Answer(counted, 1 if kind == "cached" else 0, "length", 0)))

    def _give_up(self, marker: Marker) -> None:
        """A prompt ends without a dump, after a part of it or none."""
        del self._works[marker]
        if self._written.pop(marker, None) is not None:
            self._dump_writer().drop(marker)
            self._counts["incomplete"] += 1
            self._publish_state()

    # --- dumps

    def _write(self, work: Work, end: int) -> None:
        """Writes the rows that are not written yet, up to `end`."""
        marker = work.marker
        if marker not in self._written:
            self._dump_writer().begin(marker)
        begin = 0 if work.spoiled else self._written.get(marker, 0)
        self._dump_writer().write(marker, begin, work.rows.states[begin:end], work.rows.ids[begin:end])
        self._written[marker] = end
        work.spoiled = False

    def _publish(self, work: Work | None) -> None:
        """Gives the whole dump its number and its final name, or does what is planned instead."""
        if work is None:
            return
        marker, kind = work.marker, work.kind
        if kind == "swapped":
            # Prompts of one batch: they were in flight when this one came.
            other = next((w for w in self._works.values() if w is not work and not w.marker.canary), None)
            if other is not None:
                swap(work.rows, other.rows)
                work.spoiled = other.spoiled = True
                self.strikes.append((kind, other.marker.index))
        spoil_rows(kind, work.rows)
        if self._corrupting():
            work.rows.states = np.roll(work.rows.states, 1, axis=0)
            work.spoiled = True
        work.spoiled |= kind in ROWS
        self._write(work, marker.tokens)
        if kind in ("never", "no_space"):
            self._no_dump(marker, kind)
        else:
            self._finish(marker, kind)
            if kind == "twice":
                self._late_rows[marker] = work.rows
                self._at(self._rng.uniform(0, 2.0), "again", marker)
        if kind == "late":
            del self._works[marker]

    def _finish(self, marker: Marker, kind: str) -> None:
        writer = self._dump_writer()
        if kind == "gap":
            writer.go_on(writer.sequence + 1)
        self._counts["sequence"] = writer.publish(marker)
        del self._written[marker]
        file = self.folder / WORK / f"{marker}{SUFFIX}"
        spoil_file(kind, file)
        with suppress(FileNotFoundError):  # somebody took the folder away
            file.rename(self.folder / file.name)
        self._counts["published"] += 1
        self._publish_state()

    def _no_dump(self, marker: Marker, kind: str) -> None:
        writer = self._dump_writer()
        del self._written[marker]
        if kind == "never":
            writer.drop(marker)
            return
        writer.fail(marker, "No space left on device", errno.ENOSPC)
        name = f"{marker}{ERROR_SUFFIX}"
        (self.folder / WORK / name).rename(self.folder / name)
        self._counts["failed"] += 1
        self._publish_state()

    def _write_again(self, marker: Marker) -> None:
        rows = self._late_rows.pop(marker)
        self._dump_writer().begin(marker)
        self._dump_writer().write(marker, 0, rows.states, rows.ids)
        self._written[marker] = marker.tokens
        self._finish(marker, "")

    def _corrupting(self) -> bool:
        """Whether states are wrong from now on to the end of this life; counts the dumps up to that."""
        epoch = self.record.epoch if self.record else ""
        if self.plan.corrupt_after is not None:
            self.plan.corrupt_after -= 1
            if self.plan.corrupt_after < 0:
                self.plan.corrupt_after = None
                self.corrupt.append(epoch)
        return epoch in self.corrupt

    def _dump_writer(self) -> DumpWriter:
        if self._writer is None:
            assert self.record is not None
            hidden_size, engine = self._shape.hidden_size, f"simulated {hsx.__version__}"
            self._writer = DumpWriter(self.folder / WORK, self.record.epoch, self._spec, hidden_size, "simulated", engine)
            self._writer.go_on(self._counts["sequence"])
        return self._writer

    def _publish_state(self) -> None:
        assert self.record is not None
        state = CaptureState(self.record.epoch, self.record.pid, self.record.start_ticks, rank=0, **self._counts)
        self._publish_text(STATE_NAME, to_json(state))

    def _publish_text(self, name: str, text: str) -> None:
        part = self.folder / (name + PART_SUFFIX)
        part.write_text(text)
        part.rename(self.folder / name)
