"""The boot gate: what must be true of a server before it is asked for the first sample.

SGLang only logs a plugin that failed and starts without it, silently loses layers under pipeline parallelism, and shifts
rows when its prefix cache is on; so nothing is believed that was not asked for or seen.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hsx.core.epoch import report_name, state_name
from hsx.errors import EngineError, RunError

if TYPE_CHECKING:
    from hsx.canary import Canary
    from hsx.core.epoch import CaptureReport, EpochRecord
    from hsx.core.spec import CaptureSpec, ModelShape
    from hsx.epoch import LiveEpoch
    from hsx.ports import Clock, Dumps, EngineClient, Ledger
    from hsx.records import ServerFacts

ELSEWHERE = (
    "its process runs on another node, whose dump directory is another one, or its hooks failed; run one server and one hsx on "
    "each node, or share the dump directory"
)
REPORT_DEADLINE_S = 30.0
"""The plugin reports when the model is loaded, before the HTTP port answers; the deadline only forgives a slow disk."""
QUESTIONS = 3
"""How often a server is asked for its settings before it counts as gone."""
PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Gate:
    """Judges one server.

    Attributes:
        spec: what must be captured.
        shape: the model's facts, from its config.
        longest: tokens of the longest sample.
        canary: proves that capture is on, and right.
        client, dumps, ledger, clock: see `hsx.ports`.
    """

    spec: CaptureSpec
    shape: ModelShape
    longest: int
    canary: Canary
    client: EngineClient
    dumps: Dumps
    ledger: Ledger
    clock: Clock

    async def check(self, epoch: LiveEpoch) -> CaptureReport:
        """Passes a fit server.

        Raises:
            EngineError: `server_refused` or `capture_off`, naming what to change; `server_gone` where it went away meanwhile;
                and what `Canary.check` raises.
            RunError: `job_changed` where the server's version is not the one that the job was started with.
        """
        record = epoch.record
        facts = await self._facts()
        if facts.problems:
            raise EngineError("server_refused", "the server cannot be used: " + "; ".join(facts.problems))
        report = await self._report(0)
        self._check_report(record, report)
        if facts.dp_size != report.dp_size:
            raise EngineError(
                "capture_off",
                f"the capture report knows {report.dp_size} DP ranks; the server says that it has {facts.dp_size}",
            )
        await self._check_ranks(epoch, report)
        self._check_limits(facts, report)
        version = f"{record.engine} {facts.engine_version}"
        recorded = await self.ledger.fix("engine", version)
        if recorded != version:
            raise RunError("job_changed", f"engine: the job was started with {recorded!r}, now it is {version!r}")
        epoch.vouched = await self.canary.check(epoch)
        return report

    async def _facts(self) -> ServerFacts:
        """A server that has just come up asks its scheduler for them: one late answer is not worth loading a model again."""
        for _ in range(QUESTIONS - 1):
            try:
                return await self.client.facts()
            except EngineError as error:
                if error.kind != "server_gone":
                    raise
            await self.clock.sleep(PAUSE_S)
        return await self.client.facts()

    async def _check_ranks(self, epoch: LiveEpoch, report: CaptureReport) -> None:
        """Every DP rank captures the same, here, and keeps its account."""
        for rank in range(1, report.dp_size):
            other = await self._report(rank)
            if replace(other, rank=report.rank, norm_file=report.norm_file) != report or other.rank != rank:
                raise EngineError("capture_off", f"DP rank {rank} reports {other}; expected what rank 0 reports: {report}")
        if report.dp_size > 1 and epoch.ranks != list(range(report.dp_size)):
            missing = sorted(set(range(report.dp_size)) - set(epoch.ranks))
            raise EngineError(
                "capture_off",
                f"there is {' and '.join(state_name(rank) for rank in epoch.ranks)} for {report.dp_size} DP ranks; those of "
                f"ranks {missing} are not in this dump directory: {ELSEWHERE}",
            )

    async def _report(self, rank: int) -> CaptureReport:
        try:
            async with asyncio.timeout(REPORT_DEADLINE_S):
                while (report := self.dumps.report(rank)) is None:
                    await self.clock.sleep(0.05)
        except TimeoutError:
            report = self.dumps.report(rank)  # hsx itself may have been stopped, and has not looked for long
        if report is None and rank:
            raise EngineError(
                "capture_off",
                f"DP rank {rank} of the server wrote no {report_name(rank)} into this dump directory: {ELSEWHERE}",
            )
        if report is None:
            raise EngineError(
                "capture_off",
                "the capture plugin wrote no report: hsx is not installed in the server's environment, or its hooks failed; "
                "see the server's log for lines with 'hsx'",
            )
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
