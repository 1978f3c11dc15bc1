"""What hsx relies on in a server, as tests: the real SGLang and the reference engine pass the same suite.

A test module subclasses `EngineContract` and gives it a fixture `served` with a running server. Every state that the suite
looks at is compared with `reference_states` of the same weights, so a model must be one that the reference engine can load.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import aiohttp
import numpy as np
import pytest

from hsx.core.dump import PART_SUFFIX, SUFFIX, DumpHeader, decode_header
from hsx.core.epoch import REPORT_NAME, CaptureReport, report_from_json, report_name, state_from_json, state_name
from hsx.core.marker import Marker
from hsx.errors import SampleError
from hsx.testing.reference_model import ReferenceModel, reference_states

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from numpy.typing import NDArray

    from hsx.engines.sglang import SGLangClient
    from hsx.testing.servers import RunningServer

RUN: Final = "c0117ac7"
PATIENCE_S: Final = 300.0
ROUNDS: Final = 10
"""Tries to meet a prompt in flight: a server that cannot be told to hold it may be done before a busy test has looked."""
TOLERANCE: Final = 2.0**-8 + 1e-4
"""Relative error per token: the rounding to bf16, and float32 arithmetic in another order."""
_attempts = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server under test.

    Attributes:
        server: the process, its record and its folder.
        model: the model it serves, loaded once more.
        chunk: its tokens per prefill step.
    """

    server: RunningServer
    model: ReferenceModel
    chunk: int

    @property
    def report(self) -> CaptureReport:
        """The capture report in the epoch's folder."""
        return report_from_json((self.server.folder / REPORT_NAME).read_text())

    def prompt(self, tokens: int, seed: int = 0) -> tuple[Marker, NDArray[np.int32]]:
        """A fresh marker and random ids, int32 [tokens]. Prompts of one seed are prefixes of each other."""
        marker = Marker(RUN, seed, next(_attempts), tokens)
        return marker, np.random.default_rng(seed).integers(0, self.model.config.vocab_size, tokens).astype(np.int32)

    def names(self) -> set[str]:
        """Names of the published dumps."""
        return {path.name.removesuffix(SUFFIX) for path in self.server.folder.glob(f"*{SUFFIX}")}

    async def dump(self, marker: Marker) -> tuple[DumpHeader, NDArray[np.float32], NDArray[np.int32]]:
        """Waits for the dump of `marker`: its header, states float32 [tokens, L, H] and ids int32 [tokens]."""
        path = self.server.folder / f"{marker}{SUFFIX}"
        async with asyncio.timeout(PATIENCE_S):
            while not path.exists():  # noqa: ASYNC110 - the file is the event; tests can afford to poll
                await asyncio.sleep(0.01)
        raw = path.read_bytes()
        header, start = decode_header(raw, len(raw))
        bits = np.frombuffer(raw, "<u2", header.states_bytes // 2, start)
        states = (bits.astype(np.uint32) << 16).view(np.float32).reshape(header.tokens, header.spec.states, header.hidden_size)
        return header, states, np.frombuffer(raw, "<i4", header.tokens, start + header.states_bytes)

    async def check(self, marker: Marker, ids: NDArray[np.int32]) -> DumpHeader:
        """Waits for the dump of `marker` and holds it against the truth about `ids`; returns its header."""
        header, states, found = await self.dump(marker)
        assert header.marker == marker
        np.testing.assert_array_equal(found, ids)
        truth = reference_states(self.model, ids, header.spec)
        error = np.linalg.norm(states - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
        assert error.max() <= TOLERANCE, f"token, state {np.unravel_index(error.argmax(), error.shape)}: {error.max():.2e}"
        return header


class EngineContract:
    """The suite. Subclasses provide the fixture `served`, and `held` where they can hold a prompt for certain."""

    @pytest.fixture
    async def client(self, served: Served) -> AsyncIterator[SGLangClient]:
        """A client of the server under test."""
        client = served.server.client()
        yield client
        await client.close()

    @asynccontextmanager
    async def held(self, served: Served, marker: Marker) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Keeps the prompt of `marker` unfinished while the body runs; gives a function that waits until it is being prefilled.

        A server that cannot be told to hold a prompt is given one of many chunks, and its partial dump is the sign that it has
        begun: the rest of the prompt is the time that the body has. It may be whole before anybody looks.
        """
        files = [served.server.folder / f"{marker}{suffix}" for suffix in (PART_SUFFIX, SUFFIX)]

        async def begun() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not any(file.exists() for file in files):  # noqa: ASYNC110 - the files are the event; tests may poll
                    await asyncio.sleep(0.002)

        yield begun

    def long_prompt(self, served: Served) -> tuple[Marker, NDArray[np.int32]]:
        """A prompt of many chunks, to be held."""
        return served.prompt(self.long_tokens(served), seed=99)

    def long_tokens(self, served: Served) -> int:
        """Length of `long_prompt`; by default about the model's context."""
        return served.model.config.max_position_embeddings - 8

    async def test_facts(self, served: Served, client: SGLangClient) -> None:
        """A fit server has no problems, and says who it is."""
        assert await client.answers()
        facts = await client.facts()
        assert facts.problems == ()
        assert facts.model == served.server.record.model
        assert facts.engine_version == served.server.record.engine_version
        assert 0 < facts.max_prompt_tokens < served.model.config.max_position_embeddings

    def test_report(self, served: Served) -> None:
        """The capture report repeats the record's spec and knows the model."""
        report, record, config = served.report, served.server.record, served.model.config
        assert (report.epoch, report.layers, report.final) == (record.epoch, record.layers, record.final)
        assert (report.hidden_size, report.model_layers) == (config.hidden_size, config.num_hidden_layers)
        assert report.vocab_size == config.vocab_size
        assert report.norm_eps == pytest.approx(config.rms_norm_eps)
        weight = np.fromfile(served.server.folder / report.norm_file, dtype="<f4")
        np.testing.assert_allclose(weight, served.model.norm.numpy(), rtol=1e-6)

    async def test_counts(self, served: Served, client: SGLangClient) -> None:
        """The answer counts the prompt, and nothing cached or retracted."""
        marker, ids = served.prompt(17)
        answer = await client.prefill(marker, ids, PATIENCE_S)
        assert (answer.prompt_tokens, answer.cached_tokens, answer.retractions) == (17, 0, 0)
        assert answer.finish_reason != "abort"

    @pytest.mark.parametrize("tokens", [1, 2, 17])
    async def test_dump(self, served: Served, client: SGLangClient, tokens: int) -> None:
        """The dump appears under the marker, with its ids, its shape and the true states."""
        marker, ids = served.prompt(tokens)
        await client.prefill(marker, ids, PATIENCE_S)
        header = await served.check(marker, ids)
        assert header.epoch == served.server.record.epoch
        assert header.spec == served.report.spec
        assert header.hidden_size == served.model.config.hidden_size

    async def test_same_prompt_twice(self, served: Served, client: SGLangClient) -> None:
        """A prompt seen before is prefilled again, whole."""
        for _ in range(2):
            marker, ids = served.prompt(40, seed=7)
            answer = await client.prefill(marker, ids, PATIENCE_S)
            assert answer.cached_tokens == 0
            await served.check(marker, ids)

    async def test_chunked_prompt_is_one_dump(self, served: Served, client: SGLangClient) -> None:
        """A prompt of several chunks gives one whole dump."""
        marker, ids = served.prompt(3 * served.chunk + 5, seed=1)
        await client.prefill(marker, ids, PATIENCE_S)
        await served.check(marker, ids)
        assert [name for name in served.names() if name == str(marker)] == [str(marker)]

    async def test_concurrent_prompts_keep_their_own(self, served: Served, client: SGLangClient) -> None:
        """Prompts of all lengths, some prefixes of others, share batches and keep their rows."""
        lengths = [1, 2, 5, served.chunk - 1, served.chunk, served.chunk + 1, 2 * served.chunk + 9, 30, 30, 31, 64, 3]
        prompts = [served.prompt(tokens, seed=index % 4) for index, tokens in enumerate(lengths)]
        await asyncio.gather(*(client.prefill(marker, ids, PATIENCE_S) for marker, ids in prompts))
        headers = [await served.check(marker, ids) for marker, ids in prompts]
        assert len({(header.rank, header.sequence) for header in headers}) == len(headers)
        # Who names no rank goes wherever there is room.
        assert {header.rank for header in headers} == set(range(served.report.dp_size))

    async def test_sequence_rises(self, served: Served, client: SGLangClient) -> None:
        """A prompt goes to the data-parallel rank that it names, and each rank gives sequences one after the other."""
        ranks = (await client.facts()).dp_size
        assert ranks == served.report.dp_size
        given: dict[int, list[int]] = {}
        for _ in range(3):
            for rank in range(ranks):
                marker, ids = served.prompt(4)
                await client.prefill(marker, ids, PATIENCE_S, rank)
                header = await served.check(marker, ids)
                assert header.rank == rank
                given.setdefault(rank, []).append(header.sequence)
        assert all(numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2] for numbers in given.values())

    async def test_rank_that_is_not_there_is_refused(self, served: Served, client: SGLangClient) -> None:
        """A prompt for a rank beyond the last one is prefilled by nobody."""
        ranks = served.report.dp_size
        with pytest.raises(SampleError, match=rf"routed_dp_rank={ranks} out of range \[0, {ranks}\)") as caught:
            await client.prefill(*served.prompt(4), PATIENCE_S, ranks)
        assert caught.value.kind == "request_refused"

    async def test_each_rank_counts_its_own(self, served: Served, client: SGLangClient) -> None:
        """Each data-parallel rank has a report and a state file of its own, alike but for its number."""
        folder, ranks = served.server.folder, served.report.dp_size
        reports = [report_from_json((folder / report_name(rank)).read_text()) for rank in range(ranks)]
        assert [report.rank for report in reports] == list(range(ranks))
        for rank in range(ranks):
            marker, ids = served.prompt(4)
            await client.prefill(marker, ids, PATIENCE_S, rank)
            sequence = (await served.check(marker, ids)).sequence
            async with asyncio.timeout(PATIENCE_S):
                # It is saved after the dump that it counts.
                state = state_from_json((folder / state_name(rank)).read_text())
                while state.sequence < sequence:
                    await asyncio.sleep(0.01)
                    state = state_from_json((folder / state_name(rank)).read_text())
            assert (state.rank, state.sequence, state.published) == (rank, sequence, sequence)

    async def test_empty_is_refused(self, served: Served, client: SGLangClient) -> None:
        """No ids, no prefill."""
        with pytest.raises(SampleError) as caught:
            await client.prefill(served.prompt(1)[0], [], PATIENCE_S)
        assert caught.value.kind == "request_refused"

    async def test_longest_is_accepted(self, served: Served, client: SGLangClient) -> None:
        """A prompt as long as the facts say is prefilled whole; one token more is refused."""
        facts = await client.facts()
        marker, ids = served.prompt(facts.max_prompt_tokens, seed=2)
        answer = await client.prefill(marker, ids, PATIENCE_S)
        assert answer.prompt_tokens == facts.max_prompt_tokens
        await served.check(marker, ids)
        marker, ids = served.prompt(facts.max_prompt_tokens + 1, seed=2)
        with pytest.raises(SampleError) as caught:
            await client.prefill(marker, ids, PATIENCE_S)
        assert caught.value.kind == "request_refused"

    async def test_duplicate_is_told_apart(self, served: Served, client: SGLangClient) -> None:
        """A marker in flight cannot be used again, and the one in flight is not harmed."""
        for _ in range(ROUNDS):
            marker, ids = self.long_prompt(served)
            error = None
            async with self.held(served, marker) as begun:
                first = asyncio.create_task(client.prefill(marker, ids, PATIENCE_S))
                await begun()
                try:
                    await client.prefill(marker, ids, PATIENCE_S)
                except SampleError as refused:
                    error = refused
            await first
            if error is not None:
                assert error.kind == "request_duplicate"
                await served.check(marker, ids)
                return
        pytest.fail(f"in {ROUNDS} rounds no prompt was in flight when its marker was used again")

    async def test_foreign_request_leaves_no_dump(self, served: Served, client: SGLangClient) -> None:
        """A rid that is no marker is served and not captured."""
        before, record = served.names(), served.server.record
        body = {"rid": "somebody-else", "input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 0}}
        url = f"http://{record.host}:{record.port}/generate"
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            assert response.status == 200
        marker, ids = served.prompt(4)
        await client.prefill(marker, ids, PATIENCE_S)
        await served.check(marker, ids)
        assert served.names() == before | {str(marker)}

    async def test_aborted_prompt_leaves_no_dump(self, served: Served, client: SGLangClient) -> None:
        """An aborted prompt ends at once, as aborted or failed, and there is no dump of it."""
        for _ in range(ROUNDS):
            marker, ids = self.long_prompt(served)
            async with self.held(served, marker) as begun:
                task = asyncio.create_task(client.prefill(marker, ids, PATIENCE_S))
                await begun()
                await client.abort(marker)
                try:
                    finish = (await task).finish_reason
                except SampleError as error:
                    finish = error.kind
            if finish in {"abort", "request_failed"}:
                break
        else:
            pytest.fail(f"in {ROUNDS} rounds no prompt was aborted; the last ended by {finish}")
        after, ids = served.prompt(4)
        await client.prefill(after, ids, PATIENCE_S)
        await served.check(after, ids)
        assert str(marker) not in served.names()

    async def test_marker_is_free_after_a_disconnect(self, served: Served, client: SGLangClient) -> None:
        """A client that goes away frees its marker, after some seconds; what comes next under it is whole."""
        marker, ids = self.long_prompt(served)
        async with self.held(served, marker) as begun:
            task = asyncio.create_task(client.prefill(marker, ids, PATIENCE_S))
            await begun()
            task.cancel()
            await asyncio.wait([task])
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await client.prefill(marker, ids, PATIENCE_S)
                except SampleError as error:
                    if error.kind != "request_duplicate":
                        raise
                    await asyncio.sleep(0.2)
                else:
                    break
        await served.check(marker, ids)
