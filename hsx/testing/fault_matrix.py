"""The fault matrix: every fault that hsx is shown to survive, and what must hold after each of them.

A test brings one fault about, lets the job go on to its end, and reports its row with `Matrix.seen`, which holds the store,
the ledger and the log against the promise: nothing wrong, nothing lost, nothing twice. What it saw is written to a folder, and
`scripts/generate_reliability.py` makes docs/reliability.md of that.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

from structlog.testing import capture_logs

from hsx.core.layout import index_of_key
from hsx.stores.ledger_reader import LedgerReader
from hsx.stores.ledger_schema import FILE_NAME
from hsx.testing.truth import wrong_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
    from pathlib import Path

    from hsx.app import Outcome
    from hsx.config_load import LoadedConfig
    from hsx.testing.tiny_job import TinyJob

BASELINE: Final = "baseline"
"""Name of the result of the script that predicts the counter."""
EngineName = Literal["reference", "sglang"]
ENGINES: Final[tuple[EngineName, ...]] = ("reference", "sglang")
RESTARTS: Final = frozenset({"engine.restarted", "engine.restarting"})
"""Log events that tell of a restart, each restart once."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the matrix.

    Attributes:
        says: what goes wrong.
        does: what hsx does about it.
        sglang: whether it is also brought about on the real SGLang, or
        only_sglang: there alone.
    """

    says: str
    does: str
    sglang: bool = False
    only_sglang: bool = False

    @property
    def engines(self) -> tuple[EngineName, ...]:
        """Where it is brought about."""
        if self.only_sglang:
            return ("sglang",)
        return ENGINES if self.sglang else ("reference",)


_RETRIED: Final = "the attempt fails by `{}`; the sample is asked for again, and quarantined where that does not help"
_ADOPTED: Final = "the next run adopts the dumps of what was not committed, and asks for nothing twice"

ROWS: Final[dict[str, Row]] = {
    # wrong dumps
    "dump_of_another_sample": Row("the dump of another sample stands under this marker", _RETRIED.format("tokens_equal")),
    "rows_swapped": Row("two samples in one batch get each other's rows", _RETRIED.format("tokens_equal")),
    "states_shifted": Row(
        "from some moment on, ids are right and states are shifted by one row, silently",
        "the next canary fails; what was committed since the last sound one is revoked, the server restarted, and the samples "
        "extracted again",
    ),
    "last_chunk_missing": Row("the last chunk of a prompt was never written", _RETRIED.format("tokens_equal")),
    "chunk_doubled": Row("a chunk stands twice in the dump", _RETRIED.format("tokens_equal")),
    "dump_late": Row("a dump comes 30 s after its answer, within the deadline", "waits for it, and stores it"),
    "dump_too_late": Row(
        "a dump comes after its deadline",
        "the attempt fails by `published`; the sample is asked for again, and the late dump swept",
    ),
    "dump_twice": Row("a dump is published twice", "stores one; the other is a violation, counted against the server"),
    "dump_never": Row("no dump follows a 200 answer", _RETRIED.format("published")),
    "truncated_file": Row("the dump file is cut short", _RETRIED.format("dump_invalid")),
    "bad_header": Row("the dump file's header is no header", _RETRIED.format("dump_invalid")),
    "zero_layer": Row("one layer of the dump is all zero", _RETRIED.format("nonzero_rows")),
    "nan_row": Row("one row of the dump is NaN", _RETRIED.format("finite")),
    "stale_attempt": Row(
        "the dump of an older, given-up attempt appears beside the newer one's", "pairs by marker; sweeps the stale dump", True
    ),
    "stale_run": Row(
        "dumps of another run lie in the dump directory, the same samples' among them",
        "pairs by marker; leaves what is another run's",
        True,
    ),
    # the counter
    "counter_reset": Row("the server's counter begins again without a restart", "`sequence`: epoch void, server restarted"),
    "counter_gap": Row("the counter skips a number: its dump was never seen", "`sequence` is counted, and held against nobody"),
    "counter_gaps": Row("the counter skips more numbers than are forgiven", "`sequence`: epoch void, server restarted"),
    "foreign_requests": Row("as many foreign requests as ours on the same server", "they have no marker, so no dump", True),
    "probes_and_warmups": Row("health probes and warm-ups between the requests", "they have no marker, so no dump", True),
    # connections and refusals
    "client_aborts": Row(
        "other clients, and ours, abort requests in the middle", "given-up attempts are asked for again", True
    ),
    "connection_reset_before": Row("the connection is reset before the prefill", _RETRIED.format("request_failed")),
    "connection_reset_during": Row("the connection is reset during the prefill", _RETRIED.format("request_failed")),
    "connection_reset_after": Row(
        "the connection is reset after the dump, before the answer", _RETRIED.format("request_failed") + "; its dump is swept"
    ),
    "connection_reset_in_answer": Row(
        "the connection is reset in the middle of the answer", _RETRIED.format("request_failed") + "; its dump is swept"
    ),
    "queue_full": Row("503: the server's queue is full", "waits and asks again; held against nobody", True),
    "too_long": Row("400: a sample is too long for the server", "quarantined at once as `request_refused`", True),
    "out_of_vocabulary": Row(
        "a token id outside the vocabulary, which would kill the server", "a bad row: rejected before anything is sent", True
    ),
    # the server's life
    "server_killed": Row(
        "the server is killed with -9 in the middle of a prefill", "`alive`: restarted, samples requeued", True
    ),
    "scheduler_killed": Row(
        "the scheduler dies alone, and the HTTP port still answers", "`alive` or `advancing`: restarted, samples requeued", True
    ),
    "writer_killed": Row(
        "the process that writes the dumps dies alone, dumps half written",
        "the server writes by itself from then on (`capture.writer_died`); dumps that were under way are asked for again, held "
        "against nobody",
        only_sglang=True,
    ),
    "server_hangs": Row("the server stops working and answers /health with 200", "`advancing`: restarted, samples requeued"),
    "server_slow": Row("the server works 20 times as slowly", "waits: deadlines grow with the tokens in flight; no restart"),
    "server_dies_at_boot": Row("the server dies at boot three times", "started again with growing delays, within the budget"),
    "poison_sample": Row(
        "one sample kills the server whenever it is asked for",
        "found by halving the suspects, and quarantined as `server_killed`; the rest goes on",
    ),
    "staging_full": Row(
        "the dump tmpfs is full", "the intake pauses until there is room, and says what to free; held against nobody", True
    ),
    "staging_gone": Row("the dump directory is deleted under us", "`alive`, with that as evidence: server restarted"),
    # disks
    "root_full": Row("a root fills up", "the other roots take the rest"),
    "roots_full": Row(
        "all roots fill up",
        "the intake pauses before they are full, says what to free, and goes on by itself",
    ),
    "root_read_only": Row(
        "a root turns read-only",
        "out of service (`root.lost`): what is not committed goes to the other roots, what is committed there stays",
    ),
    # hsx's own life
    "killed_at_preallocation": Row("hsx is killed while it preallocates a shard", _ADOPTED),
    "killed_at_write": Row("hsx is killed while it writes a shard", _ADOPTED),
    "killed_at_data_sync": Row("hsx is killed at the fdatasync of a shard", _ADOPTED),
    "killed_at_rename": Row("hsx is killed at the rename of a shard", _ADOPTED),
    "killed_at_folder_sync": Row("hsx is killed at the fsync of a root's folder", _ADOPTED),
    "killed_at_ledger_sync": Row("hsx is killed at the sync of the ledger's log", _ADOPTED),
    "killed_at_view_link": Row("hsx is killed between the ledger's commit and the link of the view", "the next run repairs it"),
    "killed_at_dump_removal": Row("hsx is killed at the removal of a committed dump", "the next run sweeps the dump"),
    "hsx_stopped": Row("hsx is stopped with SIGSTOP for a minute", "the silence was its own: no verdict on the server"),
    "clock_back": Row("the wall clock steps back an hour in the run", "nothing: durations are monotonic"),
    "seed_story": Row(
        "warm-ups, then the client is killed and started again on the same living server",
        "continues in the same epoch: pairs by marker, whatever the server has counted",
        True,
    ),
}
"""Every row, by its short name: the order is that of the page."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one row's test saw; deterministic where the fault is.

    Attributes:
        row: a key of `ROWS`.
        engine: where it was seen.
        samples: samples of the job.
        stored: samples committed at the end, every one read again and equal to the truth.
        rejected: dataset rows that never were samples.
        quarantined: number of samples by reason.
        restarts: of the server: a number, or the bounds that it lay in.
        events: names of the log events that were there, as the test demanded.
        wrong, lost, doubled: samples; a row with any is not written, its test fails.
    """

    row: str
    engine: EngineName
    samples: int
    stored: int
    rejected: int
    quarantined: dict[str, int]
    restarts: str
    events: list[str]
    wrong: int = 0
    lost: int = 0
    doubled: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """Where rows are reported.

    Attributes:
        folder: gets `<row>.<engine>.json`.
        reported: rows reported through this object.
    """

    folder: Path
    reported: list[str] = field(default_factory=list)

    def seen(
        self,
        row: str,
        loaded: LoadedConfig,
        *,
        log: Sequence[Mapping[str, Any]],
        engine: EngineName = "reference",
        quarantined: Mapping[str, int] | None = None,
        restarts: int | range = 0,
        events: Collection[str] = (),
        rejected: int = 0,
        truth: Callable[[LoadedConfig], list[int]] = wrong_samples,
    ) -> Result:
        """Asserts what must hold at the end of every row, and writes its result. Call it once the job has come to its end.

        Args:
            row: a key of `ROWS`.
            loaded: the job.
            log: the JSON lines of all its runs, in order (`log_lines`, or what structlog's `capture_logs` has caught).
            engine: the server's kind.
            quarantined: how many samples must be quarantined, by reason; exactly these.
            restarts: how many restarts of the server the log must tell of: a number, or a range of numbers.
            events: names of log events, each of which must be there at least once.
            rejected: dataset rows that must have been rejected.
            truth: the committed samples whose stored states are wrong: reads every one, and computes independently.

        Raises:
            AssertionError: something does not hold.
            KeyError: no such row.
        """
        says = ROWS[row].says
        assert truth(loaded) == [], f"{row} ({says}): wrong states are stored"
        with LedgerReader(loaded.state_dir / FILE_NAME) as ledger:
            counts, run = ledger.counts(), ledger.run
            committed = {entry.index: entry for entry in ledger.committed()}
            found = Counter(entry.reason for entry in ledger.quarantined())
        assert counts.pending == 0, f"{row}: {counts}"
        assert dict(found) == dict(quarantined or {}), f"{row}: quarantined {dict(found)}"
        assert counts.rejected == rejected, f"{row}: {counts}"
        self._none_lost(row, log, {index: entry.marker for index, entry in committed.items()}, run)
        self._none_doubled(row, loaded, {index: entry.root for index, entry in committed.items()})
        happened = [line for line in log if line["event"] in RESTARTS]
        bounds = range(restarts, restarts + 1) if isinstance(restarts, int) else restarts
        assert len(happened) in bounds, f"{row}: {len(happened)} restarts; expected {restarts}: {happened}"
        names = {line["event"] for line in log}
        assert set(events) <= names, f"{row}: the log lacks {sorted(set(events) - names)}"
        told = str(restarts) if isinstance(restarts, int) else f"{bounds[0]} to {bounds[-1]}"
        samples = counts.committed + counts.quarantined + counts.pending
        assert samples == len(committed) + sum(found.values()), f"{row}: {counts}"
        result = Result(row, engine, samples, len(committed), rejected, dict(sorted(found.items())), told, sorted(events))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{row}.{engine}.json").write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")
        self.reported.append(row)
        return result

    def baseline(self, stored: int, wrong: int, hsx_stored: int) -> None:
        """Writes what the script that predicts the counter stored, and of that wrongly, and how much hsx stored there."""
        result = {"stored": stored, "wrong": wrong, "hsx_stored": hsx_stored, "hsx_wrong": 0}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{BASELINE}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    def _none_lost(self, row: str, log: Sequence[Mapping[str, Any]], committed: Mapping[int, str], run: str) -> None:
        """What the log says was committed is still there as it was, and was committed once, unless it was revoked."""
        told: dict[int, list[str]] = {}
        for line in log:
            if line["event"] == "sample.committed" and f"-{run}-" in line["marker"]:
                told.setdefault(line["index"], []).append(line["marker"])
        changed = {index: markers for index, markers in told.items() if committed.get(index) != markers[-1]}
        assert changed == {}, f"{row}: committed and gone, or another now"
        revoked = sum(int(line["count"]) for line in log if line["event"] == "samples.revoked")
        again = sum(len(markers) - 1 for markers in told.values())
        assert again <= revoked, f"{row}: {again} samples committed again, and only {revoked} were revoked"

    def _none_doubled(self, row: str, loaded: LoadedConfig, committed: Mapping[int, str]) -> None:
        """Each committed sample has one shard, on the root that the ledger names, and nothing else lies on the roots."""
        names = [(path.name, root.name) for root in loaded.roots for path in root.path.rglob("c.*")]
        shards = sorted((index, root) for name, root in names if (index := index_of_key(name)) is not None)
        assert shards == sorted(committed.items()), f"{row}: the shards on the roots are not the ledger's"


async def run_logged(job: TinyJob) -> tuple[Outcome, list[MutableMapping[str, Any]]]:
    """Runs or continues the job in this process; how it ended, and its log."""
    with capture_logs() as lines:
        outcome = await job.run()
    return outcome, lines
