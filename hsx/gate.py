"""The boot gate: what must be true of a server before it is asked for the first sample.

SGLang only logs a plugin that failed and starts without it, silently loses layers under pipeline parallelism, and shifts
rows when its prefix cache is on; so nothing is believed that was not asked for or seen.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hsx.core.invariants import Evidence, judge_answer, judge_dump
from hsx.core.marker import Marker
from hsx.errors import EngineError, RunError, SampleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from hsx.core.epoch import CaptureReport, EpochRecord
    from hsx.core.invariants import Answer, Content
    from hsx.core.spec import CaptureSpec, ModelShape
    from hsx.ports import Clock, Dump, Dumps, EngineClient, Ledger, ServerFacts

CANARY_TOKENS = 24
REPORT_DEADLINE_S = 30.0
"""The plugin reports when the model is loaded, before the HTTP port answers; the deadline only forgives a slow disk."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Judges one server.

    Attributes:
        run: the job's 8 hex digits.
        spec: what must be captured.
        shape: the model's facts, from its config.
        longest: tokens of the longest sample.
        canary_timeout_s: longest time for the canary's answer, and then for its dump.
        client, dumps, ledger, clock: see `hsx.ports`.
        measure: measures a dump's tensors against the ids asked for.
    """

    run: str
    spec: CaptureSpec
    shape: ModelShape
    longest: int
    canary_timeout_s: float
    client: EngineClient
    dumps: Dumps
    ledger: Ledger
    clock: Clock
    measure: Callable[[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int32]], Content]

    async def check(self, record: EpochRecord) -> CaptureReport:
        """Passes a fit server.

        Raises:
            EngineError: `server_refused` or `capture_off`, naming what to change; `server_gone` where it went away meanwhile;
                and what `canary` raises.
            RunError: `job_changed` where the server's version is not the one that the job was started with.
        """
        facts = await self.client.facts()
        if facts.problems:
            raise EngineError("server_refused", "the server cannot be used: " + "; ".join(facts.problems))
        report = await self._report()
        self._check_report(record, report)
        self._check_limits(facts, report)
        version = f"{record.engine} {facts.engine_version}"
        recorded = await self.ledger.fix("engine", version)
        if recorded != version:
            raise RunError("job_changed", f"engine: the job was started with {recorded!r}, now it is {version!r}")
        await self.canary(record)
        return report

    async def _report(self) -> CaptureReport:
        try:
            async with asyncio.timeout(REPORT_DEADLINE_S):
                while (report := self.dumps.report()) is None:
                    await self.clock.sleep(0.05)
        except TimeoutError:
            raise EngineError(
                "capture_off",
                "the capture plugin wrote no report: hsx is not installed in the server's environment, or its hooks failed; "
                "see the server's log for lines with 'hsx'",
            ) from None
        return report

    def _check_report(self, record: EpochRecord, report: CaptureReport) -> None:
        if report.epoch != record.epoch:
            raise EngineError("capture_off", f"the capture report is of epoch {report.epoch}; expected {record.epoch}")
        if report.spec != self.spec:
            raise EngineError(
                "capture_off", f"the server captures {report.spec.names}; expected {self.spec.names}: restart it with this job"
            )
        found = (report.hidden_size, report.model_layers, report.vocab_size)
        wanted = (self.shape.hidden_size, self.shape.layers, self.shape.vocab_size)
        if found != wanted:
            raise EngineError(
                "server_refused", f"the server's model has (width, layers, vocabulary) {found}; expected {wanted}: --model-path"
            )

    def _check_limits(self, facts: ServerFacts, report: CaptureReport) -> None:
        if facts.vocab_size is not None and facts.vocab_size < report.vocab_size:
            raise EngineError("server_refused", f"the server's vocabulary is {facts.vocab_size}; expected {report.vocab_size}")
        if facts.max_prompt_tokens < self.longest:
            raise EngineError(
                "server_refused",
                f"the server accepts prompts of at most {facts.max_prompt_tokens} tokens; the longest sample has "
                f"{self.longest}: raise --context-length or --max-total-tokens, or lower dataset.max_tokens",
            )

    async def canary(self, record: EpochRecord) -> None:
        """One probe prompt, there and back: proves that capture is on and that a sound dump comes back under its marker.

        Raises:
            EngineError: `server_start_failed` where the request itself failed, as it does when a server is dying or busy;
                `capture_off` where it was answered and the dump is missing or not the canary's; `staging_full`.
        """
        tokens = min(CANARY_TOKENS, self.longest)
        ids = np.arange(tokens, dtype=np.int32) * (self.shape.vocab_size // (tokens + 1)) + 1
        marker = Marker(self.run, await self.ledger.next_canary(), 1, tokens, canary=True)
        try:
            answer = await self._asked(marker, ids)
            dump = await self._paired(marker)
            try:
                content = await asyncio.to_thread(self.measure, dump.states, dump.input_ids, ids)
                evidence = Evidence(marker, record.epoch, self.spec, self.shape.hidden_size, dump.header, content)
                violation = judge_answer(marker, answer) or judge_dump(evidence)
            finally:
                dump.close()
        finally:
            self.dumps.remove(marker)
        if violation is not None:
            raise EngineError("capture_off", f"the canary {marker} violates {violation.invariant}: {violation.evidence}")

    async def _asked(self, marker: Marker, ids: NDArray[np.int32]) -> Answer:
        try:
            return await self.client.prefill(marker, ids, self.canary_timeout_s)
        except SampleError as error:
            raise EngineError("server_start_failed", f"the canary {marker} failed: {error.message}") from error

    async def _paired(self, marker: Marker) -> Dump:
        try:
            async with asyncio.timeout(self.canary_timeout_s):
                await self.dumps.arrival(marker)
            return self.dumps.open(marker)
        except TimeoutError:
            message = f"the canary {marker} was answered and brought no dump in {self.canary_timeout_s:.0f} s"
            raise EngineError("capture_off", message) from None
        except SampleError as error:
            raise EngineError("capture_off", f"the canary {marker} failed: {error.message}") from error
