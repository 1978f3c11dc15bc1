"""The reference engine passes the contract, and what it alone promises holds."""

from __future__ import annotations

import asyncio
import functools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from hsx.errors import EngineError, SampleError
from hsx.testing.engine_contract import PATIENCE_S, EngineContract, Served
from hsx.testing.reference_model import ReferenceModel
from hsx.testing.servers import RunningServer, reference_server, running_reference, tiny_config

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from hsx.core.marker import Marker
    from hsx.core.spec import FinalState

CHUNK = 48


async def _struck(server: RunningServer, kind: str, before: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await server.struck()).get(kind, 0) <= before:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module", params=[("post_norm", 1), ("pre_norm", 2)], ids=str)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One engine for the whole suite: for each kind of final state, and without and with data-parallel ranks."""
    final: FinalState
    final, ranks = request.param
    folder = tmp_path_factory.mktemp("reference")
    model = tiny_config(folder / "model", max_position_embeddings=256, num_attention_heads=4, num_key_value_heads=2)
    with running_reference(
        folder / "dumps", (1, 2, 3), final, model=model, chunk=CHUNK, args=["--dp-size", str(ranks)]
    ) as server:
        yield Served(server, ReferenceModel(model), CHUNK)


class TestReferenceContract(EngineContract):
    """The shared suite, with both kinds of final state."""

    @asynccontextmanager
    async def held(self, served: Served, marker: Marker) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        """Holds it by a fault."""
        before = (await served.server.struck()).get("hold", 0)
        await served.server.fault("hold", count=-1, match=str(marker))
        yield functools.partial(_struck, served.server, "hold", before)
        await served.server.clear_faults()


@pytest.mark.slow
async def test_radix_cache_is_a_problem_and_loses_dumps(tmp_path: Path) -> None:
    """A prefix cache is reported by the facts; a repeated prompt is then cached and has no dump."""
    async with reference_server(tmp_path / "dumps", args=["--radix-cache"]) as server:
        served = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128)
        client = server.client()
        facts = await client.facts()
        assert len(facts.problems) == 1
        assert "--disable-radix-cache" in facts.problems[0]
        (first, ids), (second, _) = served.prompt(9), served.prompt(9)
        assert (await client.prefill(first, ids, PATIENCE_S)).cached_tokens == 0
        assert (await client.prefill(second, ids, PATIENCE_S)).cached_tokens == 8
        await served.check(first, ids)
        assert served.names() == {str(first)}
        await client.close()


@pytest.mark.slow
@pytest.mark.parametrize("bad_id", [512, -1, 1 << 40])
async def test_id_outside_the_table_kills_the_server(tmp_path: Path, bad_id: int) -> None:
    """As in SGLang, one such id is the end of the process; the client sees a lost connection, then nobody."""
    async with reference_server(tmp_path / "dumps") as server:
        served = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128)
        client = server.client()
        marker, ids = served.prompt(4)
        with pytest.raises(SampleError) as lost:
            await client.prefill(marker, [*ids.tolist()[:3], bad_id], PATIENCE_S)
        assert lost.value.kind == "request_failed"
        assert server.process.wait(PATIENCE_S) != 0
        assert not await client.answers()
        with pytest.raises(EngineError) as gone:
            await client.prefill(marker, ids, PATIENCE_S)
        assert gone.value.kind == "server_gone"
        await client.close()


async def test_id_in_the_padding_gives_garbage(served: Served) -> None:
    """Ids between the vocabulary and its padding are answered as if they were right."""
    client, (marker, _) = served.server.client(), served.prompt(2)
    assert (await client.prefill(marker, [3, 511], PATIENCE_S)).prompt_tokens == 2
    assert (await served.dump(marker))[2].tolist() == [3, 511]
    await client.close()


@pytest.mark.slow
async def test_full_queue(tmp_path: Path) -> None:
    """Prompts beyond the queue's limit are turned away, the others are served."""
    async with reference_server(tmp_path / "dumps", args=["--max-queued-requests", "2"]) as server:
        served = Served(server, ReferenceModel(tmp_path / "tiny-model"), 128)
        client = server.client()
        prompts = [served.prompt(200, seed) for seed in range(4)]
        await server.fault("hold", count=-1)
        first = asyncio.create_task(client.prefill(*prompts[0], PATIENCE_S))
        await _struck(server, "hold", 0)
        rest = [asyncio.create_task(client.prefill(marker, ids, PATIENCE_S)) for marker, ids in prompts[1:]]
        done, waiting = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in done]
        assert [getattr(error, "kind", None) for error in errors] == ["server_full"]
        await server.clear_faults()
        await asyncio.gather(first, *waiting)
        await client.close()


@pytest.mark.slow
async def test_death_at_boot(tmp_path: Path) -> None:
    """The counter file says how many starts fail; each takes one off."""
    counter = tmp_path / "deaths"
    counter.write_text("1")
    with pytest.raises(RuntimeError, match="gone"):
        async with reference_server(tmp_path / "dumps", args=["--die-at-boot", str(counter)]):
            raise AssertionError("the server came up")
    assert counter.read_text() == "0"
    async with reference_server(tmp_path / "dumps", args=["--die-at-boot", str(counter)]) as server:
        assert server.process.poll() is None
