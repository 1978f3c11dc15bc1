"""Parallel servers, for real: tensor parallelism, data-parallel replicas and DP attention give what one process gives.

Every prompt equals Hugging Face in float32, whatever the chunks; each DP rank has one writer, with numbers of its own. Where a
case is `disturbed`, requests are retracted all the time, and others of several chunks are aborted or lose their client while
they are prefilled and while they wait: no dump is wrong then, and nothing stays behind.

With `test_equality` (TP 1) each pair out of {Llama, MLA}, {TP 1, TP 2} and {chunk 37, 128, 2048} is run; what a process does
with chunks depends on none of the other two, so not all twelve are.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hsx.core.epoch import lock_name, report_from_json, report_name, state_from_json, state_name
from hsx.core.marker import Marker
from hsx.testing.capture_server import RANKS_VARIABLES, CaptureServer
from hsx.testing.cut_requests import How, cut_short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from hsx.core.epoch import CaptureState
    from hsx.testing.tiny_models import Kind

    Prompts = dict[Marker, NDArray[np.int32]]

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.timeout(1800)]

TP, DP = ("--tp-size", "2"), ("--dp-size", "2")
DP_ATTENTION = (*TP, *DP, "--enable-dp-attention")
VARIABLES = {"HSX_TEST_MLA_ON_CPU": "1", **RANKS_VARIABLES}
DISTURBING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1"}
"""Every third forward retracts a request that decodes; and lost clients are looked for every second, not every four."""
VICTIM = np.random.default_rng(29).integers(5, 1000, 3100).astype(np.int32)


@dataclass(frozen=True)
class Case:
    """`arguments` for a server of `kind`, with `ranks` DP ranks of `tp` processes each."""

    kind: Kind
    arguments: tuple[str, ...]
    chunk: int
    ranks: int = 1
    tp: int = 1
    disturbed: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{''.join(self.arguments)}-{self.chunk}{'-disturbed' if self.disturbed else ''}"


CASES = [
    Case("llama", TP, 2048, tp=2),
    Case("llama", TP, 128, tp=2, disturbed=True),
    Case("dsv3", TP, 37, tp=2, disturbed=True),
    Case("llama", DP, 37, ranks=2, disturbed=True),
    Case("dsv3", DP_ATTENTION, 64, ranks=2),
]
HOWS: tuple[How, ...] = ("abort", "disconnect")
ROUNDS = 10
"""Tries to cut a prompt off in the middle: a machine that is fast enough may have finished it."""
NEW_TOKENS = 8
"""Retraction is for requests that decode."""


def states_of(server: CaptureServer, ranks: int) -> list[CaptureState]:
    return [state_from_json((server.dumps / state_name(rank)).read_text()) for rank in range(ranks)]


async def until(holds: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(300):
            while not holds():  # noqa: ASYNC110 - the event is in another process
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not within 300 s: {what}")


async def disturb(server: CaptureServer, case: Case, prompts: Prompts) -> Prompts:
    """Sends `prompts` among others that are cut short; returns those of these that were finished before that."""
    metas: dict[str, dict[str, Any]] = {}
    whole: Prompts = {}
    length = min(40 * case.chunk, 3000)
    numbers = itertools.count()
    waiting = {str(marker): ids for marker, ids in prompts.items()}
    for how in HOWS:
        for _ in range(ROUNDS):
            lost = sum(state.incomplete for state in states_of(server, case.ranks))
            victims = {
                Marker("deadbeef", next(numbers), 1, length + i): VICTIM[: length + i] for i in range(2 + 2 * case.ranks)
            }
            cut = cut_short(server, victims, how, NEW_TOKENS)
            among, _ = await asyncio.gather(server.generate(waiting, NEW_TOKENS), cut)
            metas |= among
            waiting = {}
            if how == "abort":
                # All are answered: their buffers are free, though their partial files are not given up yet.
                await until(lambda: all(not s.staged_bytes for s in states_of(server, case.ranks)), "the buffers are free")
            # Whoever comes next is served rightly, and in the end what was cut off is given up.
            after = {Marker("a11a11a1", next(numbers), 1, 60 + i): VICTIM[i : 60 + 2 * i] for i in range(2)}
            await server.generate({str(marker): ids for marker, ids in after.items()})
            whole |= after
            async with asyncio.timeout(300):
                while list(server.dumps.glob("*.part")):
                    await server.generate({f"later-{next(numbers)}": VICTIM[:50]}, settle=False)
            whole |= {marker: ids for marker, ids in victims.items() if (server.dumps / f"{marker}.safetensors").exists()}
            if sum(state.incomplete for state in states_of(server, case.ranks)) > lost:
                break
        else:
            pytest.fail(f"in {ROUNDS} rounds no prompt was cut off half-way by: {how}")
    assert sum(meta["num_retractions"] for meta in metas.values()) > 0
    return whole


def all_there(server: CaptureServer, prompts: Prompts, ranks: int) -> bool:
    states = states_of(server, ranks)
    done = sum(state.published for state in states) == len(prompts) and not any(state.staged_bytes for state in states)
    return done and all((server.dumps / f"{marker}.safetensors").exists() for marker in prompts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parallel_servers_capture_what_hugging_face_computes(
    case: Case,
    tmp_path: Path,
    sglang_python: Path,
    tiny_model: Callable[[Kind], Path],
    samples: Any,
    judge: Callable[[Path, Sequence[int], str], Any],
) -> None:
    model, prompts = tiny_model(case.kind), samples(16, 400, 1000, 2)
    variables = {**VARIABLES, **(DISTURBING if case.disturbed else {})}
    arguments = (*case.arguments, "--chunked-prefill-size", str(case.chunk))
    server = CaptureServer(sglang_python, tmp_path, model, (2, 5), arguments=arguments, variables=variables)
    with server:
        if case.disturbed:
            prompts = {**prompts, **asyncio.run(disturb(server, case, prompts))}
        else:
            asyncio.run(server.generate({str(marker): ids for marker, ids in prompts.items()}))
        there = partial(all_there, server, prompts, case.ranks)
        asyncio.run(until(there, "every dump is there and counted, and nothing is staged"))
        counted = states_of(server, case.ranks)
    reports = [report_from_json((server.dumps / report_name(rank)).read_text()) for rank in range(case.ranks)]
    assert [(r.rank, r.dp_size, r.tp_size) for r in reports] == [(rank, case.ranks, case.tp) for rank in range(case.ranks)]
    assert not (server.dumps / lock_name(case.ranks)).exists()
    assert len({state.pid for state in counted}) == case.ranks
    given: list[list[int]] = [[] for _ in range(case.ranks)]
    figures = judge(model, (2, 5), "post_norm")
    for marker, ids in prompts.items():
        header, stored, found = server.dump(marker)
        assert np.array_equal(found, ids)
        given[header.rank].append(header.sequence)
        figures.look(ids, server.dump_float32(marker), stored)
    assert [sorted(numbers) for numbers in given] == [list(range(1, len(numbers) + 1)) for numbers in given]
    assert all(given)
    assert [state.failed for state in counted] == [0] * case.ranks
    assert not list(server.dumps.glob("*.part"))
    print(figures)  # noqa: T201 - the figures are the result of this test; pytest shows them with -rP
    assert figures.worst_capture < 1e-4
    assert figures.worst_stored < 2.0**-8
    assert figures.nearest_ratio > 10
