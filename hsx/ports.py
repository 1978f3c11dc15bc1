"""The protocols between the core of hsx and its adapters.

`pipeline.py`, `writer.py`, `supervisor.py` and `watchdog.py` know these and nothing behind them; `app.py` alone names the
concrete classes. Blocking methods say so: they are called in worker threads, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hsx.core.dump import DumpHeader
from hsx.core.epoch import CaptureReport, CaptureState, EpochRecord
from hsx.core.invariants import Answer
from hsx.core.lifecycle import State
from hsx.core.marker import Marker
from hsx.core.sample import Lease
from hsx.records import BadRow, Commit, CommittedRow, Counts, Payload, Receipt, Row, ServerFacts

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from hsx.errors import RunError


class Clock(Protocol):
    """Monotonic time, so that tests can own it."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never steps back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Returns after `seconds`."""
        ...


# --- dataset ----------------------------------------------------------------------------------------------------------


class Dataset(Protocol):
    """A file of samples, read once, front to back, in bounded memory. Iterating blocks."""

    def __iter__(self) -> Iterator[Row | BadRow]:
        """All rows in file order. Raises RunError `dataset_unreadable` where the file itself fails."""
        ...

    def fingerprint(self) -> dict[str, str]:
        """The settings and content that decide the rows: path-independent, e.g. sha256 of the file, tokenizer hash. Blocks."""
        ...


class Samples(Protocol):
    """The indexed dataset: token ids by sample index."""

    @property
    def count(self) -> int:
        """Number of samples."""
        ...

    def tokens(self, index: int) -> int:
        """Prompt length of sample `index`."""
        ...

    def input_ids(self, index: int) -> NDArray[np.int32]:
        """Ids of sample `index`, int32 [tokens]. A short read of a local file; may be called on the event loop."""
        ...

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        """Loss mask of sample `index`, uint8 [tokens] of 0 and 1. As short a read; for stores that keep its tokens alone."""
        ...

    def sample_id(self, index: int) -> str:
        """The dataset's own id of sample `index`."""
        ...


class Leases(Protocol):
    """Where work comes from. The ledger is one; something that hands out work to several hsx may be another."""

    async def acquire(self, limit: int, only: Collection[int] | None = None) -> list[Lease]:
        """Up to `limit` leases on samples that are neither committed, quarantined nor leased; their attempt numbers are durable
        before this returns. Empty when there is none now (others may still be leased and come back).

        Args:
            limit: how many at most.
            only: none but these samples; None for any.
        """
        ...

    async def give_back(self, leases: Iterable[Lease]) -> None:
        """The attempts were given up without the sample's fault (void epoch, shutdown): the samples are free again."""
        ...


# --- engine -----------------------------------------------------------------------------------------------------------


class EngineClient(Protocol):
    """The HTTP face of a server."""

    async def answers(self) -> bool:
        """Whether the HTTP port answers at all and the model is loaded; False on any failure. Says nothing of progress."""
        ...

    async def facts(self) -> ServerFacts:
        """Asks the server for its settings. Raises EngineError `server_gone` or `server_protocol`."""
        ...

    async def prefill(
        self, marker: Marker, input_ids: Sequence[int] | NDArray[np.int32], timeout_s: float, rank: int | None = None
    ) -> Answer:
        """Prefills one prompt under `rid` = marker, in the DP rank `rank`; None leaves the choice to the server.

        Raises:
            SampleError: `request_refused` (HTTP 4xx), `request_duplicate` (the marker is in flight already), `request_failed`
                (connection lost, HTTP 5xx), `request_timeout`.
            EngineError: `server_full` (503), `server_gone` (connection refused), `server_protocol` (not the answer
                of such a server).
            RunError: `out_of_files`.
        """
        ...

    async def abort(self, marker: Marker) -> None:
        """Asks the server to drop a request. Raises EngineError `server_gone` where nobody listens; ignores other failures."""
        ...

    async def close(self) -> None:
        """Closes all connections."""
        ...


class EngineOwner(Protocol):
    """Who may start and stop the server."""

    @property
    def restarts(self) -> bool:
        """Whether `start` after `stop` brings a new server; False where hsx only attaches."""
        ...

    @property
    def situation(self) -> str:
        """What `start` is doing or waiting for, in words for people."""
        ...

    async def start(self) -> EpochRecord:
        """Starts a server, or finds the running one, and returns its record as soon as the process has written it.

        Raises EngineError `server_start_failed` or `epoch_unknown`.
        """
        ...

    async def ended(self) -> str:
        """Returns, once the process of the last record is gone, a sentence saying how it ended."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Ends the server, where hsx owns it: asks, waits up to `grace_s` seconds, kills. Idempotent.

        Leaves no process behind.
        """
        ...

    async def leave(self, grace_s: float) -> None:
        """The run is over: as `stop` for a server that must not outlive hsx; nothing for any other. Idempotent."""
        ...


# --- dumps ------------------------------------------------------------------------------------------------------------


class Dump(Protocol):
    """One published dump, mapped read-only."""

    @property
    def source(self) -> tuple[int, int] | None:
        """Descriptor of its file and the offset of `states` in it, open until `close`; None where it has no file."""
        ...

    @property
    def header(self) -> DumpHeader:
        """Its decoded header."""
        ...

    @property
    def states(self) -> NDArray[np.uint16]:
        """bf16 bits, [tokens, L, H]; a view of the mapping, valid until `close`."""
        ...

    @property
    def input_ids(self) -> NDArray[np.int32]:
        """int32 [tokens]; a view of the mapping, valid until `close`."""
        ...

    def close(self) -> None:
        """Drops the mapping; the file stays."""
        ...


class Dumps(Protocol):
    """The dump directory of one epoch at a time."""

    def enter(self, epoch: str) -> None:
        """Turns to the folder of `epoch`. Raises RunError `staging_failed` where it does not exist."""
        ...

    def report(self, rank: int = 0) -> CaptureReport | None:
        """The capture plugin's report in the current epoch, from a DP rank of the server; None until it is there."""
        ...

    def states(self) -> dict[int, CaptureState]:
        """What the capture side counted so far in the current epoch, by DP rank; without those that have not begun to count.

        Raises EngineError `epoch_unknown` where a file cannot be read as such.
        """
        ...

    def refusal(self) -> str | None:
        """Why there is no capture in this epoch, or not any more, in the capture side's own words; None where it runs."""
        ...

    def intact(self) -> bool:
        """Whether the folder that `enter` found is still there under its name, the same one, with its epoch record."""
        ...

    async def arrival(self, marker: Marker) -> None:
        """Returns as soon as the dump of `marker` is published. The caller sets the deadline.

        Raises EngineError `staging_full` or SampleError `dump_failed` when an error file appears instead, and EngineError
        `staging_gone` when the epoch's folder is not the one entered any more.
        """
        ...

    def open(self, marker: Marker) -> Dump:
        """Maps the dump named `marker`. Blocks briefly. Raises SampleError `dump_invalid`, or FileNotFoundError."""
        ...

    def peek(self, marker: Marker) -> DumpHeader | None:
        """The header of the dump named `marker`, read without mapping it; None where there is none or it cannot be read."""
        ...

    def remove(self, marker: Marker) -> None:
        """Unlinks whatever stands under `marker` (dump, error file). Missing files are fine."""
        ...

    def names(self) -> list[str]:
        """Names (without suffix) of all published dumps and error files in the current epoch's folder."""
        ...

    def free(self) -> int:
        """Free bytes of the dump directory's file system. Blocks briefly. Raises RunError `staging_failed`."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes that each dump takes there, those still being written included, by name without suffix. Blocks briefly."""
        ...

    def sweep_other_epochs(self, keep: str, run: str) -> int:
        """Removes what `run` left in the folders of epochs other than `keep`; returns how many files. Blocks briefly."""
        ...


# --- store ------------------------------------------------------------------------------------------------------------


class Root(Protocol):
    """One disk that takes shards. All methods block; `write` may be called from several threads for different samples."""

    @property
    def name(self) -> str:
        """Its name in config and ledger."""
        ...

    def free(self) -> int:
        """Free bytes for an unprivileged user on its file system. Raises RunError `root_unusable`."""
        ...

    def write(self, payload: Payload) -> Receipt:
        """Writes the shard of sample `payload.marker.index`.

        Preallocates and writes a `.partial` file, fdatasync, rename to the final name. Durable only after `sync`. A shard
        already there (of an uncommitted attempt) is replaced.

        Raises RunError `root_unusable` (EIO, EROFS, vanished) or `roots_full` (ENOSPC); nothing is left under the final name.
        """
        ...

    def read(self, index: int, tokens: int, captured_as: int | None = None) -> NDArray[np.uint16]:
        """bf16 bits [rows, L, H] of a shard that is here, checked: of all `tokens`, or of those that the store keeps.

        By its own record it has to be that of sample `captured_as` (default: `index`); see `CommittedRow`.

        Raises RunError `store_invalid`.
        """
        ...

    def checksum(self, index: int, tokens: int, captured_as: int | None = None) -> int:
        """The crc32c of the payload of a shard that is here, read whole, as `Receipt.crc32c`. Checks and raises as `read`."""
        ...

    def link(self, index: int, others: Sequence[int]) -> list[int]:
        """Gives the shard of sample `index`, which is here, the names of uncommitted samples too, in place of what is there.

        Durable only after `sync`. Returns those that have it now: not all where the file system takes no such link.
        Raises RunError `root_unusable`.
        """
        ...

    def sync(self) -> None:
        """Makes the names written so far durable (fsync of the directory). Raises RunError `root_unusable`."""
        ...

    def flush(self) -> None:
        """Makes everything on its file system durable (syncfs): what shards written without a sync of their own wait for.

        Raises RunError `root_unusable`; not to be tried again.
        """
        ...

    def discard(self, index: int) -> None:
        """Removes the shard of sample `index`, if there is one here: its committed one lies elsewhere.

        Raises RunError `root_unusable`.
        """
        ...

    def sweep(self) -> int:
        """Removes `.partial` files of this store; returns how many."""
        ...


class View(Protocol):
    """The group's union view of all roots."""

    def link(self, index: int, root: str) -> None:
        """Makes sample `index` on `root` visible in the group's `hidden_states`. Idempotent. Blocks briefly."""
        ...

    def unlink(self, index: int) -> None:
        """Hides sample `index` again. Idempotent. Blocks briefly."""
        ...


class Homes(Protocol):
    """The right to change where committed samples lie.

    A run holds it from the commit of a group to its last link, `hsx move` from looking at a sample's row to changing it: so
    that neither acts on a place that the other has changed meanwhile.
    """

    def take(self) -> Callable[[], None]:
        """Waits until nobody else has it; returns what gives it back. Blocks. Raises RunError `ledger_failed`."""
        ...


# --- observation -----------------------------------------------------------------------------------------------------


class Observer(Protocol):
    """Hears the facts of a run as they happen: counts, logs, serves status. Synchronous, cheap, on the event loop's thread."""

    def sample_committed(
        self,
        index: int,
        marker: Marker,
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
        """A sample is durable."""
        ...

    def sample_shared(self, index: int, marker: Marker, tokens: int, nbytes: int, root: str, sample_id: str = "") -> None:
        """A sample is durable that was not prefilled: its shard is that of `marker`, whose prompt is the same."""
        ...

    def attempt_failed(self, marker: Marker, reason: str, evidence: str, quarantined: bool) -> None:
        """An attempt failed by the sample's own fault."""
        ...

    def violation(self, marker: Marker | None, invariant: str, evidence: str) -> None:
        """An invariant does not hold."""
        ...

    def engine_state(self, state: State, reason: str = "") -> None:
        """The engine changed its state."""
        ...

    def engine_restarted(self, reason: str, evidence: str, requeued: int, delay_s: float) -> None:
        """An epoch was voided and a restart follows."""
        ...

    def epoch_began(self, epoch: str, continued: bool) -> None:
        """A server passed the boot gate."""
        ...

    def samples_revoked(self, epoch: str, invariant: str, evidence: str, count: int, tokens: int, nbytes: int) -> None:
        """Committed samples were taken back, with so many tokens and bytes of shards: no sound canary vouches for them."""
        ...

    def canary_passed(self, epoch: str, sequence: int) -> None:
        """A canary came back sound; `sequence` is the capture number up to which it vouches."""
        ...

    def sample_convicted(self, index: int, deaths: int) -> None:
        """A sample was found to kill the server, which died `deaths` times with it."""
        ...

    def error_met(self, kind: str, message: str) -> None:
        """Something went wrong that is neither an attempt's failure nor a restart."""
        ...

    def gauges(self, requests: int, tokens: int, staging_bytes: int) -> None:
        """What is in flight now."""
        ...

    def root_space(
        self, name: str, free: int, *, room: int | None = None, booked: int = 0, speed: float | None = None, state: str = ""
    ) -> None:
        """A root was looked at: free bytes, those that may still be promised, those that are; bytes per second of a writer.

        `state` is `in_service`, `refusing` (it answers ENOSPC against its own word), `draining` (`hsx move` empties it) or
        `lost`. Not told of a root that is silent.
        """
        ...

    def root_lost(self, name: str, kind: str, message: str) -> None:
        """A root is out of service for the rest of the run."""
        ...

    def root_silent(self, name: str, seconds: float) -> None:
        """A root did not say for `seconds` how much room it has; it gets nothing new until it does."""
        ...

    def root_answered(self, name: str) -> None:
        """A root that was silent answers again."""
        ...

    def intake_paused(self, kind: str, message: str) -> None:
        """No sample is started for want of room (`roots_full`, `staging_full`); `message`: what to free. Told repeatedly."""
        ...

    def intake_resumed(self, kind: str) -> None:
        """There is room again, or nobody waits for it; told also where no pause was."""
        ...


# --- ledger -----------------------------------------------------------------------------------------------------------


class Ledger(Leases, Protocol):
    """The durable record of the job; every method returns after its transaction is durable."""

    async def twins(self, indices: Sequence[int]) -> dict[int, list[int]]:
        """For leased samples: the pending ones with the very same prompt, which are not handed out until `commit` or `fail`.

        Each is named once. Samples without any are left out.
        """
        ...

    async def commit(self, group: Sequence[Commit]) -> None:
        """Marks the samples committed, and those that share their shards, in one transaction.

        Raises RunError `ledger_failed`, also where a sample is committed already.
        """
        ...

    async def fail(self, lease: Lease, marker: Marker, epoch: str, reason: str, evidence: str, *, quarantine: bool) -> None:
        """Records a failed attempt by the sample's own fault, and frees or quarantines the sample.

        With it go those of its twins that are pending: they would be the same request.
        """
        ...

    async def epoch_began(self, record: EpochRecord, ranks: int = 1) -> bool:
        """Records an epoch, and a stream for each of its DP ranks; True where it was known already, and is being continued.

        Raises EngineError `epoch_void` for an epoch that has ended: it is never begun again.
        """
        ...

    async def epoch_ended(self, epoch: str, reason: str, evidence: str, requeued: Sequence[int] = ()) -> None:
        """Records why an epoch was voided, and which samples went back to the queue for it.

        One that is merely left, by a drain or a crash of hsx, has not ended.
        """
        ...

    async def voided_epochs(self) -> dict[str, str]:
        """The epochs that have ended, in this run or an earlier one, with the reason: their servers may not be used again."""
        ...

    async def violation(self, epoch: str, marker: Marker | None, invariant: str, evidence: str) -> None:
        """Records one violation; `marker` is None where it speaks of the whole run."""
        ...

    async def vouch(self, epoch: str, sequence: int) -> None:
        """Every dump of the stream `epoch` up to this capture number lies before a sound canary. It never goes down.

        A stream is what one DP rank captures in an epoch: `hsx.core.epoch.stream_name`.
        """
        ...

    async def doubtful(self, epoch: str) -> list[CommittedRow]:
        """The committed samples of the stream `epoch` that no sound canary vouches for, in the order of their capture."""
        ...

    async def unvouched(self, but: str = "") -> list[str]:
        """The streams, but those of epoch `but`, of which `doubtful` would return something, oldest first."""
        ...

    async def last_doubtful(self, epoch: str, limit: int) -> list[CommittedRow]:
        """The last `limit` of `doubtful`, the latest capture first."""
        ...

    async def doubt(self, epoch: str, invariant: str, evidence: str) -> None:
        """Records that what `doubtful` returns of an epoch's streams has to be revoked: until it is, `overdue` says so."""
        ...

    async def overdue(self) -> list[tuple[str, str, str]]:
        """(stream, invariant, evidence) of each `doubt` that no `revoke` has followed: hsx crashed in between."""
        ...

    async def revoke(self, epoch: str, invariant: str, evidence: str) -> list[CommittedRow]:
        """Takes back, in one transaction, what `doubtful` returns of an epoch's streams, or of one: pending again, and handed
        out again by `acquire`.

        Attempts are kept, so that no marker is used twice. Returns what the ledger said of the samples.
        """
        ...

    async def requeue_damaged(
        self, indices: Iterable[int], invariant: str, evidence: str, *, where: Mapping[int, str] | None = None
    ) -> list[CommittedRow]:
        """Takes back, in one transaction, those of these samples that are committed, as `revoke` does: they are damaged.

        With `where`, the root on which each was found damaged, one that lies on another root by now is left alone. Returns
        what the ledger said of them, in index order.
        """
        ...

    async def backup(self, folders: Mapping[str, Path]) -> dict[str, RunError | None]:
        """Copies the ledger to the folder of the store on each root, by root name.

        Returns, by root name, None, or why there is no new copy on that root: `roots_full`, `root_unusable`, `ledger_failed`.
        """
        ...

    async def remember(self, key: str, value: str) -> None:
        """Records a fact that may change."""
        ...

    async def recall(self, key: str) -> str | None:
        """The fact last recorded under `key`, by `remember` or `fix`; None where there is none."""
        ...

    async def attempts_of(self, index: int, *, hold: bool = False) -> tuple[str, Lease] | None:
        """State of one sample (`pending`, `committed`, `quarantined`) and the lease of its last attempt; None if unknown.

        With `hold`, before the first `acquire`: a pending sample counts as leased until then, or, where it is about to be
        committed with a twin, as `shared`.
        """
        ...

    async def next_canary(self) -> int:
        """A number for a canary's marker, from 1, durably never given twice."""
        ...

    async def fix(self, key: str, value: str) -> str:
        """Records a fact once, such as the server's version, and returns what is recorded: the first value given."""
        ...

    async def counts(self) -> Counts:
        """The job's totals."""
        ...
