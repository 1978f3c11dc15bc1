"""Canaries: probe prompts of hsx's own, which prove that the server's states are what they must be. They are never stored.

Two prompts with a shared prefix, the twins, are sent together. Both must pass every invariant of a sample; their states must
part at the very row where their ids part; and the first one's states must be those of the job's first boot.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.dump import dump_bytes
from hsx.core.invariants import INVARIANTS, Evidence, Parting, Violation, fingerprint, judge_answer, judge_dump, twins
from hsx.core.marker import Marker
from hsx.errors import EngineError, SampleError
from hsx.tasks import together
from hsx.violated import CanaryError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from numpy.typing import NDArray

    from hsx.core.invariants import Answer, Content
    from hsx.core.pairing import Outstanding
    from hsx.core.spec import CaptureSpec, ModelShape
    from hsx.epoch import LiveEpoch
    from hsx.ports import Dump, Dumps, EngineClient, Ledger

TOKENS = 48
SHARED = 32
"""Tokens that the twins have in common, of `TOKENS`; for a shorter context, the same share of what it takes."""
MARGIN = 16
"""Tokens by which a server may accept less than the model's context."""


@dataclass(frozen=True, slots=True)
class Canary:
    """Sends canaries to one server after the other.

    Attributes:
        run: the job's 8 hex digits.
        spec: what must be captured.
        shape: the model's facts.
        timeout_s: longest time for the answers to prompts sent together, given their tokens, and then for their dumps.
        tolerance: relative distance of a row that rounding may cause.
        client, dumps, ledger: see `hsx.ports`.
        outstanding: knows the markers under way.
        measure: measures a dump's tensors against the ids asked for.
        distances: relative distance of each row of two states, [tokens, L].
        rounding: relative distance that storing a row adds to that of two runs.
        room: waits until the dump directory has room for so many bytes; raises EngineError `staging_full` where nobody waits.
    """

    run: str
    spec: CaptureSpec
    shape: ModelShape
    timeout_s: Callable[[int], float]
    tolerance: float
    client: EngineClient
    dumps: Dumps
    ledger: Ledger
    outstanding: Outstanding
    measure: Callable[[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int32]], Content]
    distances: Callable[[NDArray[np.uint16], NDArray[np.uint16]], NDArray[np.float32]]
    room: Callable[[int], Awaitable[object]]
    rounding: float = 0.0
    _reference: dict[str, NDArray[np.uint16]] = field(default_factory=dict)

    async def check(self, epoch: LiveEpoch) -> dict[int, int]:
        """Sends the twins to each DP rank and judges them; returns, by rank, the capture number up to which it is vouched for.

        A rank has weights, a cache and a plugin of its own: that another one is sound says nothing of it.

        Raises:
            CanaryError: an invariant does not hold.
            EngineError: `server_start_failed` where a request itself failed, as it does when a server is dying or busy;
                `staging_full`, `staging_gone` and what else the client raises.
        """
        first, second, shared = self.prompts()
        vouched = {}
        for rank in epoch.ranks:
            asked = rank if len(epoch.ranks) > 1 else None
            (one, number), (two, other) = await self._bring(epoch, [first, second], asked)
            await self._compare(one, two, shared, first, asked)
            vouched[rank] = min(number, other)
        return vouched

    async def agrees(
        self, epoch: LiveEpoch, ids: NDArray[np.int32], stored: NDArray[np.uint16], kept: NDArray[np.int64] | None = None
    ) -> Violation | None:
        """Has a prompt extracted again, and compares it with what is stored of it: None where they agree.

        Args:
            epoch: a server whose own canary is sound.
            ids: int32 [tokens].
            stored: bf16 bits, [rows, L, H].
            kept: int64 [rows], the tokens that the rows are of; None: all.

        Raises as `check`.
        """
        ((states, _),) = await self._bring(epoch, [ids])
        # A sample may have half a gigabyte of states: not on the event loop.
        wanted = states if kept is None else await asyncio.to_thread(np.take, states, kept, 0)
        tolerance = self.tolerance + self.rounding
        return fingerprint(await asyncio.to_thread(self._beyond, stored, wanted, tolerance), tolerance)

    async def _bring(
        self, epoch: LiveEpoch, prompts: list[NDArray[np.int32]], rank: int | None = None
    ) -> list[tuple[NDArray[np.uint16], int]]:
        """Sends prompts at once, judges what comes back by every invariant of a sample: copies of the states, and numbers.

        They go to DP rank `rank`, or, with None, wherever the server sends them.
        """
        await self.room(sum(dump_bytes(self.spec, self.shape.hidden_size, len(ids)) for ids in prompts))
        timeout_s = self.timeout_s(sum(len(ids) for ids in prompts))
        probes = [Probe(await self._marker(len(ids)), ids, timeout_s, rank) for ids in prompts]
        floor = epoch.counter.reached
        for probe in probes:
            self.outstanding.add(probe.marker)
        try:
            for step in (self._ask, self._pair):
                await together([step(probe) for probe in probes])
            for probe in probes:
                await self._judge(epoch, probe, floor)
            dumps = [(probe.dump, probe.sequence) for probe in probes if probe.dump is not None]
            return [(await asyncio.to_thread(np.array, dump.states), sequence) for dump, sequence in dumps]
        finally:
            for probe in probes:
                self.outstanding.settle(probe.marker)  # what it leaves, or brings yet, is swept
            await asyncio.to_thread(self._discard, epoch, probes)

    def _beyond(self, found: NDArray[np.uint16], wanted: NDArray[np.uint16], tolerance: float) -> tuple[float, ...]:
        """For each state, the share of its rows that lie further apart than the tolerance."""
        return tuple(float(share) for share in np.mean(self.distances(found, wanted) > tolerance, axis=0))

    def prompts(self) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
        """The twins' ids, int32, spread over the vocabulary, and how many of them they share."""
        vocabulary = self.shape.vocab_size
        tokens = max(2, min(TOKENS, self.shape.context_length - MARGIN))
        shared = max(1, tokens * SHARED // TOKENS)
        first = ((np.arange(tokens) * max(1, vocabulary // (tokens + 1)) + 1) % vocabulary).astype(np.int32)
        second = first.copy()
        second[shared:] = (first[shared:] + max(1, vocabulary // 2)) % vocabulary
        return first, second, shared

    async def _marker(self, tokens: int) -> Marker:
        return Marker(self.run, await self.ledger.next_canary(), 1, tokens, canary=True)

    async def _ask(self, probe: Probe) -> None:
        try:
            probe.answer = await self.client.prefill(probe.marker, probe.ids, probe.timeout_s, probe.rank)
        except SampleError as error:
            raise EngineError("server_start_failed", f"the canary {probe.marker} failed: {error.message}") from error

    async def _pair(self, probe: Probe) -> None:
        marker = probe.marker
        try:
            try:
                async with asyncio.timeout(probe.timeout_s):
                    await self.dumps.arrival(marker)
            except TimeoutError:
                # Where hsx itself stood still, the deadline passed before anybody looked: the file's existence is the truth.
                if str(marker) not in self.dumps.names():
                    evidence = f"{marker} was answered and brought no dump in {probe.timeout_s:.0f} s"
                    raise CanaryError("capture_off", Violation("published", evidence)) from None
            probe.dump = self.dumps.open(marker)
        except SampleError as error:
            raise CanaryError("capture_off", Violation("published", f"{marker}: {error.message}")) from error

    async def _judge(self, epoch: LiveEpoch, probe: Probe, floor: Mapping[int, int]) -> None:
        dump, answer, marker = probe.dump, probe.answer, probe.marker
        if dump is None or answer is None:
            raise RuntimeError("a canary is judged before it came back")
        probe.sequence, served = dump.header.sequence, dump.header.rank
        content = await asyncio.to_thread(self.measure, dump.states, dump.input_ids, probe.ids)
        evidence = Evidence(marker, epoch.id, self.spec, self.shape.hidden_size, dump.header, content)
        violation = (
            judge_answer(marker, answer)
            or judge_dump(evidence)
            or epoch.counter.note(served, probe.sequence, marker, floor)
            or _elsewhere(probe.rank, served)
        )
        if violation is not None:
            # Another start does not mend a capture that is of other rows; what is in them, or a counter, it may.
            mendable = violation.invariant == "sequence" or INVARIANTS[violation.invariant].group == "content"
            kind = "canary_failed" if mendable else "capture_off"
            raise CanaryError(kind, Violation(violation.invariant, f"{marker}: {violation.evidence}"))

    async def _compare(
        self, one: NDArray[np.uint16], two: NDArray[np.uint16], shared: int, ids: NDArray[np.int32], rank: int | None
    ) -> None:
        apart = self.distances(one, two)
        partings = tuple(
            Parting(
                shared_beyond=float(np.mean(apart[:shared, state] > self.tolerance)),
                last_shared=float(apart[shared - 1, state]),
                first_own=float(apart[shared, state]),
            )
            for state in range(apart.shape[1])
        )
        violation = twins(partings, self.tolerance)
        if violation is None:  # only states that passed may become what later ones are compared with
            wanted = await self._first_boot(one, ids)
            violation = fingerprint(self._beyond(one, wanted, self.tolerance), self.tolerance)
        if violation is not None:
            evidence = violation.evidence if rank is None else f"DP rank {rank}: {violation.evidence}"
            raise CanaryError("canary_failed", Violation(violation.invariant, evidence))

    async def _first_boot(self, states: NDArray[np.uint16], ids: NDArray[np.int32]) -> NDArray[np.uint16]:
        """The recorded states of these ids; `states` themselves where there are none yet, which are recorded then."""
        key = f"fingerprint-{hashlib.sha256(ids.tobytes()).hexdigest()[:16]}"
        if key not in self._reference:
            # In the ledger and not in a file of its own: what is compared with may not get lost, nor be another job's.
            recorded = await self.ledger.fix(key, base64.b85encode(states.tobytes()).decode())
            self._reference[key] = np.frombuffer(base64.b85decode(recorded), dtype=np.uint16).reshape(states.shape)
        return self._reference[key]

    def _discard(self, epoch: LiveEpoch, probes: list[Probe]) -> None:
        for probe in probes:
            if probe.dump is not None:
                probe.dump.close()
            if epoch.counter.knows(probe.marker):  # the sweeper notes the numbers of others, before their files go
                self.dumps.remove(probe.marker)


def _elsewhere(asked: int | None, served: int) -> Violation | None:
    if asked is None or asked == served:
        return None
    return Violation(
        "expected", f"it was sent to DP rank {asked}, and rank {served} captured it: a rank cannot be put to the test"
    )


@dataclass(slots=True)
class Probe:
    """One prompt of a canary under way.

    Attributes:
        marker: its marker.
        ids: int32 [tokens].
        timeout_s: longest time for its answer, and then for its dump.
        rank: the DP rank that it is sent to; None leaves the choice to the server.
        answer: the server's answer, once there is one.
        dump: its dump, once it came; closed when its states were taken.
        sequence: its capture number, once it was judged.
    """

    marker: Marker
    ids: NDArray[np.int32]
    timeout_s: float
    rank: int | None = None
    answer: Answer | None = None
    dump: Dump | None = None
    sequence: int = 0
