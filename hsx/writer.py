"""From validated states to committed samples: per-root writer threads, and the group commit.

The order is the promise. A shard is written and synced under a partial name and renamed (`Root.write`); the folders of a
group's roots are synced; one ledger transaction commits the group; only then is a sample shown in the union view, and only
after that may its caller drop the dump. Samples with the very same prompt are committed with it: their shards are hard links to
that one, made before its folder is synced.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from hsx.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from hsx.ports import Clock, Homes, Ledger, Observer, Root, Samples, View
    from hsx.records import Commit, CommittedRow, Payload, Receipt
    from hsx.space import Booking, Space


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WriterSettings:
    """How shards are written and committed.

    Attributes:
        threads: writer threads per root.
        group_samples: a group is committed at this size, ...
        group_seconds: ... or this long after its first sample, whichever is first.
    """

    threads: int
    group_samples: int
    group_seconds: float


class Writer:
    """Writes shards and commits them in groups. `run` must be running beside its callers.

    Args:
        roots: the disks.
        space: their room; hears of roots that fail, and how fast they are.
        view: the group's union view.
        ledger: where commits are recorded.
        samples: knows the dataset's own ids, for the log.
        observer: hears each committed sample.
        clock: measures how long a shard takes; its `monotonic` is called in threads too.
        settings: see there.
        homes: held while samples become committed and shown; None where nobody moves samples.
        kept: the tokens of a sample that are stored, given its index; None: all.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        space: Space,
        view: View,
        ledger: Ledger,
        samples: Samples,
        observer: Observer,
        clock: Clock,
        settings: WriterSettings,
        homes: Homes | None = None,
        kept: Callable[[int], NDArray[np.int64] | None] = lambda _index: None,
    ) -> None:
        self._kept = kept
        self._homes = homes
        self._roots = {root.name: root for root in roots}
        self._view = view
        self._ledger = ledger
        self._observer = observer
        self._samples = samples
        self._settings = settings
        self._space = space
        self._clock = clock
        self._revoking = asyncio.Lock()
        self._queue: asyncio.Queue[tuple[Commit, asyncio.Future[bool]] | None] = asyncio.Queue()
        self._threads = {name: ThreadPoolExecutor(settings.threads, f"hsx-write-{name}") for name in self._roots}
        self._sync_threads = ThreadPoolExecutor(len(self._roots), "hsx-sync")

    async def write(self, payload: Payload, booking: Booking) -> Receipt | None:
        """Writes one shard on the root where it is booked, and releases the booking: its room is taken now, or is free again.

        Args:
            payload: the sample; its states are read until this returns.
            booking: with a root.

        Returns:
            What was written; None where the root failed, which `hsx.space` was told: another one is to be booked.
        """
        async with self._revoking:
            pass  # a shard that is written before its revoked one is discarded would be discarded instead
        name = booking.root
        try:
            write = asyncio.get_running_loop().run_in_executor(self._threads[name], self._timed, self._roots[name], payload)
            # The thread reads the mapping: a cancelled caller must not drop it before the thread is done.
            receipt, seconds = await _finish(write)
        except RunError as error:
            self._space.failed(name, error, wanted=booking.size)
            return None
        finally:
            self._space.release(booking)
        self._space.wrote(name, receipt.nbytes, seconds)
        return receipt

    def _timed(self, root: Root, payload: Payload) -> tuple[Receipt, float]:
        began = self._clock.monotonic()
        receipt = root.write(payload)
        return receipt, self._clock.monotonic() - began

    async def commit(self, entry: Commit) -> bool:
        """Returns True once the sample is committed, or False where its root was lost before: it must be written again.

        Raises RunError when nothing can be committed any more.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((entry, done))
        return await done

    def read(self, row: CommittedRow) -> tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64] | None]:
        """States, bf16 bits [rows, L, H], of a committed sample, its ids, int32 [tokens], and the tokens that the rows are of,
        int64 [rows], or None for all. Blocks.

        Raises RunError where they cannot be read.
        """
        if row.root not in self._roots:
            raise RunError("root_unusable", f"sample {row.index} lies on root {row.root!r}, which is not in service")
        states, kept = self._roots[row.root].read(row.index, row.tokens, row.captured_as), self._kept(row.index)
        if kept is not None and len(kept) != len(states):
            raise RunError(
                "store_invalid",
                f"the shard of sample {row.index} on root {row.root} has {len(states)} rows; expected {len(kept)}",
            )
        return states, self._samples.input_ids(row.index), kept

    async def revoke(self, rows: Sequence[CommittedRow]) -> None:
        """Takes samples out of the store that the ledger has revoked: hides them first, and then discards their shards.

        On roots that are out of service shards stay; they, and those that a crash leaves, go at the next start.

        Raises RunError `store_unwritable` where one cannot be hidden.
        """
        async with self._revoking:
            work = asyncio.get_running_loop().run_in_executor(self._sync_threads, self._hide, rows)
            for name, error in await _finish(work):
                self._space.failed(name, error)

    async def run(self) -> None:
        """Commits groups until `close`; what was queued before that is still committed."""
        while group := await self._next_group():
            try:
                # Whole, whatever comes: a sample that is committed and not shown would look damaged until the next run.
                lost = await _finish(asyncio.ensure_future(self._commit([entry for entry, _ in group])))
            except RunError as error:
                for _, done in group:
                    if not done.done():
                        done.set_exception(RunError(error.kind, error.message))
                        done.exception()  # its caller may be gone with a cancellation; this one raises in any case
                raise
            for entry, done in group:
                if not done.done():
                    done.set_result(entry.receipt.root not in lost)

    async def close(self) -> None:
        """Lets `run` end after the last group."""
        self._queue.put_nowait(None)

    def shutdown(self) -> None:
        """Ends the threads; waits for what they are writing."""
        for pool in (*self._threads.values(), self._sync_threads):
            pool.shutdown(wait=True, cancel_futures=True)

    async def _next_group(self) -> list[tuple[Commit, asyncio.Future[bool]]]:
        first = await self._queue.get()
        if first is None:
            return []
        group = [first]
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.group_seconds
        while len(group) < self._settings.group_samples:
            try:
                async with asyncio.timeout_at(deadline):
                    entry = await self._queue.get()
            except TimeoutError:
                break
            if entry is None:
                self._queue.put_nowait(None)  # for the next call, which ends the loop
                break
            group.append(entry)
        return group

    async def _commit(self, group: list[Commit]) -> set[str]:
        """Commits a group but for the samples on roots that cannot be synced; returns the names of those roots."""
        loop = asyncio.get_running_loop()
        lost = set()
        twins = await self._ledger.twins([entry.lease.sample.index for entry in group])
        if twins:
            async with self._revoking:
                pass  # as in `write`: one that was revoked a moment ago is pending, and the name of its shard still to go
            group, failed = await loop.run_in_executor(self._sync_threads, self._link, group, twins)
            for name, error in failed:
                self._space.failed(name, error)
                lost.add(name)
        roots = sorted({entry.receipt.root for entry in group} - lost)
        syncs = [loop.run_in_executor(self._sync_threads, self._roots[name].sync) for name in roots]
        for name, outcome in zip(roots, await asyncio.gather(*syncs, return_exceptions=True), strict=True):
            if isinstance(outcome, RunError):
                self._space.failed(name, outcome)
                lost.add(name)
            elif outcome is not None:
                raise outcome
        durable = [entry for entry in group if entry.receipt.root not in lost]
        # A sample that were moved between its commit and `_show` would be shown where it is not, and its new shard discarded.
        give = await loop.run_in_executor(self._sync_threads, self._homes.take) if self._homes else None
        try:
            await self._ledger.commit(durable)  # here, and nowhere else, a sample becomes committed
            for name, error in await loop.run_in_executor(self._sync_threads, self._show, durable):
                self._space.failed(name, error)
        finally:
            if give is not None:
                give()
        for entry in durable:
            index = entry.lease.sample.index
            self._observer.sample_committed(
                index=index,
                marker=entry.marker,
                epoch=entry.epoch,
                sequence=entry.sequence,
                tokens=entry.lease.sample.tokens,
                nbytes=entry.receipt.nbytes,
                root=entry.receipt.root,
                attempt=entry.lease.attempt,
                timings=entry.timings,
                adopted=entry.adopted,
                sample_id=self._samples.sample_id(index),
            )
            for twin in entry.shared:
                self._observer.sample_shared(
                    index=twin,
                    marker=entry.marker,
                    tokens=entry.lease.sample.tokens,
                    nbytes=entry.receipt.nbytes,
                    root=entry.receipt.root,
                    sample_id=self._samples.sample_id(twin),
                )
        return lost

    def _link(self, group: list[Commit], twins: Mapping[int, list[int]]) -> tuple[list[Commit], list[tuple[str, RunError]]]:
        """Links the shards of twins to those of a group; returns the group with those that are, and the roots that failed."""
        failed: dict[str, RunError] = {}
        linked = []
        for entry in group:
            index, name = entry.lease.sample.index, entry.receipt.root
            shared: list[int] = []
            if index in twins and name not in failed:
                try:
                    shared = self._roots[name].link(index, twins[index])
                except RunError as error:
                    failed[name] = error
            linked.append(replace(entry, shared=tuple(shared)))
        return linked, list(failed.items())

    def _show(self, group: list[Commit]) -> list[tuple[str, RunError]]:
        """Shows a group in the view, and removes what a killed writer may have left of its samples on other roots.

        Returns the roots that failed at that; the group is committed all the same.
        """
        failed: dict[str, RunError] = {}
        for entry in group:
            indices = (entry.lease.sample.index, *entry.shared)
            for index in indices:
                self._view.link(index, entry.receipt.root)
            for name in self._roots.keys() - self._space.lost.keys() - failed.keys() - {entry.receipt.root}:
                try:
                    for index in indices:
                        self._roots[name].discard(index)
                except RunError as error:
                    failed[name] = error
        return list(failed.items())

    def _hide(self, rows: Sequence[CommittedRow]) -> list[tuple[str, RunError]]:
        """Hides samples and discards their shards; returns the roots that failed at that."""
        for row in rows:
            self._view.unlink(row.index)
        failed: dict[str, RunError] = {}
        for row in rows:
            if row.root not in self._roots or row.root in self._space.lost or row.root in failed:
                continue
            try:
                self._roots[row.root].discard(row.index)
            except RunError as error:
                failed[row.root] = error
        return list(failed.items())


async def _finish(work: asyncio.Future[T]) -> T:
    """Awaits work to its end, even through a cancellation, which is raised again afterwards."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise
